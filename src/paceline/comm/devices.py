"""Copies and sums of many tensors between the devices of one process.

A separate copy costs a kernel launch, and two events if it is between accelerators. To save these, tensors of one dtype
are flattened into buckets of about 25 MB on the source device, sent as one tensor, and split on the target device.
Between accelerators a copy is enqueued on the current streams of both: the host does not wait, and work enqueued later
on either device runs after the copy. If source and target are the same device (logical devices on a CPU), tensors are
not flattened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.group import buckets
from paceline.torch_private.core import flatten_dense, foreach_add_, foreach_copy_, unflatten_dense


@torch.no_grad()
def copy_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy sources[i] into targets[i]. They are dense and have equal shapes.

    All sources are on one device, and all targets are on one device.
    """
    for positions, values in _arriving(sources, targets):
        foreach_copy_([targets[i] for i in positions], list(values))


@torch.no_grad()
def add_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Add sources[i] to targets[i], in place. Same requirements as `copy_tensors`."""
    for positions, values in _arriving(sources, targets):
        foreach_add_([targets[i] for i in positions], list(values))


@torch.no_grad()
def sum_on_first(flats: Sequence[Tensor]) -> None:
    """Replace each device's flat tensor by the sum of all. Uses NCCL on all devices at once if possible; otherwise adds
    on the first device and copies back."""
    if flats[0].is_cuda and torch.cuda.nccl.is_available(flats):
        torch.cuda.nccl.all_reduce(list(flats))
        return
    first, *others = flats
    for other in others:
        first.add_(_sent(other, first.device))
    for other in others:
        other.copy_(first, non_blocking=other.device.type != "cpu")


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors into a new tensor (total elements,), each in row-major order."""
    return flatten_dense(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split a flat tensor into views with the shapes of `tensors`."""
    parts: Sequence[Tensor] = unflatten_dense(flat, tensors)
    return parts


def _arriving(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[list[int], Sequence[Tensor]]]:
    """Yield positions in `sources`, with the values of those sources on the targets' device."""
    if not sources:
        return
    device = targets[0].device
    if _on_one_device(sources[0], targets[0]):
        yield list(range(len(sources))), sources
        return
    for positions in buckets(sources):
        chosen = [sources[i] for i in positions]
        yield positions, unflatten(_sent(flatten(chosen), device), chosen)


def _on_one_device(source: Tensor, target: Tensor) -> bool:
    return source.device == target.device


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device. A copy to the CPU is blocking, since the host may read the values at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")
