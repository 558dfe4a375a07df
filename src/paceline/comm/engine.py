"""What carries collectives: torch.distributed's group of the whole world, or a channel in its place (channel.py).

`collectives.py` is what everyone calls, and this what it calls. Where no group is given the whole world is meant:
within `among` the thread's group, else the channel's members where one is in use.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import forks, wire
from paceline.comm.channel import Channel, Handover, Phase
from paceline.errors import UsageError

_channel: Channel | None = None


def use(channel: Channel | None) -> None:
    """From now on what concerns the whole world goes through this channel, between its members; with None through
    torch.distributed again."""
    global _channel
    _channel = channel


def channel() -> Channel | None:
    """The channel in use."""
    return _channel


def enter(phase: Phase, meet: bool = False, loader: str | None = None) -> bool:
    """Tells a channel where the program is (Channel.enter)."""
    return True if _channel is None else _channel.enter(phase, meet, loader)


def hand_over_by(handover: Handover) -> None:
    """Tells a channel, if there is one, who knows where the run is."""
    if _channel is not None:
        _channel.handover = handover


def arrive() -> None:
    """Where the run's epochs begin (Channel.arrive)."""
    if _channel is not None:
        _channel.arrive()


def arriving() -> bool:
    """Whether this process has come to a run under way, and has not been let in yet."""
    return _channel is not None and _channel.arriving


_thread = threading.local()


def group_here() -> dist.ProcessGroup | None:
    """The group that stands for the world in this thread; None: the world itself."""
    group: dist.ProcessGroup | None = getattr(_thread, "group", None)
    return group


@contextlib.contextmanager
def among(group: dist.ProcessGroup | None) -> Iterator[None]:
    """In this thread, within the block, sums, gathers and comparisons of the whole world are those of this group (None:
    the world)."""
    before, _thread.group = group_here(), group
    try:
        yield
    finally:
        _thread.group = before


def size_of(group: dist.ProcessGroup | None = None) -> int:
    """How many processes the group has (None: the world); 1 where no process group was made."""
    group = group or group_here()
    if group is None and _channel is not None:
        return _channel.size
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def rank_of(group: dist.ProcessGroup | None = None) -> int:
    """This process's number in the group (None: the world); 0 where no process group was made."""
    group = group or group_here()
    if group is None and _channel is not None:
        return _channel.rank
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def backends_of(group: dist.ProcessGroup | None = None) -> str:
    """Which backend serves which device, such as "cpu:gloo,cuda:nccl"; a channel sends from the CPU."""
    group = group or group_here()
    if group is None and _channel is not None:
        return "cpu:channel"
    return str(dist.get_backend_config(group))


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup | None) -> dist.Work | None:
    """In place. Through a channel all members' tensors are added in rank order, and it is done at once."""
    channel, group = _here(group)
    if channel is None:
        return dist.all_reduce(tensor, op, group=group, async_op=True)
    rows = _rows(channel, tensor)
    total = rows[0].view(tensor.shape)
    for row in rows[1:]:
        total = _COMBINED[op](total, row.view(tensor.shape))
    tensor.copy_(total)
    return None


def gather(tensor: Tensor) -> list[Tensor]:
    """All processes' 1-d tensors of one size, in rank order."""
    channel, group = _here()
    if channel is not None:
        return _rows(channel, tensor)
    rows = [torch.empty_like(tensor) for _ in range(size_of(group))]
    dist.all_gather(rows, tensor, group=group)
    forks.keep(tensor, *rows)
    return rows


def gather_objects(obj: Any) -> list[Any]:
    channel, group = _here()
    if channel is not None:
        return [pickle.loads(memory) for memory in channel.exchange([pickle.dumps(obj)])]
    objects: list[Any] = [None] * size_of(group)
    dist.all_gather_object(objects, obj, group=group)
    return objects


def broadcast_object(obj: Any, src: int, device: torch.device) -> Any:
    channel, group = _here()
    if channel is not None:
        return pickle.loads(channel.exchange([pickle.dumps(obj)] if channel.rank == src else [])[src])
    box = [obj]
    dist.broadcast_object_list(box, src=src, device=device, group=group)
    return box[0]


def broadcast(tensor: Tensor, src: int) -> None:
    """In place; a 1-d tensor of bytes."""
    channel, group = _here()
    if channel is not None:
        memory = channel.exchange(wire.slices(wire.bytes_of(tensor)) if channel.rank == src else [])[src]
        tensor.copy_(wire.tensor_of(memory, tensor.dtype))
        return
    dist.broadcast(tensor, src=src, group=group)
    forks.keep(tensor)


def barrier(device: torch.device) -> None:
    channel, group = _here()
    if channel is not None:
        channel.exchange()
    else:
        dist.barrier(group=group, device_ids=[device.index] if device.type == "cuda" else None)


def _here(group: dist.ProcessGroup | None = None) -> tuple[Channel | None, dist.ProcessGroup | None]:
    """What carries a call to this group: the channel, or (None, a group of torch.distributed)."""
    group = group or group_here()
    return (_channel, None) if group is None else (None, group)


def _rows(channel: Channel, tensor: Tensor) -> list[Tensor]:
    """All members' tensors, flat, through the channel."""
    found = channel.exchange(wire.slices(wire.bytes_of(tensor)))
    if any(len(memory) != tensor.nbytes for memory in found):
        raise UsageError(
            f"the processes give tensors of different sizes ({', '.join(str(len(memory)) for memory in found)} bytes). "
            "Make the same calls, with the same shapes and dtypes, on all of them."
        )
    return [wire.tensor_of(memory, tensor.dtype).to(tensor.device) for memory in found]


_COMBINED: dict[Any, Any] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.PRODUCT: torch.mul,
}
