"""Keys of random streams: each stream is keyed by the address at which it is used, never by what ran before it.

A key is a 64-bit mix (splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") of the
seed and an address: (purpose, loader, epoch, step, shard, micro-batch) or (purpose, loader, epoch, example). Generators
are seeded for every example, so seeding must be cheap: torch's default generator is seeded directly (1 us), not through
`torch.manual_seed` (119 us), which also walks over every device.
"""

from __future__ import annotations

import random
import zlib

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """A 64-bit key made of whole numbers. The order of the words matters."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def mix_each(key: int | np.ndarray, words: np.ndarray) -> np.ndarray:
    """(n,) uint64: `mix(*a, b)` for each b of `words`, (n,). key: `mix(*a)`; or (n,) such keys, one for each word."""
    with np.errstate(over="ignore"):
        state = (np.asarray(key, np.uint64) ^ words.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def tag(text: str) -> int:
    """A number for the name of a loader or of a purpose, the same in every process and Python version."""
    return zlib.crc32(text.encode())


def permutation(length: int, seed: int, name: str, epoch: int) -> np.ndarray:
    """The shuffled order of an epoch of the loader `name`: (length,) int64, each index once, the same in every world.

    NumPy keeps the streams of its Philox generator and of `permutation` stable across versions.
    """
    generator = np.random.Generator(np.random.Philox(key=mix(seed, tag("order"), tag(name), epoch)))
    return generator.permutation(length)


def seed_torch(key: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, and the generator of `device` where that is an accelerator.

    Seeding CUDA's generator also drops the state of cuDNN's dropout between recurrent layers, which cuDNN then makes
    anew, at some cost. It has to: that state is seeded when it is made, and masks would go on from step to step.
    """
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device is not None and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(key)


def seed_python(key: int) -> None:
    """Seed Python's `random` and NumPy's legacy generator.

    NumPy's seed is the upper half of the key. torch's CPU generator is a Mersenne Twister too and uses only the lower
    half: with the same 32 bits the two would draw the same numbers.
    """
    random.seed(key)
    np.random.seed(key >> 32)


def seed_all(key: int, device: torch.device | None = None) -> None:
    """Seed every global generator that a data set, a collate function or a model may draw from."""
    seed_torch(key, device)
    seed_python(key)
