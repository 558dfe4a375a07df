"""Weighted means over the processes, for averaging independent replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.group import Group, Pending
from paceline.comm.mesh import world_group
from paceline.comm.scalars import scalar, wide_dtype

LEAST = 2.0**-64
"""Replaces a weight of 0. It is too small to change a sum with a weight of 1. If all weights are 0, the result is the
plain mean."""


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float | Tensor]) -> list[Tensor]:
    """Σ weight · tensor / Σ weight over the ranks, for each tensor with its weight (>= 0).

    Returns new tensors of the same shapes, in float32 or wider, with equal bits on all ranks. The host does not wait.

    All ranks pass tensors of the same shapes, dtypes and device types. Tensors of one dtype and device are sent with
    their weights in one all-reduce.
    """
    return PendingMeans(tensors, weights).wait()


class PendingMeans:
    """A `weighted_mean` in progress. `wait` returns the means. The caller may overwrite the tensors before that.

    group: the ranks; default: all. All-reduces of one group run in order. If the caller runs other collectives before
    `wait`, they must use a different group.
    """

    def __init__(
        self, tensors: Sequence[Tensor], weights: Sequence[float | Tensor], group: Group | None = None
    ) -> None:
        group = world_group() if group is None else group
        real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
        # For each tensor: its shape as real numbers, and whether it was complex.
        self._forms = [(r.shape, t.is_complex()) for r, t in zip(real, tensors, strict=True)]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(real):
            groups.setdefault((torch.promote_types(tensor.dtype, torch.float32), tensor.device), []).append(place)
        self._parts: list[Tensor] = list(real)
        self._sums: list[tuple[Pending, list[int], Tensor]] = []
        for (dtype, device), places in groups.items():
            sizes = [real[place].numel() for place in places]
            flat = torch.empty(sum(sizes) + len(places), dtype=dtype, device=device)
            *parts, totals = flat.split([*sizes, len(places)])
            for part, place in zip(parts, places, strict=True):
                self._parts[place] = part.copy_(real[place].reshape(-1))
            if group.size > 1:
                _weigh(parts, totals, [weights[place] for place in places])
                self._sums.append((group.all_reduce(flat, async_op=True), places, totals))

    def wait(self) -> list[Tensor]:
        """Wait and return the means. Call it once."""
        for pending, places, totals in self._sums:
            pending.wait()
            for place, total in zip(places, totals.unbind(), strict=True):
                self._parts[place].div_(total)
        means = [part.view(shape) for part, (shape, _) in zip(self._parts, self._forms, strict=True)]
        return [torch.view_as_complex(m) if paired else m for m, (_, paired) in zip(means, self._forms, strict=True)]


def _weigh(parts: Sequence[Tensor], totals: Tensor, weights: Sequence[float | Tensor]) -> None:
    """Multiply each part by its weight, and write the weights into `totals`, which is sent with the parts."""
    alike: dict[int, Tensor] = {}  # most tensors share a weight
    for weight in weights:
        if id(weight) not in alike:
            alike[id(weight)] = scalar(weight, totals.dtype, totals.device).clamp(min=LEAST)
    totals.copy_(torch.stack([alike[id(weight)] for weight in weights]))
    for part, weight in zip(parts, weights, strict=True):
        part.mul_(alike[id(weight)])


def greatest_(tensors: Sequence[Tensor]) -> None:
    """Overwrite each tensor with the elementwise maximum over the ranks. Integers and booleans stay exact. On each
    device, all floating-point tensors are sent together, and all other tensors together."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        wide = wide_dtype(tensor.device) if tensor.is_floating_point() else torch.int64
        groups.setdefault((wide, tensor.device), []).append(tensor)
    if world_group().size == 1:
        return
    for (wide, _), group in groups.items():
        flat = world_group().all_reduce(torch.cat([t.detach().reshape(-1).to(wide) for t in group]), op="max")
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
