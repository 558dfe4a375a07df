"""Means over many batches and all processes, without waiting for the device at each; and a model in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives
from paceline.comm.collectives import data_group
from paceline.strategies.base import Weight
from paceline.train.weighted_sum import WeightedSum, upload, wide_dtype

_CHANGED = "a loss or metric was changed in place after it was returned. Return a new tensor, or a clone."


class Average:
    """Sum / count. What batches bring is added up when someone asks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = WeightedSum(device, _CHANGED)  # this process's, since the last `share`
        self.shared = (0.0, 0.0)  # sum and count of all processes, until the last `share`

    def add_mean(self, value: Any, count: Weight) -> None:
        """A mean over `count` things, a number or 0-dim tensor; what it is of no things (NaN) does not count."""
        self._own.add(value, count)

    def add_sum(self, value: Tensor, count: Weight) -> None:
        """A sum over `count` things."""
        self._own.add(value, count, summed=True)

    def take(self) -> Tensor:
        """(sum, count, rest of the sum) of this process, float64, on the device; it starts anew."""
        self._own.fold()
        triple = upload(torch.tensor(self._own.host, dtype=wide_dtype(self._device)), self._device)
        if self._own.device is not None:
            triple = triple + self._own.device
        self._own.clear()
        return triple


def share(averages: Sequence[Average]) -> list[float]:
    """The value of each over all processes, by one all-reduce; NaN where nothing was counted. All processes call it,
    with averages in the same order."""
    if not averages:
        return []
    taken = torch.stack([average.take() for average in averages])
    added = collectives.all_reduce(taken, group=data_group()).tolist()
    for average, (top, count, rest) in zip(averages, added, strict=True):
        average.shared = average.shared[0] + (top + rest), average.shared[1] + count
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
