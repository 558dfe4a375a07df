"""Means over many batches and all processes, without waiting for the device at each; and a model in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.strategies.base import Weight

_FOLD_AT = 512  # batches whose values wait as they are; each is a small block of the device's memory


class Average:
    """Sum / count, both float64. What batches bring is kept as it is, and added up when someone asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._means: list[tuple[Tensor, Weight]] = []
        self._sums: list[tuple[Tensor, Weight]] = []
        self._own = torch.zeros(2, dtype=torch.float64, device=device)  # this process's, since the last `share`
        self.shared = (0.0, 0.0)  # sum and count of all processes, until the last `share`

    def add_mean(self, value: Tensor, count: Weight) -> None:
        """A mean over `count` things; what it is of no things (NaN) does not count."""
        self._means.append((value, count))
        if len(self._means) >= _FOLD_AT:
            self.fold()

    def add_sum(self, value: Tensor, count: Weight) -> None:
        """A sum over `count` things."""
        self._sums.append((value, count))
        if len(self._sums) >= _FOLD_AT:
            self.fold()

    def number(self, value: float) -> Tensor:
        """A number as `add_mean` takes it."""
        return torch.tensor(value, dtype=torch.float64)

    @torch.no_grad()
    def fold(self) -> Tensor:
        """Adds up what waits: (sum, count) of this process, a float64 tensor on the device."""
        for waiting, means in ((self._means, True), (self._sums, False)):
            if waiting:
                values = self._vector([value for value, _ in waiting])
                counts = self._vector([count for _, count in waiting])
                parts = torch.where(counts > 0, values * counts, 0.0) if means else values
                self._own += torch.stack([parts.sum(), counts.sum()])
                waiting.clear()
        return self._own

    def _vector(self, items: Sequence[Weight]) -> Tensor:
        """(len(items),) float64 on the device. Numbers, or tensors that are alike, take one operation for all."""
        tensors = [item for item in items if isinstance(item, Tensor)]
        if not tensors:
            return torch.tensor(items, dtype=torch.float64, device=self._device)
        alike = {(item.shape, item.dtype, item.device) for item in tensors}
        if len(tensors) < len(items) or len(alike) > 1:
            tensors = [torch.as_tensor(item, dtype=torch.float64, device=self._device).reshape(()) for item in items]
        return torch.stack(tensors).to(self._device, torch.float64).reshape(-1)


def share(averages: Sequence[Average]) -> list[float]:
    """The value of each over all processes, by one all-reduce; NaN where nothing was counted. All processes call it,
    with averages in the same order."""
    if not averages:
        return []
    added = collectives.all_reduce(torch.stack([average.fold() for average in averages])).tolist()
    for average, (top, count) in zip(averages, added, strict=True):
        average.shared = average.shared[0] + top, average.shared[1] + count
        average._own.zero_()
    return [top / count if count else float("nan") for top, count in (average.shared for average in averages)]


@contextmanager
def evaluating(models: Any) -> Iterator[None]:
    """Models (one, or a tuple, list or dict of them) in evaluation mode and without gradients; then as they were,
    module by module."""
    modes = [(module, module.training) for model in _models(models) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _models(tree: Any) -> Iterator[nn.Module]:
    if isinstance(tree, nn.Module):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from _models(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from _models(item)
