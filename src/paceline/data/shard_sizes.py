"""How large each shard of a global batch is, if the shards are not of equal size (balance.py).

A cut is a weight for each shard. It applies from one position of each loader on, the same on every process. A position
is an epoch and a step of it. Processes prefetch: so a new cut must begin after the last position that any process has
planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

Weights = tuple[int, ...]
"""For each shard, its relative size; (): all shards are of equal size."""

Position = tuple[int, int]
"""(epoch, step)."""


class ShardSizes:
    """The cuts of a run's training loaders.

    Attributes:
        planned: loader -> the position that this process has planned last.
        newest: the latest cut.
    """

    def __init__(self) -> None:
        self.planned: dict[str, Position] = {}
        self.newest: Weights = ()  # also the cut of loaders without an entry, and before its first entry
        self._cuts: dict[str, list[tuple[Position, Weights]]] = {}  # ascending

    def at(self, loader: str, epoch: int, step: int) -> Weights:
        """The cut at a position."""
        for position, weights in reversed(self._cuts.get(loader, ())):
            if position <= (epoch, step):
                return weights
        return self.newest

    def plan(self, loader: str, epoch: int, step: int) -> Weights:
        """The cut at a position that this process is about to plan."""
        self.planned[loader] = epoch, step
        return self.at(loader, epoch, step)

    def change(self, weights: Weights, planned: Mapping[str, Position]) -> None:
        """Use a new cut.

        planned: loader -> the last position that any process has planned. Later positions of these loaders have the new
        cut, and all positions of other loaders.
        """
        for loader, (epoch, step) in planned.items():
            start = epoch, step + 1
            cuts = self._cuts.setdefault(loader, [((0, 0), self.newest)])
            cuts[:] = [cut for cut in cuts if cut[0] < start]
            cuts.append((start, weights))
        self.newest = weights


@lru_cache(maxsize=256)
def bounds(count: int, weights: Weights) -> tuple[tuple[int, int], ...]:
    """(start, end) of each part if `count` items are split into contiguous parts by weight.

    Sizes are rounded by the method of largest remainders. Each part has an item if there are enough items, so that the
    speed of its process can still be measured.
    """
    least = min(1, count // len(weights))
    free, total = count - least * len(weights), sum(weights)
    sizes = [least + free * weight // total for weight in weights]
    remainders = [free * weight % total for weight in weights]
    left = count - sum(sizes)
    for part in sorted(range(len(weights)), key=lambda part: (-remainders[part], part))[:left]:
        sizes[part] += 1
    found, start = [], 0
    for size in sizes:
        found.append((start, start + size))
        start += size
    return tuple(found)


def sizes_of(count: int, weights: Sequence[int]) -> list[int]:
    """The sizes of the parts of `bounds`."""
    return [end - start for start, end in bounds(count, tuple(weights))]
