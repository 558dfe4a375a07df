"""Carries collectives, by torch.distributed.

Users call `collectives.py`, which calls this.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import fork_safety, mesh, wire
from paceline.comm.mesh import ALONE, Group
from paceline.comm.waits import waits

waits("wait")(dist.Work)  # also of a collective that is called without async_op, and of torch's own engines

# A message whose length the others do not know begins with its length, and the first piece has one size for all: most
# messages fit into it, and cost one collective.
_LENGTH = struct.Struct("<Q")
_FIRST_BYTES = 512
_IN_FIRST = _FIRST_BYTES - _LENGTH.size

# torch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def size_of(group: Group = None) -> int:
    """How many processes the group has; 1 where no process group was made."""
    if group is ALONE or not dist.is_available() or not dist.is_initialized():
        return 1
    return dist.get_world_size(_native(group))


def rank_of(group: Group = None) -> int:
    """This process's number in the group; 0 where no process group was made."""
    if group is ALONE or not dist.is_available() or not dist.is_initialized():
        return 0
    return dist.get_rank(_native(group))


def _native(group: Group) -> dist.ProcessGroup | None:
    """The group as torch.distributed takes it. ALONE never comes here: nothing travels in it."""
    assert not isinstance(group, mesh.OneProcess)
    return group


def backends_of(group: Group = None) -> str:
    """Which backend serves which device, such as "cpu:gloo,cuda:nccl"."""
    return str(dist.get_backend_config(_native(group)))


def all_reduce(tensor: Tensor, op: Any, group: Group) -> dist.Work:
    """In place."""
    return dist.all_reduce(tensor, op, group=_native(group), async_op=True)


def gather(tensor: Tensor, group: Group) -> list[Tensor]:
    """All processes' 1-d tensors of one size, in rank order."""
    rows = [torch.empty_like(tensor) for _ in range(size_of(group))]
    dist.all_gather(rows, tensor, group=_native(group))
    fork_safety.keep(tensor, *rows)
    return rows


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """(processes * numel,): all processes' 1-d tensors of one size, joined."""
    sent = tensor.view(torch.uint8)
    received = sent.new_empty(size_of(group) * sent.numel())
    _all_gather(received, sent, group=_native(group))
    fork_safety.keep(sent, received)
    return received.view(tensor.dtype)


def exchange(sent: Tensor, outwards: list[int], received: Tensor, inwards: list[int], group: Group) -> None:
    """All-to-all of 1-d tensors: `outwards[r]` elements to rank r, `inwards[r]` from it."""
    dist.all_to_all_single(received, sent, inwards, outwards, group=_native(group))
    fork_safety.keep(sent, received)


def gather_bytes(own: bytes, device: torch.device, group: Group) -> list[memoryview]:
    """All processes' bytes, of any lengths, in rank order. device: from which the group can send."""
    firsts = [_bytes(row) for row in gather(_first(own).to(device), group)]
    lengths = [_LENGTH.unpack_from(first)[0] for first in firsts]
    rests: Sequence[bytes] = [b""] * len(firsts)
    if (most := max(lengths)) > _IN_FIRST:
        rests = [_bytes(row) for row in gather(_filled(own[_IN_FIRST:], most - _IN_FIRST).to(device), group)]
    return [_joined(*parts) for parts in zip(lengths, firsts, rests, strict=True)]


def broadcast_bytes(own: bytes, src: int, device: torch.device, group: Group) -> memoryview:
    """The bytes of rank `src` of the world; what others pass is not looked at. device: as in `gather_bytes`."""
    first = _first(own).to(device)
    broadcast(first, src, group)
    head, rest = _bytes(first), b""
    (length,) = _LENGTH.unpack_from(head)
    if length > _IN_FIRST:
        sent = _filled(own[_IN_FIRST : _IN_FIRST + length], length - _IN_FIRST).to(device)
        broadcast(sent, src, group)
        rest = _bytes(sent)
    return _joined(length, head, rest)


def broadcast(tensor: Tensor, src: int, group: Group) -> None:
    """In place, from rank `src` of the world; a 1-d tensor of bytes."""
    dist.broadcast(tensor, src=src, group=_native(group))
    fork_safety.keep(tensor)


def barrier(device: torch.device) -> None:
    """Returns when every member of the run has come here."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def _first(message: bytes) -> Tensor:
    """The first _FIRST_BYTES that are sent of a message: its length, and its beginning."""
    return _filled(_LENGTH.pack(len(message)) + message[:_IN_FIRST], _FIRST_BYTES)


def _filled(content: bytes, size: int) -> Tensor:
    """(size,): these bytes, or as many of them, and zeros behind them."""
    return torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(wire.bytes_of(tensor))


def _joined(length: int, first: bytes, rest: bytes) -> memoryview:
    """A message of that length out of its first part and the rest."""
    return memoryview((first[_LENGTH.size :] + rest)[:length])
