"""What the doctor reads, and replaces, of a foreign script's objects.

The doctor watches what it finds: where a name is missing, something is not seen, and the script runs on.
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
if _resolve is None:  # older versions find the name
    _resolve = functional_collectives._resolve_group_name


def group_of(group: Any, tag: str) -> Any:
    """The process group that a functional collective was given: by itself, by name, as a mesh's dimension or a list of
    ranks."""
    found: Any = _resolve(group, tag)
    by_name: Callable[[Any], Any] = torch._C._distributed_c10d._resolve_process_group
    return by_name(found) if isinstance(found, str) else found


# ------------------------------------------------------------ DistributedDataParallel and FSDP

DDP_SENDS_BUFFERS = "_sync_buffers"
"""DistributedDataParallel's method that sends rank 0's buffers."""
DDP_BEFORE_FORWARD, DDP_AFTER_FORWARD = "_pre_forward", "_post_forward"
"""Its methods before and after a forward: in the former it lays its buckets out, which communicates."""

FSDP_BEFORE_FORWARD = "_pre_forward"
"""The method of FSDP2's state before a forward."""
FSDP_STATES = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""The module of FSDP2's states."""
FSDP_FUNCTIONS = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module that defines fully_shard."""
FSDP_EXPORTS = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
"""The modules from which scripts import it."""


def measured_by_ddp(module: Any) -> dict[str, Any]:
    """DistributedDataParallel's own measurements."""
    figures: dict[str, Any] = module._get_ddp_logging_data()
    return figures


def is_root(state: Any) -> bool:
    """Is this the state of FSDP2's outermost module?"""
    return bool(getattr(state, "_is_root", False))


# ------------------------------------------------------------ data

with needed_for("watching data loaders"):
    from torch.utils.data._utils import worker as LOADER_WORKERS
    from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

WORKER_MAIN = "_worker_loop"
"""What a worker of a DataLoader runs, in LOADER_WORKERS."""
NEXT_INDEX = "_next_index"
"""The method of LoaderIterator that takes the next indices from the sampler."""


def persistent_iterator(loader: Any) -> Any:
    """The iterator that a loader with persistent workers keeps; None: it keeps none."""
    return loader._iterator


def dataset_of(iterator: Any) -> Any:
    """What an iterator of a DataLoader reads."""
    return iterator._dataset


def has_number_of_samples(sampler: Any) -> bool:
    """Was a random sampler told how many examples to draw?"""
    return getattr(sampler, "_num_samples", None) is not None


# ------------------------------------------------------------ losses, loss scales, schedules


def replace_factory(name: str, replace: Callable[[], None]) -> None:
    """Replace `torch.NAME`, a function that makes tensors. TorchScript and `with torch.device(...)` look it up in
    tables of their own. The latter's is made first, since it must hold the original.
    """
    from torch.jit import _builtins
    from torch.utils import _device

    getattr(_device, "_device_constructors", lambda: None)()
    replace()
    made = getattr(torch, name)
    made.__module__, made.__qualname__ = "torch", name  # by which it is pickled
    table = getattr(_builtins, "_builtin_table", None)
    if table is not None:  # otherwise it is made later, of what torch holds then
        table[id(made)] = f"aten::{name}"


def saved(node: Any, name: str, otherwise: Any = None) -> Any:
    """What a node of a graph has kept for its backward, such as a loss's reduction."""
    return getattr(node, f"_saved_{name}", otherwise)


def scale_of(scaler: Any) -> float | None:
    """What a GradScaler multiplies losses by; None: nothing yet, or it is switched off."""
    return float(scaler._scale) if scaler._enabled and scaler._scale is not None else None


def unscaled(scaler: Any, optimizer_ids: set[Any]) -> bool:
    """Has it divided the gradients of one of these optimizers again?"""
    states = scaler._per_optimizer_states
    return any(getattr(states[o]["stage"], "value", 0) > 0 for o in optimizer_ids if o in states)


def parts_of_schedule(scheduler: Any) -> tuple[list[Any], int]:
    """A sequence's schedules, and after how many steps its last begins; no schedules: it is none."""
    parts = getattr(scheduler, "_schedulers", None) or []
    return list(parts), max(getattr(scheduler, "_milestones", ()), default=0)


__all__ = ["LOADER_WORKERS", "LoaderIterator"]


# ------------------------------------------------------------ operators and graphs

DDP_NODE = "_DDPSink"
"""The beginning of the name of the node that DistributedDataParallel puts around its outputs."""
DECOMPOSITIONS = ("_linalg_svd", "_linalg_eigh")
"""Operators that decompose a matrix, beside the public ones."""
NORMS_OF_MANY = "_foreach_norm"
"""The operator that takes the norms of many tensors."""
COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
"""The namespaces of the operators that communicate."""


def own_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of a module itself, also of one that is half made."""
    return (p for p in module.__dict__.get("_parameters", {}).values() if p is not None)
