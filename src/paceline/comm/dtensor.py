"""Sharded tensors: torch's DTensors, and whole tensors of which each process brings some rows up to date.

Rows are cut as torch.chunk cuts: ceil(rows / n) for each of n processes, the last ones fewer or none. torch's DTensor
is loaded by the first strategy that shards; without one a call here costs a check of the tensor's class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from paceline.comm import transport
from paceline.comm.collectives import buckets, device_of, rank_of, size_of
from paceline.comm.mesh import Group
from paceline.torch_private.core import foreach_copy_

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Any) -> TypeGuard[Tensor]:
    """Whether it is a DTensor, of which this process may hold a local part only."""
    if type(tensor) in _PLAIN or "torch.distributed.tensor" not in sys.modules:
        return False
    return isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(type(tensor) not in _PLAIN and is_sharded(tensor) for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, in the same memory; any other tensor itself."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """(start, end): the rows of rank `rank` of `size`."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def whole_on_main(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor to the CPU of rank 0; other ranks get a tensor of its shape on "meta". Collective; while
    it runs each process holds the tensor whole on its device."""
    placements = tensor.placements  # type: ignore[attr-defined]
    if sum(not placement.is_replicate() for placement in placements) > 1:  # the outer dimension has cut last
        from torch.distributed.tensor import Replicate

        parts = [Replicate(), *placements[1:]]
        tensor = tensor.redistribute(placements=parts)  # type: ignore[attr-defined]
    full = tensor.full_tensor().detach()  # type: ignore[attr-defined]
    return full.cpu() if rank_of() == 0 else torch.empty_like(full, device="meta")


def sharded_like(own: Tensor, whole: Tensor) -> Tensor:
    """A copy of `whole`, sharded as `own` is; replicated, where it has another shape than `own`."""
    from torch.distributed.tensor import DTensor, Replicate

    from paceline.torch_private.distributed_tensor import part_of

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    part, alike = whole.detach(), whole.shape == own.shape
    if alike and not all(placement.is_replicate() for placement in placements):
        # Where several dimensions of the mesh cut one of the tensor, the last has cut first: `tensor`, then `shard`.
        for dim in reversed(range(mesh.ndim)):
            placement, size, rank = placements[dim], mesh.size(dim), mesh.get_local_rank(dim)
            if placement.is_replicate():
                continue
            if dim == mesh.ndim - 1:  # also q, k and v side by side, each of which is cut
                part = part_of(part, placement, size, rank)
            else:
                first, last = rows_of(part.size(placement.dim), rank, size)
                part = part.narrow(placement.dim, first, last - first)
        part = torch.empty_like(local(own), dtype=whole.dtype).copy_(part)
    else:
        part, placements = part.to(local(own).device, copy=True), [Replicate()] * mesh.ndim
    stride = own.stride() if alike else whole.stride()
    made: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=stride)
    return made


def gather_rows(tensors: Iterable[Tensor], group: Group = None) -> None:
    """All-gathers rows, in place, about 25 MB at a time: each rank of the group has updated its own rows of these
    tensors. All ranks pass tensors of the same shapes and dtypes in the same order."""
    size, rank = size_of(group), rank_of(group)
    if size == 1:
        return
    listed = [tensor.detach() for tensor in tensors if tensor.numel()]
    for positions in buckets(listed):
        bucket = [listed[position] for position in positions]
        each = [-(-t.size(0) // size) * t[0].numel() for t in bucket]  # elements, padded to the most of a rank
        width = sum(each)
        sent = bucket[0].new_empty(width)
        starts = [sum(each[:i]) for i in range(len(each))]
        pieces = [t[slice(*rows_of(t.size(0), rank, size))] for t in bucket]
        foreach_copy_([sent[a : a + p.numel()].view(p.shape) for a, p in zip(starts, pieces)], pieces)
        received = transport.all_gather(sent.to(device_of(group, sent.device)), group).to(sent.device).view(size, width)
        into: list[Tensor] = []
        values: list[Tensor] = []
        for t, start in zip(bucket, starts, strict=True):
            for other in range(size):
                first, last = rows_of(t.size(0), other, size)
                if other != rank and last > first:
                    into.append(t[first:last])
                    values.append(received[other, start : start + into[-1].numel()].view(into[-1].shape))
        if into:
            foreach_copy_(into, values)
