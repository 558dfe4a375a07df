"""Copies and sums between the devices of one process, of many tensors at once.

One copy for each parameter would cost a launch each, and between accelerators two events. So tensors of one dtype are
flattened into buckets of about 25 MB on the device that has them. A bucket travels as one tensor, and is split where it
arrives. Between accelerators a copy is enqueued on the current streams of both: the host waits for nothing, and what is
enqueued later on either device runs after it. Where both are one device (logical devices on a CPU) nothing is
flattened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.collectives import buckets
from paceline.torch_private.core import flatten_dense, foreach_add_, foreach_copy_, unflatten_dense


@torch.no_grad()
def copy_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """targets[i] = sources[i], in place. Dense; the sources are on one device, the targets on one, of equal shapes."""
    for positions, values in _arriving(sources, targets):
        foreach_copy_([targets[i] for i in positions], list(values))


@torch.no_grad()
def add_tensors(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """targets[i] += sources[i], in place. As for `copy_tensors`."""
    for positions, values in _arriving(sources, targets):
        foreach_add_([targets[i] for i in positions], list(values))


@torch.no_grad()
def sum_on_first(flats: Sequence[Tensor]) -> None:
    """Each device's flat tensor becomes the sum of all: by NCCL, all devices at once, where it can; else the sum is
    made on the first device, and copied back."""
    if flats[0].is_cuda and torch.cuda.nccl.is_available(flats):
        torch.cuda.nccl.all_reduce(list(flats))
        return
    first, *others = flats
    for other in others:
        first.add_(_sent(other, first.device))
    for other in others:
        other.copy_(first, non_blocking=other.device.type != "cpu")


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """(elements of all,): a new tensor, each in row-major order."""
    return flatten_dense(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Views of the parts of a flat tensor, with the shapes of these."""
    parts: Sequence[Tensor] = unflatten_dense(flat, tensors)
    return parts


def _arriving(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Iterator[tuple[list[int], Sequence[Tensor]]]:
    """Positions, and the sources' values on the targets' device."""
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
    """On a device. A host that is sent something waits for it, since it may look at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")
