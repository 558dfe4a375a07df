"""Runs collectives with torch.distributed, for comm/group.py. Other modules use comm/group.py."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.comm import fork_safety, wire
from paceline.comm.waits import waits

waits("wait")(dist.Work)  # also covers collectives without async_op, and torch's own engines

# The receivers do not know a message's length, so a message begins with it. The first piece has a fixed size: most
# messages fit into it, and need only one collective.
_LENGTH = struct.Struct("<Q")
_FIRST_BYTES = 512
_IN_FIRST = _FIRST_BYTES - _LENGTH.size

# torch 2.13 renamed this function.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, op: Any, group: ProcessGroup) -> dist.Work:
    """Reduce in place."""
    return dist.all_reduce(tensor, op, group=group, async_op=True)


def gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """All processes' 1-d tensors of one size, in rank order."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, tensor, group=group)
    fork_safety.keep(tensor, *rows)
    return rows


def all_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(processes * numel,): all processes' 1-d tensors of one size, joined."""
    sent = tensor.view(torch.uint8)
    received = sent.new_empty(dist.get_world_size(group) * sent.numel())
    _all_gather(received, sent, group=group)
    fork_safety.keep(sent, received)
    return received.view(tensor.dtype)


def exchange(sent: Tensor, outwards: list[int], received: Tensor, inwards: list[int], group: ProcessGroup) -> None:
    """All-to-all of 1-d tensors: `outwards[r]` elements to rank r, `inwards[r]` from it."""
    dist.all_to_all_single(received, sent, inwards, outwards, group=group)
    fork_safety.keep(sent, received)


def gather_bytes(own: bytes, device: torch.device, group: ProcessGroup) -> list[memoryview]:
    """All processes' bytes, of any lengths, in rank order. device: a device that the group can send from."""
    firsts = [_bytes(row) for row in gather(_first(own).to(device), group)]
    lengths = [_LENGTH.unpack_from(first)[0] for first in firsts]
    rests: Sequence[bytes] = [b""] * len(firsts)
    if (most := max(lengths)) > _IN_FIRST:
        rests = [_bytes(row) for row in gather(_filled(own[_IN_FIRST:], most - _IN_FIRST).to(device), group)]
    return [_joined(*parts) for parts in zip(lengths, firsts, rests, strict=True)]


def broadcast_bytes(own: bytes, src: int, device: torch.device, group: ProcessGroup) -> memoryview:
    """The bytes of global rank `src`; other ranks' arguments are ignored. device: as in `gather_bytes`."""
    first = _first(own).to(device)
    broadcast(first, src, group)
    head, rest = _bytes(first), b""
    (length,) = _LENGTH.unpack_from(head)
    if length > _IN_FIRST:
        sent = _filled(own[_IN_FIRST : _IN_FIRST + length], length - _IN_FIRST).to(device)
        broadcast(sent, src, group)
        rest = _bytes(sent)
    return _joined(length, head, rest)


def broadcast(tensor: Tensor, src: int, group: ProcessGroup) -> None:
    """Broadcast a 1-d tensor of bytes in place, from global rank `src`."""
    dist.broadcast(tensor, src=src, group=group)
    fork_safety.keep(tensor)


def barrier(device: torch.device, group: ProcessGroup) -> None:
    """Return when every process of the group has called it. device: a device that the group can send from."""
    dist.barrier(group, device_ids=[device.index] if device.type == "cuda" else None)


def _first(message: bytes) -> Tensor:
    """The first _FIRST_BYTES of a message: its length, and its beginning."""
    return _filled(_LENGTH.pack(len(message)) + message[:_IN_FIRST], _FIRST_BYTES)


def _filled(content: bytes, size: int) -> Tensor:
    """(size,): the content, truncated or padded with zeros to `size`."""
    return torch.frombuffer(bytearray(content[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(wire.bytes_of(tensor))


def _joined(length: int, first: bytes, rest: bytes) -> memoryview:
    """Join the first part and the rest of a message of this length."""
    return memoryview((first[_LENGTH.size :] + rest)[:length])
