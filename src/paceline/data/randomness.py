"""Keys of random streams: each stream is keyed by the address at which it is used, never by what ran before it.

A key is a 64-bit mix (splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") of the
seed and an address: (purpose, loader, epoch, step, shard, micro-batch) or (purpose, loader, epoch, example). Generators
are seeded for every example, so seeding must be cheap: torch's default generator is seeded directly (1 us), not through
`torch.manual_seed` (119 us), which also walks over every device.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections.abc import Collection

import numpy as np
import torch

_MASK = (1 << 64) - 1


_START = 0x9E3779B97F4A7C15


def mix(*words: int, start: int = _START) -> int:
    """A 64-bit key made of whole numbers. The order of the words matters. start: mix(*a, start=mix(*b)) is
    mix(*b, *a)."""
    state = start
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


def seed_yield(purpose: int, epoch: int, step: int, shard: int, micro: int, device: torch.device) -> int:
    """Seed all global generators for a micro-batch that the model is about to compute: torch's by the shard, since
    noise differs between shards; Python's and NumPy's alike for all shards, which make the same choices. Returns the
    key of these two."""
    key = mix(purpose, epoch, step)
    seed_torch(mix(shard, micro, start=key), device)
    random.seed(key)
    np.random.seed(key >> 32)
    return key


def seed_some(key: int, names: Collection[str]) -> None:
    """Seed those of the global generators, of GENERATORS, as `seed_all` does."""
    if "torch" in names:
        torch.default_generator.manual_seed(key)
    if "python" in names:
        random.seed(key)
    if "numpy" in names:
        np.random.seed(key >> 32)


def seed_all(key: int, device: torch.device | None = None) -> None:
    """Seed every global generator that a data set, a collate function or a model may draw from."""
    seed_torch(key, device)
    seed_python(key)


# --- whether something has drawn

GENERATORS = "torch", "python", "numpy"
"""The global ones on the host, from which data sets and collate functions draw."""

_WORDS = 624  # of a Mersenne Twister, which is what Python's and NumPy's global generators are
_NUMPY_BYTES = 4 * _WORDS + 4  # its words, and its position in them
_TORCH_BYTES = torch.default_generator.get_state().numel()
# Seeding leaves a Mersenne Twister's position at the end, and this first word, which the first draw replaces.
_SEEDED = _WORDS, 1 << 31


class _PythonGenerator(ctypes.Structure):
    """The beginning of CPython's RandomObject (Modules/_randommodule.c), behind the header that all objects have."""

    _fields_ = (
        ("position", ctypes.c_int),  # in the words: each draw moves it
        ("first", ctypes.c_uint32),  # of the words
    )


def _peeked() -> _PythonGenerator | None:
    """The state of Python's global generator where it lies: `random.getstate` takes 8 us, since it makes a tuple of 625
    numbers. None where it lies elsewhere: another interpreter, or another version of this one."""
    own = getattr(random.random, "__self__", None)  # the function is a method of it
    if sys.implementation.name != "cpython" or type(own) is not random.Random:
        return None
    before = own.getstate()
    try:
        found = _PythonGenerator.from_address(id(own) + object.__basicsize__)
        for draws in (0, 1, 2):
            own.seed(draws)
            for _ in range(draws):
                own.getrandbits(32)
            words = own.getstate()[1]
            if (found.position, found.first) != (words[-1], words[0]):
                return None
        return found
    finally:
        own.setstate(before)


_python = _peeked()


def _python_has_drawn() -> bool:
    """Since it was seeded."""
    if _python is not None:
        return (_python.position, _python.first) != _SEEDED
    words = random.getstate()[1]
    return (words[-1], words[0]) != _SEEDED


def just_seeded() -> tuple[bytes, bytes]:
    """The states of NumPy's and torch's global generators, which `seed_all` has seeded, for `drawn_from`."""
    # np.random.get_state() takes 25 us to say what these bytes say.
    address = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]  # missing in the stubs
    torch_state = torch.default_generator.get_state()
    return ctypes.string_at(address, _NUMPY_BYTES), ctypes.string_at(torch_state.data_ptr(), _TORCH_BYTES)


def drawn_from(states: tuple[bytes, bytes]) -> frozenset[str]:
    """The names, of GENERATORS, of the global generators from which something was drawn since all were seeded, when
    they had these states."""
    numpy, ours = just_seeded()
    moved = {"python": _python_has_drawn(), "numpy": numpy != states[0], "torch": ours != states[1]}
    return frozenset(name for name in GENERATORS if moved[name])
