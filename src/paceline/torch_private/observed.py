"""Private names that `paceline doctor` reads and replaces in the objects of a script.

If a name is missing, the doctor observes less, and the script still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.torch_private.support import needed_for

with needed_for("paceline doctor"):
    from torch.distributed import _functional_collectives as functional_collectives

# ------------------------------------------------------------ collectives

FUNCTIONAL_COLLECTIVES: Any = functional_collectives
"""The module of the collectives that DTensor and torch.compile call."""


_resolve: Any = getattr(functional_collectives, "_resolve_group", None)
if _resolve is None:  # older versions return only the group's name
    _resolve = functional_collectives._resolve_group_name


def group_of(group: Any, tag: str) -> Any:
    """The process group of a functional collective, given as a group, a name, a mesh dimension or a list of ranks."""
    found: Any = _resolve(group, tag)
    by_name: Callable[[Any], Any] = torch._C._distributed_c10d._resolve_process_group
    return by_name(found) if isinstance(found, str) else found


# ------------------------------------------------------------ DistributedDataParallel and FSDP

DDP_SENDS_BUFFERS = "_sync_buffers"
"""DistributedDataParallel's method that broadcasts rank 0's buffers."""
DDP_BEFORE_FORWARD, DDP_AFTER_FORWARD = "_pre_forward", "_post_forward"
"""DDP's methods that run before and after a forward. The first also assigns parameters to buckets, and communicates."""

FSDP_BEFORE_FORWARD = "_pre_forward"
"""The method of FSDP2's state that runs before a forward."""
FSDP_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""The module of FSDP2's states."""
FSDP_FUNCTIONS = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module that defines fully_shard."""
FSDP_EXPORTS = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
"""The modules that scripts import fully_shard from."""


def measured_by_ddp(module: Any) -> dict[str, Any]:
    """The measurements that DistributedDataParallel logs."""
    figures: dict[str, Any] = module._get_ddp_logging_data()
    return figures


def is_root(state: Any) -> bool:
    """Whether this is the state of FSDP2's outermost module."""
    return bool(getattr(state, "_is_root", False))


# ------------------------------------------------------------ data

with needed_for("observing data loaders"):
    from torch.utils.data._utils import worker as LOADER_WORKERS
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

WORKER_MAIN = "_worker_loop"
"""The main function of a DataLoader's worker, in LOADER_WORKERS."""
NEXT_INDEX = "_next_index"
"""The method of LoaderIterator that takes the next indices from the sampler."""


def pin_batch(batch: Any, *args: Any) -> Any:
    """Move the tensors of a batch to pinned memory, as a loader with pin_memory=True does."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch, *args)


def persistent_iterator(loader: Any) -> Any:
    """The iterator that a loader with persistent workers keeps, or None."""
    return loader._iterator


def dataset_of(iterator: Any) -> Any:
    """The data set of a DataLoader's iterator."""
    return iterator._dataset


def has_number_of_samples(sampler: Any) -> bool:
    """Whether a random sampler was made with num_samples."""
    return getattr(sampler, "_num_samples", None) is not None


# ------------------------------------------------------------ losses, loss scales, schedules


def replace_factory(name: str, replace: Callable[[], None]) -> None:
    """Replace `torch.NAME`, a function that makes tensors, by calling `replace`.

    TorchScript and `with torch.device(...)` each have a table of these functions. The table of `torch.device` must hold
    the original function, so it is built before the replacement.
    """
    from torch.jit import _builtins
    from torch.utils import _device

    getattr(_device, "_device_constructors", lambda: None)()
    replace()
    made = getattr(torch, name)
    made.__module__, made.__qualname__ = "torch", name  # used for pickling
    table = getattr(_builtins, "_builtin_table", None)
    if table is not None:  # otherwise it is built later, and will contain the replacement
        table[id(made)] = f"aten::{name}"


def saved(node: Any, name: str, otherwise: Any = None) -> Any:
    """A value that a graph node has saved for its backward, such as a loss's reduction."""
    return getattr(node, f"_saved_{name}", otherwise)


def scale_of(scaler: Any) -> float | None:
    """The loss scale of a GradScaler; None: not set yet, or disabled."""
    return float(scaler._scale) if scaler._enabled and scaler._scale is not None else None


def unscaled(scaler: Any, optimizer_ids: set[Any]) -> bool:
    """Whether the GradScaler has unscaled the gradients of one of these optimizers."""
    states = scaler._per_optimizer_states
    return any(getattr(states[o]["stage"], "value", 0) > 0 for o in optimizer_ids if o in states)


def parts_of_schedule(scheduler: Any) -> tuple[list[Any], int]:
    """The schedules of a SequentialLR, and the step at which the last schedule begins. ([], 0) for other schedulers."""
    parts = getattr(scheduler, "_schedulers", None) or []
    return list(parts), max(getattr(scheduler, "_milestones", ()), default=0)


__all__ = ["LOADER_WORKERS", "LoaderIterator"]


# ------------------------------------------------------------ operators and graphs

DDP_NODE = "_DDPSink"
"""The prefix of the name of the graph node that DistributedDataParallel adds to its outputs."""
DECOMPOSITIONS = ("_linalg_svd", "_linalg_eigh")
"""Private operators that decompose a matrix."""
NORMS_OF_MANY = "_foreach_norm"
"""The operator that computes the norms of many tensors."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
"""The namespaces of the operators that communicate."""


def direct_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The direct parameters of a module, even before its __init__ has finished."""
    return (p for p in module.__dict__.get("_parameters", {}).values() if p is not None)
