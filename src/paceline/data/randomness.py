"""Keys of random streams. Each stream is keyed by the address of its use, never by what ran before it.

A key is a 64-bit mix (splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators") of the
seed and an address: (purpose, loader, epoch, step, shard, micro-batch) or (purpose, loader, epoch, example). Generators
are seeded for every example, so seeding must be cheap: torch's default generator is seeded directly (1 us), not through
`torch.manual_seed` (119 us), which also visits every device.
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
    """A 64-bit key from integers. The order of the words matters. start: mix(*a, start=mix(*b)) is mix(*b, *a)."""
    state = start
    for word in words:
        state = (state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def mix_each(key: int | np.ndarray, words: np.ndarray) -> np.ndarray:
    """`mix(*a, b)` for each b of `words`, as uint64. Both are (n,). key: `mix(*a)`, or (n,) such keys, one per word."""
    with np.errstate(over="ignore"):
        state = (np.asarray(key, np.uint64) ^ words.astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


def tag(text: str) -> int:
    """A number for the name of a loader or purpose, the same in every process and Python version."""
    return zlib.crc32(text.encode())


def permutation(length: int, seed: int, name: str, epoch: int) -> np.ndarray:
    """The shuffled order of an epoch of the loader `name`, the same for any number of processes. Returns a permutation
    of range(length) as (length,) int64.

    NumPy keeps the streams of its Philox generator and of `permutation` stable across versions.
    """
    generator = np.random.Generator(np.random.Philox(key=mix(seed, tag("order"), tag(name), epoch)))
    return generator.permutation(length)


def seed_torch(key: int, device: torch.device | None = None) -> None:
    """Seed torch's CPU generator, and the generator of `device` if it is an accelerator.

    Seeding CUDA's generator also drops the state of cuDNN's dropout between recurrent layers. cuDNN then recreates the
    state, at some cost. This is necessary: the state is seeded only when it is created, so an old state would continue
    the masks of earlier steps.
    """
    torch.default_generator.manual_seed(key)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(key)
    elif device is not None and device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(key)


def seed_python(key: int) -> None:
    """Seed Python's `random` and NumPy's legacy generator.

    NumPy's seed is the upper half of the key. torch's CPU generator is a Mersenne Twister too and uses only the lower
    half. With the same 32 bits, both would draw the same numbers.
    """
    random.seed(key)
    np.random.seed(key >> 32)


def seed_yield(purpose: int, epoch: int, step: int, shard: int, micro: int, device: torch.device) -> int:
    """Seed all global generators for a micro-batch that the model is about to compute. torch's seed depends on the
    shard, since noise differs between shards. Python's and NumPy's seeds are the same for all shards, so that they make
    the same choices. Returns the key of Python's and NumPy's generators."""
    key = mix(purpose, epoch, step)
    seed_torch(mix(shard, micro, start=key), device)
    random.seed(key)
    np.random.seed(key >> 32)
    return key


def seed_some(key: int, names: Collection[str]) -> None:
    """Seed the global generators with these names (see GENERATORS), as `seed_all` does."""
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


# --- which generators have drawn?

GENERATORS = "torch", "python", "numpy"
"""The global generators on the host, which data sets and collate functions draw from."""

_WORDS = 624  # words of state in a Mersenne Twister, the algorithm of Python's and NumPy's global generators
_NUMPY_BYTES = 4 * _WORDS + 4  # the words, and the position in them
_TORCH_BYTES = torch.default_generator.get_state().numel()
# After seeding, a Mersenne Twister's position is at the end, and its first word has this value until the first draw.
_SEEDED = _WORDS, 1 << 31


class _PythonGenerator(ctypes.Structure):
    """The beginning of CPython's RandomObject (Modules/_randommodule.c), after the object header."""

    _fields_ = (
        ("position", ctypes.c_int),  # position in the words; each draw changes it
        ("first", ctypes.c_uint32),  # the first word
    )


def _peeked() -> _PythonGenerator | None:
    """The state of Python's global generator, read in place, because `random.getstate` takes 8 us (it builds a tuple of
    625 numbers). None if this interpreter does not store the state as the CPython versions known here do."""
    generator = getattr(random.random, "__self__", None)  # random.random is a bound method of the generator
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    before = generator.getstate()
    try:
        found = _PythonGenerator.from_address(id(generator) + object.__basicsize__)
        for draws in (0, 1, 2):
            generator.seed(draws)
            for _ in range(draws):
                generator.getrandbits(32)
            words = generator.getstate()[1]
            if (found.position, found.first) != (words[-1], words[0]):
                return None
        return found
    finally:
        generator.setstate(before)


_python = _peeked()


def _python_has_drawn() -> bool:
    """Has Python's global generator drawn since it was seeded?"""
    if _python is not None:
        return (_python.position, _python.first) != _SEEDED
    words = random.getstate()[1]
    return (words[-1], words[0]) != _SEEDED


def just_seeded() -> tuple[bytes, bytes]:
    """The states of NumPy's and torch's global generators just after `seed_all`, for `drawn_from`."""
    # np.random.get_state() would take 25 us for the same bytes.
    address = np.random.get_bit_generator().ctypes.state_address  # type: ignore[attr-defined]  # missing in the stubs
    torch_state = torch.default_generator.get_state()
    return ctypes.string_at(address, _NUMPY_BYTES), ctypes.string_at(torch_state.data_ptr(), _TORCH_BYTES)


def drawn_from(states: tuple[bytes, bytes]) -> frozenset[str]:
    """The names (see GENERATORS) of the global generators that have drawn since `just_seeded` returned these states."""
    numpy, ours = just_seeded()
    moved = {"python": _python_has_drawn(), "numpy": numpy != states[0], "torch": ours != states[1]}
    return frozenset(name for name in GENERATORS if moved[name])
