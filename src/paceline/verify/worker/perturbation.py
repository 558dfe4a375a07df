"""Rounding moved on purpose, so that its size can be measured: weights by their last bit, losses by a factor in the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch


def nudge_weights(models: Sequence[dict[str, Any]], parameters: Collection[str], seed: int) -> None:
    """Move each weight in 32 bits or more to one of its two neighbours among floating-point numbers."""
    draw = torch.Generator().manual_seed(seed)
    for number, state in enumerate(models):
        for name, value in state.items():
            if (f"{number}/{name}" if number else name) in parameters and value.dtype in (torch.float32, torch.float64):
                up = torch.rand(value.shape, generator=draw, dtype=value.dtype) < 0.5
                state[name] = torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))


class ScaledPrecision:
    """The precision of a run, with losses times 0.75 in the backward: this moves the place at which numbers are
    rounded.

    whether: called each time, since a hook on a gradient need not be linear.
    """

    def __init__(self, precision: Any, whether: Callable[[], bool]) -> None:
        self._precision, self._whether = precision, whether

    @property
    def loss_scale(self) -> float:
        scale: float = self._precision.loss_scale
        return scale * 0.75 if self._whether() else scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)
