"""The shuffled order of an epoch, as a function: of (seed, loader's name, epoch, length), never of the world."""

from __future__ import annotations

import numpy as np

from paceline.train.randomness import mix, tag


def permutation(length: int, seed: int, name: str, epoch: int) -> np.ndarray:
    """The shuffled order of an epoch: (length,) int64, each index once. NumPy's Philox generator and `permutation`,
    whose streams are stable across versions for a given bit generator and method."""
    generator = np.random.Generator(np.random.Philox(key=mix(seed, tag("order"), tag(name), epoch)))
    return generator.permutation(length)
