"""Weights moved by their last bit, so that the size of rounding can be measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
