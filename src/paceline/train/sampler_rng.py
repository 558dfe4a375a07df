"""Generators of its own for a user's sampler: keyed by the epoch, and the program's put back after it.

What a sampler draws from are torch's, NumPy's and Python's global generators, and generators that it holds itself
(RandomSampler(generator=...)). Were the latter left alone, the order of an epoch would depend on how many epochs the
process has seen, and a run that is resumed in mid-epoch would go on with another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from paceline.comm import generators
from paceline.train import randomness
from paceline.train.randomness import mix


class Handle(NamedTuple):
    """A generator of any kind: `seed` takes a 64-bit key; `get` and `set` its state."""

    seed: Callable[[int], Any]
    get: Callable[[], Any]
    set: Callable[[Any], Any]


def generators_of(sampler: Any) -> list[Handle]:
    """The generators that a sampler, or one that it holds (BatchSampler.sampler), has as attributes."""
    found: dict[int, Handle] = {}
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


def _handle(value: Any) -> Handle | None:
    if isinstance(value, torch.Generator):
        return Handle(value.manual_seed, value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return Handle(value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return Handle(lambda key: value.seed(key & 0xFFFFFFFF), value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator

        def put(state: Any) -> None:
            bits.state = state

        return Handle(lambda key: put(type(bits)(key).state), lambda: bits.state, put)
    return None


class Keyed:
    """Generators of its own for what runs inside, and the program's put back after it."""

    def __init__(self, key: int, held: list[Handle]) -> None:
        self._key: int | None = key
        self._held = held
        self._own: tuple[Any, list[Any]] = ({}, [])

    def __enter__(self) -> None:
        self._outside = self._get()
        if self._key is None:
            self._set(self._own)
            return
        randomness.seed_all(self._key)
        for number, handle in enumerate(self._held):
            handle.seed(mix(self._key, number))
        self._key = None

    def __exit__(self, *_: object) -> None:
        self._own = self._get()
        self._set(self._outside)

    def _get(self) -> tuple[Any, list[Any]]:
        return generators.get_state(), [handle.get() for handle in self._held]

    def _set(self, states: tuple[Any, list[Any]]) -> None:
        generators.set_state(states[0])
        for handle, state in zip(self._held, states[1], strict=True):
            handle.set(state)

    def around(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """Each draw of an iterator inside."""
        while True:
            with self:
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
