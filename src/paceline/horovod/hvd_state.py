"""Objects, weights and optimizer state from one process to all."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm import collectives
from paceline.errors import SettingError, UsageError
from paceline.horovod import hvd_world, named_operations
from paceline.horovod.hvd_collectives import check_root

T = TypeVar("T")


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite the tensors of every process with those of rank `root_rank`, bit for bit.

    Args:
        params: model.state_dict(), model.named_parameters() or model.parameters().
        root_rank: whose tensors they become.

    Raises:
        SettingError: something else was given.
        UsageError: the processes do not have tensors of the same names, shapes and dtypes.
    """
    check_root(root_rank, "hvd.broadcast_parameters")
    named = _named(params)
    names = [name for name, _ in named]

    def act() -> None:
        everyone = collectives.gather_objects(names)
        for rank, others in enumerate(everyone):
            if others != everyone[0]:
                differing = sorted(set(others) ^ set(everyone[0])) or ["(another order)"]
                raise UsageError(
                    f"hvd.broadcast_parameters: ranks 0 and {rank} do not have the same names; {differing[0]!r} is the "
                    "first that differs. Build the model in the same way on every process."
                )
        collectives.broadcast_tensors([tensor for _, tensor in named], root_rank)

    named_operations.call("broadcast_parameters", None, f"from rank {root_rank}", act)


def _named(params: Any) -> list[tuple[str, Tensor]]:
    """In the order of names where there are some, as Horovod's."""
    if isinstance(params, torch.nn.Module):
        raise SettingError("hvd.broadcast_parameters takes model.state_dict(), and was given the model itself.")
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, (str, bytes, Tensor)):
        named = [item if isinstance(item, tuple) else (str(n), item) for n, item in enumerate(params)]
    else:
        raise SettingError(
            f"hvd.broadcast_parameters takes model.state_dict() or model.named_parameters(), and was given "
            f"{type(params).__name__}."
        )
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise SettingError(
                f"hvd.broadcast_parameters: {name!r} is no tensor ({type(tensor).__name__}). Use hvd.broadcast_object "
                "for other values."
            )
    return named


class _Place(NamedTuple):
    """Where a tensor was, in a state that travels without its tensors."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: Any = None) -> None:
    """Give the optimizer of every process the state and the options of rank `root_rank`'s.

    A process whose optimizer has no state yet gets one without a step. (Horovod makes a step of zero gradients, in
    which weight decay changes the weights.)

    Args:
        optimizer: from torch.optim, or a DistributedOptimizer.
        root_rank: whose state it becomes.
        model: Horovod's, which is not needed.
    """
    check_root(root_rank, "hvd.broadcast_optimizer_state")
    state = optimizer.state_dict() if hvd_world.rank() == root_rank else None

    def act() -> Any:
        tensors: list[Tensor] = []
        skeleton = collectives.broadcast_object(_taken_apart(state, tensors), root_rank)
        if state is None:
            tensors.extend(torch.empty(place.shape, dtype=place.dtype) for place in _places(skeleton))
        collectives.broadcast_tensors(tensors, root_rank)
        return _put_together(skeleton, tensors)

    received = named_operations.call("broadcast_optimizer_state", None, f"from rank {root_rank}", act)
    if state is None:
        optimizer.load_state_dict(received)


def _taken_apart(value: Any, tensors: list[Tensor]) -> Any:
    """The value with a _Place for each tensor, which is put into the list, on the CPU."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return _Place(len(tensors) - 1, value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: _taken_apart(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_taken_apart(item, tensors) for item in value)
    return value


def _places(value: Any) -> list[_Place]:
    if isinstance(value, _Place):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [place for item in items for place in _places(item)]


def _put_together(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_together(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_together(item, tensors) for item in value)
    return value


def broadcast_object(obj: T, root_rank: int = 0, name: str | None = None, process_set: Any = None) -> T:
    """Rank `root_rank`'s object on every process; what others pass is not looked at. By pickle."""
    check_root(root_rank, "hvd.broadcast_object")
    hvd_world.check_process_set(process_set, "hvd.broadcast_object")
    own = hvd_world.rank() == root_rank
    sent = _pickled(obj) if own else b""
    received = named_operations.call(
        "broadcast_object",
        name,
        f"from rank {root_rank}",
        lambda: collectives.broadcast_object(sent, root_rank),
    )
    return obj if own else pickle.loads(received)


def allgather_object(obj: T, name: str | None = None) -> list[T]:
    """Every process's object, in rank order. By pickle."""
    hvd_world.members()
    sent = _pickled(obj)
    everyone = named_operations.call("allgather_object", name, "", lambda: collectives.gather_objects(sent))
    return [pickle.loads(received) for received in everyone]


def _pickled(obj: Any) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]  # as Horovod's: functions of the script travel too

    return bytes(cloudpickle.dumps(obj))
