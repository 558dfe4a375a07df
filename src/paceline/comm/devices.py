"""Between the devices of one process: many tensors at once.

A copy for each parameter costs a launch, and between accelerators two events, each. So tensors of one dtype are laid
side by side on the device that has them, about `BUCKET_BYTES` at a time; each such bucket travels as one, and is taken
apart where it arrives. Between accelerators a copy is enqueued on the current streams of both: the host waits for
nothing, and what follows on either device comes after it. Where both are one device (logical devices on a CPU) nothing
is laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.comm.collectives import BUCKET_BYTES
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


def buckets(tensors: Sequence[Tensor], most_bytes: int = BUCKET_BYTES) -> Iterator[list[int]]:
    """Positions of tensors of one dtype, in order, that have `most_bytes` together, or one that has more."""
    filling: dict[torch.dtype, list[int]] = {}
    held: dict[torch.dtype, int] = {}
    for i, tensor in enumerate(tensors):
        kind = tensor.dtype
        if kind in filling and held[kind] + tensor.nbytes > most_bytes:
            yield filling.pop(kind)
            held[kind] = 0
        filling.setdefault(kind, []).append(i)
        held[kind] = held.get(kind, 0) + tensor.nbytes
    yield from filling.values()


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
