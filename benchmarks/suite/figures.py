"""Medians, ratios and their intervals, from the seconds of rounds. Does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

DRAWS = 4000


def interval(values: Sequence[float]) -> list[float]:
    """[median, lower end, upper end] with the 95% interval from a bootstrap over rounds."""
    of = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).integers(len(of), size=(DRAWS, len(of)))
    low, high = np.quantile(np.median(of[draws], axis=1), [0.025, 0.975])
    return [round(float(value), 4) for value in (np.median(of), low, high)]


def ratios(top: Sequence[float], bottom: Sequence[float]) -> list[float]:
    """The same for the ratios within rounds."""
    return interval([a / b for a, b in zip(top, bottom, strict=True)])


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(of) for name, of in values.items()}


def settled(ratio: Sequence[float], control: Sequence[float]) -> bool:
    """Whether a ratio differs from 1 by more than its interval and by more than the A/A control."""
    median, low, high = ratio
    spread = max(abs(control[1] - 1), abs(control[2] - 1))
    return (low > 1 or high < 1) and abs(median - 1) > spread
