"""Weighted means over the processes, for independent replicas that are averaged now and then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Group
from paceline.comm.scalars import scalar, wide_dtype

LEAST = 2.0**-64
"""Replaces a weight of 0: beside a weight of 1 it changes no floating-point sum, and where all weights are 0 the result
is the plain mean."""


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float | Tensor]) -> list[Tensor]:
    """Σ weight · tensor / Σ weight over the ranks, of each tensor with its own weight (from 0 on): new tensors of the
    same shapes, in float32 or wider, the same bits on all ranks. Waits for nothing on the host.

    All ranks pass as many tensors, of the same shapes, dtypes and kinds of device. Those of one dtype and device travel
    together, with their weights, in one all-reduce.
    """
    return PendingMeans(tensors, weights).wait()


class PendingMeans:
    """A `weighted_mean` under way: `wait` returns the means. The tensors may be overwritten meanwhile.

    group: all-reduces of one group keep their order. Where the caller makes other collectives before `wait`, this is a
    group that these do not use.
    """

    def __init__(self, tensors: Sequence[Tensor], weights: Sequence[float | Tensor], group: Group = None) -> None:
        real = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
        # Of each: its shape as real numbers, and whether these are the pairs of a complex tensor.
        self._forms = [(r.shape, t.is_complex()) for r, t in zip(real, tensors, strict=True)]
        groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(real):
            groups.setdefault((torch.promote_types(tensor.dtype, torch.float32), tensor.device), []).append(place)
        self._parts: list[Tensor] = list(real)
        self._sums: list[tuple[collectives.Pending, list[int], Tensor]] = []
        for (dtype, device), places in groups.items():
            sizes = [real[place].numel() for place in places]
            flat = torch.empty(sum(sizes) + len(places), dtype=dtype, device=device)
            *parts, totals = flat.split([*sizes, len(places)])
            for part, place in zip(parts, places, strict=True):
                self._parts[place] = part.copy_(real[place].reshape(-1))
            if collectives.size_of(group) > 1:
                _weigh(parts, totals, [weights[place] for place in places])
                self._sums.append((collectives.all_reduce(flat, group=group, async_op=True), places, totals))

    def wait(self) -> list[Tensor]:
        """Called once."""
        for pending, places, totals in self._sums:
            pending.wait()
            for place, total in zip(places, totals.unbind(), strict=True):
                self._parts[place].div_(total)
        means = [part.view(shape) for part, (shape, _) in zip(self._parts, self._forms, strict=True)]
        return [torch.view_as_complex(m) if paired else m for m, (_, paired) in zip(means, self._forms, strict=True)]


def _weigh(parts: Sequence[Tensor], totals: Tensor, weights: Sequence[float | Tensor]) -> None:
    """Multiplies each part by its weight. totals: where the weights travel."""
    alike: dict[int, Tensor] = {}  # most tensors share a weight
    for weight in weights:
        if id(weight) not in alike:
            alike[id(weight)] = scalar(weight, totals.dtype, totals.device).clamp(min=LEAST)
    totals.copy_(torch.stack([alike[id(weight)] for weight in weights]))
    for part, weight in zip(parts, weights, strict=True):
        part.mul_(alike[id(weight)])


def greatest_(tensors: Sequence[Tensor]) -> None:
    """Overwrites each tensor with the greatest value that a rank has, element by element. Whole numbers and booleans
    stay what they are; all of one kind travel together."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        wide = wide_dtype(tensor.device) if tensor.is_floating_point() else torch.int64
        groups.setdefault((wide, tensor.device), []).append(tensor)
    if collectives.size_of() == 1:
        return
    for (wide, _), group in groups.items():
        flat = collectives.all_reduce(torch.cat([t.detach().reshape(-1).to(wide) for t in group]), op="max")
        for tensor, part in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(part.view(tensor.shape))
