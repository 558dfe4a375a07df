"""Medians, ratios and their intervals, from the seconds of rounds. Does not import torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

DRAWS = 4000


Launches = Sequence[Sequence[float]]
"""A value of each round, for each launch of the contenders."""


def interval(launches: Launches) -> list[float]:
    """[value, lower end, upper end]: the mean over launches of the median over rounds, with its 95% interval.

    The interval comes from a bootstrap over launches, and over the rounds of each: two launches of the same program
    differ by more than the rounds of one.
    """
    draw = np.random.default_rng(0)
    every = [np.asarray(launch, dtype=np.float64) for launch in launches]
    medians = []
    for of in every:
        drawn = of[draw.integers(len(of), size=(DRAWS, len(of)))]
        medians.append(np.median(drawn, axis=1))
    chosen = draw.integers(len(every), size=(DRAWS, len(every)))
    means = np.stack(medians, axis=1)[np.arange(DRAWS)[:, None], chosen].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [round(float(value), 4) for value in (middle(launches), low, high)]


def middle(launches: Launches) -> float:
    """The mean over launches of the median over rounds."""
    return statistics.mean(map(statistics.median, launches))


def ratios(top: Launches, bottom: Launches) -> list[float]:
    """The interval of the ratios within rounds."""
    pairs = zip(top, bottom, strict=True)
    return interval([[a / b for a, b in zip(above, below, strict=True)] for above, below in pairs])


def settled(ratio: Sequence[float], control: Sequence[float]) -> bool:
    """Whether a ratio differs from 1 by more than its interval and by more than the A/A control."""
    median, low, high = ratio
    spread = max(abs(control[1] - 1), abs(control[2] - 1))
    return (low > 1 or high < 1) and abs(median - 1) > spread
