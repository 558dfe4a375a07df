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
from paceline.comm.mesh import Mesh, world_group
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
    full = whole(tensor).detach()
    return full.cpu() if world_group().rank == 0 else torch.empty_like(full, device="meta")


def whole(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor on every process. Collective. Any other tensor is returned unchanged."""
    if not is_sharded(tensor):
        return tensor
    placements = tensor.placements  # type: ignore[attr-defined]
    if sum(not placement.is_replicate() for placement in placements) > 1:  # the outer dimension was sharded last
        from torch.distributed.tensor import Replicate

        parts = [Replicate(), *placements[1:]]
        tensor = tensor.redistribute(placements=parts)  # type: ignore[attr-defined]
    found: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return found


def sharded_like(own: Tensor, whole: Tensor) -> Tensor:
    """A copy of `whole`, sharded like `own`; replicated if its shape differs."""
    from torch.distributed.tensor import DTensor, Replicate

    if whole.shape == own.shape and is_cut(own):
        made = empty_like(own, whole.dtype)
        local(made).copy_(_part(own, whole.detach()))
        return made
    mesh: Any = own.device_mesh  # type: ignore[attr-defined]
    stride = own.stride() if whole.shape == own.shape else whole.stride()
    part, placements = whole.detach().to(local(own).device, copy=True), [Replicate()] * mesh.ndim
    whole_everywhere: Tensor = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=whole.shape, stride=stride
    )
    return whole_everywhere


def empty_like(own: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor of this dtype, sharded like `own`, with undefined values."""
    from torch.distributed.tensor import DTensor

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    part = torch.empty_like(local(own), dtype=dtype)
    made: Tensor = DTensor.from_local(part, mesh, placements, run_check=False, shape=own.shape, stride=own.stride())
    return made


def is_cut(tensor: Tensor) -> bool:
    """Whether this is a sharded tensor whose parts differ between processes, not a replicated one."""
    return is_sharded(tensor) and not all(
        placement.is_replicate()
        for placement in tensor.placements  # type: ignore[attr-defined]
    )


def is_first_copy(tensor: Tensor, mesh: Mesh) -> bool:
    """Whether this process is the first of all processes that have the same part of a sharded tensor."""
    names = tensor.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
    cut = {
        name
        for name, placement in zip(names, tensor.placements, strict=True)  # type: ignore[attr-defined]
        if not placement.is_replicate()
    }
    return all(coordinate == 0 for name, coordinate in mesh.coordinates.items() if name not in cut)


def runs_of(tensor: Tensor, dim: int) -> list[tuple[int, int, int]]:
    """The indices along one dimension of a sharded tensor that this process has.

    Returns runs of consecutive indices: (the first index in the whole tensor, the first in the local tensor, length).
    """
    shape = [1] * tensor.dim()
    shape[dim] = -1
    indices = _part(tensor, torch.arange(tensor.size(dim), device="cpu").view(shape), dim).flatten()
    if not len(indices):
        return []
    starts = [0, *((indices.diff() != 1).nonzero().flatten() + 1).tolist()]
    return [
        (int(indices[start]), start, end - start)
        for start, end in zip(starts, [*starts[1:], len(indices)], strict=True)
    ]


def _part(own: Tensor, whole: Tensor, only: int | None = None) -> Tensor:
    """The part of `whole` that this process has of a tensor sharded like `own`. A view if possible.

    only: cut along this dimension of the tensor only.
    """
    from paceline.torch_private.distributed_tensor import part_of

    mesh, placements = own.device_mesh, own.placements  # type: ignore[attr-defined]
    # If several mesh dimensions shard one tensor dimension, the last was applied first: `tensor`, then `shard`.
    for dim in reversed(range(mesh.ndim)):
        placement, size, rank = placements[dim], mesh.size(dim), mesh.get_local_rank(dim)
        if placement.is_replicate() or (only is not None and placement.dim != only):
            continue
        if dim == mesh.ndim - 1:  # also handles q, k and v in one tensor, each sharded separately
            whole = part_of(whole, placement, size, rank)
        else:
            first, last = rows_of(whole.size(placement.dim), rank, size)
            whole = whole.narrow(placement.dim, first, last - first)
    return whole


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
