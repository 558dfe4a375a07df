"""The random numbers of a user's sampler: keyed by the epoch, and independent of the rest of the program.

A sampler draws from the global generators of torch, NumPy and Python, and from generators stored in it
(RandomSampler(generator=...)). All of them are keyed while it runs. Otherwise the order of an epoch would depend on the
number of epochs that this process has read, and a run resumed in mid-epoch would continue in a different order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from paceline.comm import generators
from paceline.data.randomness import mix, seed_all


class GeneratorHandle(NamedTuple):
    """Functions that seed, read and restore a random generator of any library."""

    seed: Callable[[int], Any]  # seeds with a 64-bit key
    get: Callable[[], Any]  # returns the state
    set: Callable[[Any], Any]  # restores a state


def generators_of(sampler: Any) -> list[GeneratorHandle]:
    """The generators among the attributes of a sampler, and of the samplers inside it (BatchSampler.sampler)."""
    found: dict[int, GeneratorHandle] = {}
    seen: set[int] = set()

    def walk(holder: Any) -> None:
        seen.add(id(holder))
        for name, value in getattr(holder, "__dict__", {}).items():
            handle = _handle(value)
            if handle is not None:
                found.setdefault(id(value), handle)
            elif (isinstance(value, Sampler) or name == "sampler") and id(value) not in seen:
                walk(value)

    walk(sampler)
    return list(found.values())


def _handle(value: Any) -> GeneratorHandle | None:
    if isinstance(value, torch.Generator):
        return GeneratorHandle(value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return GeneratorHandle(value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return GeneratorHandle(lambda key: value.seed(key & 0xFFFFFFFF), value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return GeneratorHandle(lambda key: put(type(bits)(key).state), lambda: bits.state, put)
    return None


def seed_generators(key: int, held: Sequence[GeneratorHandle]) -> None:
    """Seed the global generators, and each generator in `held`."""
    seed_all(key)
    for number, handle in enumerate(held):
        handle.seed(mix(key, number))


class SamplerRNG:
    """A context manager that gives the global generators and those in `held` separate states. The first entry seeds
    them with `key`. Each later entry continues from the states at the last exit. On exit the program's states are
    restored.

    held: the generators stored in the sampler.
    """

    def __init__(self, key: int, held: list[GeneratorHandle]) -> None:
        self._key: int | None = key  # None once used
        self._held = held
        self._saved: tuple[Any, list[Any]] = ({}, [])  # states at the last exit

    def __enter__(self) -> None:
        self._outside = self._get()  # the program's states
        if self._key is None:
            self._set(self._saved)
            return
        seed_generators(self._key, self._held)
        self._key = None

    def __exit__(self, *_: object) -> None:
        self._saved = self._get()
        self._set(self._outside)

    def _get(self) -> tuple[Any, list[Any]]:
        return generators.get_state(), [handle.get() for handle in self._held]

    def _set(self, states: tuple[Any, list[Any]]) -> None:
        generators.set_state(states[0])
        for handle, state in zip(self._held, states[1], strict=True):
            handle.set(state)

    def around_each(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The items of the iterator. Each `next` call runs inside this context."""
        while True:
            with self:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
