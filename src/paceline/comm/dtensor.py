"""Sharded tensors: torch's DTensors, and whole tensors with rows that different processes update.

Rows are split like torch.chunk: each of n processes gets ceil(rows / n), and the last processes get fewer or none. The
first strategy that shards imports torch's DTensor. Before that, `is_sharded` only checks the tensor's class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from paceline.comm.group import Group, buckets
from paceline.comm.mesh import world_group
from paceline.torch_private.core import foreach_copy_

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Any) -> TypeGuard[Tensor]:
    """Whether the tensor is a DTensor, so that this process may hold only a local part."""
    if type(tensor) in _PLAIN or "torch.distributed.tensor" not in sys.modules:
        return False
    return isinstance(tensor, sys.modules["torch.distributed.tensor"].DTensor)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    return any(type(tensor) not in _PLAIN and is_sharded(tensor) for tensor in tensors)


def local(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor, which shares its memory. Any other tensor is returned unchanged."""
    if type(tensor) in _PLAIN or not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part


def rows_of(rows: int, rank: int, size: int) -> tuple[int, int]:
    """(start, end): the rows of rank `rank` if `rows` rows are split over `size` ranks."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def whole_on_main(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor to the CPU of rank 0; other ranks get a tensor of its shape on "meta".

    Collective. Meanwhile each process holds the whole tensor on its device.
    """
    placements = tensor.placements  # type: ignore[attr-defined]
    if sum(not placement.is_replicate() for placement in placements) > 1:  # the outer dimension was sharded last
        from torch.distributed.tensor import Replicate

        parts = [Replicate(), *placements[1:]]
        tensor = tensor.redistribute(placements=parts)  # type: ignore[attr-defined]
    full = tensor.full_tensor().detach()  # type: ignore[attr-defined]
    return full.cpu() if world_group().rank == 0 else torch.empty_like(full, device="meta")


def sharded_like(own: Tensor, whole: Tensor) -> Tensor:
    """A copy of `whole`, sharded like `own`; replicated if its shape differs."""
    from torch.distributed.tensor import DTensor, Replicate

    from paceline.torch_private.distributed_tensor import part_of

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    part, alike = whole.detach(), whole.shape == own.shape
    if alike and not all(placement.is_replicate() for placement in placements):
        # If several mesh dimensions shard one tensor dimension, the last was applied first: `tensor`, then `shard`.
        for dim in reversed(range(mesh.ndim)):
            placement, size, rank = placements[dim], mesh.size(dim), mesh.get_local_rank(dim)
            if placement.is_replicate():
                continue
            if dim == mesh.ndim - 1:  # also handles q, k and v in one tensor, each sharded separately
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


def gather_rows(tensors: Iterable[Tensor], group: Group) -> None:
    """All-gather rows in place, about 25 MB at a time. Each rank of the group has updated its rows of these tensors.

    All ranks pass tensors of the same shapes and dtypes in the same order.
    """
    size, rank = group.size, group.rank
    if size == 1:
        return
    listed = [tensor.detach() for tensor in tensors if tensor.numel()]
    for positions in buckets(listed):
        bucket = [listed[position] for position in positions]
        each = [-(-t.size(0) // size) * t[0].numel() for t in bucket]  # elements, padded to the largest share
        width = sum(each)
        sent = bucket[0].new_empty(width)
        starts = [sum(each[:i]) for i in range(len(each))]
        pieces = [t[slice(*rows_of(t.size(0), rank, size))] for t in bucket]
        foreach_copy_([sent[a : a + p.numel()].view(p.shape) for a, p in zip(starts, pieces)], pieces)
        received = group.all_gather(sent).view(size, width)
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
