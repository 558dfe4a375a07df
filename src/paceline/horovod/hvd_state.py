"""Broadcast objects, weights and optimizer state from one process to all."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline import plain_state
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError
from paceline.horovod import hvd_world, named_operations
from paceline.horovod.hvd_collectives import check_root, form_of

T = TypeVar("T")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite the tensors of every process with those of rank `root_rank`, bit for bit.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters().
        root_rank: the source.

    Raises:
        SettingError: `params` has another type.
        UsageError: names, shapes or dtypes differ between processes.
    """
    check_root(root_rank, "hvd.broadcast_parameters")
    named = _named(params)
    named_operations.call(
        "broadcast_parameters",
        None,
        [f"from rank {root_rank}", *(f"{name!r}, {form_of(tensor)}" for name, tensor in named)],
        lambda: world_group().broadcast_tensors([tensor for _, tensor in named], root_rank),
        None,
        "Build the model in the same way on every process.",
    )


def _named(params: Any) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) pairs. The pairs of a mapping are sorted by name, as in Horovod."""
    if isinstance(params, torch.nn.Module):
        raise SettingError("hvd.broadcast_parameters received the model itself. Pass model.state_dict().")
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        named = [item if isinstance(item, tuple) else (str(n), item) for n, item in enumerate(params)]
    else:
        raise SettingError(
            f"hvd.broadcast_parameters received {type(params).__name__}. Pass model.state_dict() or "
            f"model.named_parameters()."
        )
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise SettingError(
                f"hvd.broadcast_parameters: {name!r} is not a tensor ({type(tensor).__name__}). Use "
                "hvd.broadcast_object for other values."
            )
    return named


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: Any = None) -> None:
    """Broadcast the optimizer's state and options from rank `root_rank` to every process.

    An optimizer without state receives it without taking a step. (Horovod takes a step with zero gradients, and its
    weight decay changes the weights.)

    Args:
        optimizer: from torch.optim, or a DistributedOptimizer.
        root_rank: the source.
        model: ignored; for compatibility with Horovod.
    """
    check_root(root_rank, "hvd.broadcast_optimizer_state")
    state = optimizer.state_dict() if hvd_world.rank() == root_rank else None

    def act() -> Any:
        return world_group().broadcast(state, root_rank, what="the state of hvd.broadcast_optimizer_state")

    received = named_operations.call("broadcast_optimizer_state", None, [f"from rank {root_rank}"], act)
    if state is None:
        optimizer.load_state_dict(received)


# --- objects

PICKLE = "PACELINE_HOROVOD_PICKLE"
"""Environment variable: 1 allows sending objects of any class between machines, as pickles."""

_Sent = tuple[str, Any]  # "plain" and the object, or "pickle" and its bytes


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> T:
    """Return rank `root_rank`'s object on every process. The `obj` of other processes is ignored.

    Numbers, strings, bytes, tensors, NumPy arrays, and lists, tuples, sets and dicts of these are sent without pickle
    (received tensors are on the CPU). Objects of other classes are pickled, as Horovod does with all objects.

    Raises:
        UsageError: an object would be pickled, but the processes are on several machines: anyone who can write to their
            connections could run code in them. PACELINE_HOROVOD_PICKLE=1 allows it.
    """
    check_root(root_rank, "hvd.broadcast_object")
    hvd_world.check_process_set(process_set, "hvd.broadcast_object")
    own = hvd_world.rank() == root_rank
    sent = _to_send(obj, "hvd.broadcast_object(obj)") if own else None
    received = named_operations.call(
        "broadcast_object",
        name,
        [f"from rank {root_rank}"],
        lambda: world_group().broadcast(sent, root_rank),
    )
    return obj if own else _received(received, "hvd.broadcast_object")


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Return every process's object, in rank order. Objects are sent as in `broadcast_object`, with the same error."""
    hvd_world.members()
    sent = _to_send(obj, "hvd.allgather_object(obj)")
    everyone = named_operations.call("allgather_object", name, [], lambda: world_group().gather(sent))
    return [_received(received, "hvd.allgather_object") for received in everyone]


def _to_send(obj: Any, what: str) -> _Sent:
    try:
        plain_state.encode(obj, what, sent=True)
    except UsageError as error:
        if not _may_pickle():
            raise UsageError(f"{error} Or set {PICKLE}=1 on all machines, if only you can reach them.") from None
        import cloudpickle  # type: ignore[import-untyped]  # as in Horovod, to send functions of the script too

        return "pickle", bytes(cloudpickle.dumps(obj))
    return "plain", obj


def _received(sent: _Sent, call: str) -> Any:
    kind, value = sent
    if kind == "plain":
        return value
    if not _may_pickle():
        raise UsageError(f"{call}: received a pickle from another machine. Set {PICKLE}=1 on all machines, or on none.")
    return pickle.loads(value)


def _may_pickle() -> bool:
    """Return whether all processes are on one machine, or the user allows pickles."""
    return hvd_world.cross_size() == 1 or os.environ.get(PICKLE) == "1"
