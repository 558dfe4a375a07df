"""Reads the examples of a map-style data set, so that what an example draws depends on the example alone.

Before an example is made, the global generators are seeded with its key. That costs 8 us for the three of them, more
than it takes most data sets to give an example, and few draw. So:

1. The first examples are read one by one, with all generators seeded.
2. For the later ones only those generators are seeded from which the first ones have drawn. Where there are none, the
   examples of a part of a global batch are read at once, by `__getitems__` where the data set has it, as torch's
   fetcher does.
3. If another generator has moved when a part is read, something has drawn from it after all. The part is read again
   with that one seeded too, and so is everything after it.

What an example draws is thus the same as if each were seeded with all. A data set that draws nothing for the first
examples, and keeps what it draws later (in a cache, by index), would keep the first reading of one part: it should have
a generator of its own, seeded by the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.data.randomness import GENERATORS, drawn_from, just_seeded, seed_all, seed_some

_LOOKED_AT = 64
"""Examples of each process, and of each worker of its loader, that are read with all generators seeded."""
_ANY_KEY = 0  # of generators from which nothing is to be drawn


class ExampleReader:
    """Reads examples by their indices.

    Args:
        dataset: with `__getitem__`.
        keys: (epoch, indices) -> the keys of these examples' streams.
    """

    def __init__(self, dataset: Any, keys: Callable[[int, Sequence[int]], list[int]]) -> None:
        self.dataset, self._keys = dataset, keys
        self._drawn: frozenset[str] = frozenset()  # the generators from which examples have drawn
        self._looked_at = 0  # examples so far that were read with all generators seeded
        self._at_once = _reads_at_once(type(dataset))

    def read(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        """These examples, in this order."""
        if self._looked_at < _LOOKED_AT:
            return self._look_at(epoch, indices)
        while True:
            seed_all(_ANY_KEY)
            seeded = just_seeded()
            found = self._read(epoch, indices)
            others = drawn_from(seeded) - self._drawn
            if not others:
                return found
            self._drawn |= others

    def collated(self, indices: Sequence[int]) -> list[Tensor] | None:
        """What default_collate makes of these examples, if they are rows of tensors; else None. Nothing draws there."""
        if not indices or type(self.dataset) is not TensorDataset:
            return None
        rows = torch.tensor(indices)
        return [tensor[rows] for tensor in self.dataset.tensors]

    def _look_at(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        found = []
        for key, index in zip(self._keys(epoch, indices), indices, strict=True):
            seed_all(key)
            seeded = None if len(self._drawn) == len(GENERATORS) else just_seeded()
            found.append(self.dataset[index])
            self._drawn |= frozenset() if seeded is None else drawn_from(seeded)
        self._looked_at += len(indices)
        return found

    def _read(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        if self._drawn:
            found = []
            for key, index in zip(self._keys(epoch, indices), indices, strict=True):
                seed_some(key, self._drawn)
                found.append(self.dataset[index])
            return found
        if self._at_once:
            return list(self.dataset.__getitems__(list(indices)))
        return [self.dataset[index] for index in indices]


def _reads_at_once(kind: type) -> bool:
    """Does the class have a `__getitems__` that knows its `__getitem__`? One that a subclass has inherited, which makes
    its own examples in `__getitem__`, does not, nor one that `__getattr__` finds in a data set within."""
    owners = {
        name: next((number for number, base in enumerate(kind.__mro__) if name in vars(base)), None)
        for name in ("__getitem__", "__getitems__")
    }
    one, several = owners["__getitem__"], owners["__getitems__"]
    return one is not None and several is not None and several <= one
