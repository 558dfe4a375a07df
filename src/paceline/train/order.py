"""Order as a function: which examples are in which step, and how a global batch is cut.

Everything here is a pure function of (seed, loader's name, epoch, length, global batch), never of the world. Only the
cut of a global batch into shards, and of a shard into micro-batches, knows how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.strategies.base import Layout
from paceline.train.agreement import Probe
from paceline.train.randomness import mix, tag


class Part(NamedTuple):
    """The indices of one micro-batch of one shard.

    start: the place of its first example in the global batch. visits: for an order that may have an example several
    times in an epoch, which of them each is.
    """

    shard: int
    micro: int
    indices: tuple[int, ...]
    start: int = 0
    visits: tuple[int, ...] = ()


class Request(NamedTuple):
    """One yield of a loader on one process.

    epoch, step: where in the plan. micro: which of the `micros` yields of this global batch. total: examples in the
    whole global batch. first: the index of its first example, from which a zero-length batch gets its form. own:
    examples of the whole global batch that this process computes. whole: the indices of the global batch, where every
    process needs them all.
    """

    epoch: int
    step: int
    micro: int
    micros: int
    total: int
    first: int
    parts: tuple[Part, ...]
    probe: Probe | None = None
    own: int = 0
    whole: tuple[int, ...] = ()

    @property
    def final(self) -> bool:
        return self.micro == self.micros - 1

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(i for part in self.parts for i in part.indices)

    @property
    def examples(self) -> int:
        """Examples in this yield, on this process."""
        if len(self.parts) == 1:  # what most yields are: this is asked several times in a step
            return len(self.parts[0].indices)
        return sum(len(part.indices) for part in self.parts)


def permutation(length: int, seed: int, name: str, epoch: int) -> np.ndarray:
    """The shuffled order of an epoch: (length,) int64, each index once. NumPy's Philox generator and `permutation`,
    whose streams are stable across versions for a given bit generator and method."""
    generator = np.random.Generator(np.random.Philox(key=mix(seed, tag("order"), tag(name), epoch)))
    return generator.permutation(length)


def cut(count: int, parts: int, part: int) -> tuple[int, int]:
    """Bounds of part `part` when `count` things are cut into `parts` as evenly as possible, in order. What is left over
    goes to the first parts, so that rank 0, whose numbers are shown, has an example whenever there is one."""
    size, left = divmod(count, parts)
    start = part * size + min(part, left)
    return start, start + size + (part < left)


def micro_batches(total: int, shards: int, micro_batch: int | None) -> int:
    """How many micro-batches a global batch of `total` examples takes: enough for its largest shard."""
    largest = -(-total // shards)
    return 1 if micro_batch is None else max(1, -(-largest // micro_batch))


def micros_of_a_shard(request: Request, layout: Layout) -> int:
    """In how many micro-batches each shard of the request's global batch is computed."""
    if layout.together:
        return max((part.micro for part in request.parts), default=0) + 1
    return request.micros // max(layout.turns, 1)


def requests(
    batch: Sequence[int],
    epoch: int,
    step: int,
    layout: Layout,
    micro_batch: int | None,
    probe: Probe | None = None,
    *,
    sampled: bool = False,
    whole: bool = False,
) -> Iterator[Request]:
    """The yields of one global batch on one process; its last one carries the probe. sampled: an example may come
    several times in an epoch. whole: each request has all indices of the global batch."""
    total = len(batch)
    visits = _visits(batch, step) if sampled else ()
    everything = tuple(int(i) for i in batch) if whole else ()
    micros = micro_batches(total, layout.shards, micro_batch)
    bounds = [cut(total, layout.shards, shard) for shard in layout.mine]
    own = sum(stop - start for start, stop in bounds)

    def part(shard: int, micro: int) -> Part:
        start, stop = cut(total, layout.shards, shard) if shard < layout.shards else (total, total)
        low, high = cut(stop - start, micros, micro)
        low, high = start + low, start + high
        return Part(shard, micro, tuple(int(i) for i in batch[low:high]), low, visits[low:high])

    if layout.together:
        parts = tuple(part(shard, micro) for shard in layout.mine for micro in range(micros))
        yield Request(epoch, step, 0, 1, total, int(batch[0]), parts, probe, own, everything)
        return
    yields = [tuple(part(shard, micro) for shard in layout.mine) for micro in range(micros)]
    if layout.turns:
        turns = [*layout.mine, *[layout.shards] * (layout.turns - len(layout.mine))]  # a shard of that number is empty
        yields = [(part(shard, micro),) for shard in turns for micro in range(micros)]
    for number, parts in enumerate(yields):
        last = number == len(yields) - 1
        its = probe if last else None
        yield Request(epoch, step, number, len(yields), total, int(batch[0]), parts, its, own, everything)


def _visits(batch: Sequence[int], step: int) -> tuple[int, ...]:
    """For each example of a global batch a number that no other visit of this example in the epoch has."""
    seen: dict[int, int] = {}
    found = []
    for index in map(int, batch):
        seen[index] = seen.get(index, -1) + 1
        found.append(step << 32 | seen[index])
    return tuple(found)
