"""How a global batch becomes the yields of one process.

A global batch is cut into `shards` shards, and each shard into micro-batches, equally many for all. A plan says which
(shard, micro-batch) pairs this process computes, in which yields:

    OneShard            one shard; a micro-batch a yield
    ShardsInSequence    several shards, one after the other; a micro-batch a yield
    AllShards           a micro-batch of each shard in one yield: devices of one process
    AllMicroBatches     all micro-batches of a shard in one yield: a pipeline
    WorkQueue           chunks of global batches, handed out as processes come free

A plan never changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

Pair = tuple[int, int]
"""(shard, micro-batch of the shard)."""

Chunk = tuple[int, int]
"""(step in the epoch, number of the chunk of its global batch)."""


Fetched = tuple["Request", list[Any]]
"""A request, and the collated batch of each of its parts."""

Made = Callable[[Iterator["Request"]], Iterator[Fetched]]
"""What turns requests into batches: torch's DataLoader (data/sources.py)."""


class Part(NamedTuple):
    """One micro-batch of one shard."""

    shard: int
    micro: int
    indices: tuple[int, ...]  # of the examples in the data set
    start: int = 0  # the place of the first example in the global batch
    visits: tuple[int, ...] = ()  # the visit of each example, where an epoch may have an example several times


class Request(NamedTuple):
    """One yield of a loader on one process."""

    epoch: int
    step: int
    micro: int  # the number of this yield in its global batch
    micros: int  # how many yields this global batch has on this process
    total: int  # examples in the whole global batch
    first: int  # index of its first example, from which a zero-length batch gets its form
    parts: tuple[Part, ...]
    probe: Any = None  # data.agreement.Probe, on the last yield of a global batch that the processes compare
    mean_over: int = 0  # how many examples this process's gradient is a mean over
    whole: tuple[int, ...] = ()  # indices of the whole global batch, where collate is handed all of it
    micro_batches: int = 1  # of each shard
    examples: int = 0  # in this yield
    final: bool = True  # whether this is the last yield of its global batch

    @property
    def indices(self) -> tuple[int, ...]:
        """Of all examples in this yield."""
        return tuple(i for part in self.parts for i in part.indices)


@dataclass(slots=True)
class Piece:
    """One micro-batch of one shard, with its data."""

    shard: int
    micro: int
    count: int  # of its examples
    batch: Any  # as collate made it


def cut(count: int, parts: int, part: int) -> tuple[int, int]:
    """(start, end) of part `part` of `count` things that are cut into `parts` as evenly as possible, in order. The
    first parts are the larger ones, so that rank 0, whose numbers are shown, has an example whenever there is one."""
    size, left = divmod(count, parts)
    start = part * size + min(part, left)
    return start, start + size + (part < left)


class GlobalBatches(Sequence[Sequence[int]]):
    """The indices of each global batch of an epoch: an order, cut into `count` pieces of `size`, the last one of which
    may be shorter.

    order: has slices, such as an array, a range, or an order.KeyedOrder.
    """

    def __init__(self, order: Any, size: int, count: int) -> None:
        self._order, self._size, self._count = order, size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> Sequence[int]:  # type: ignore[override]  # one, and no slice of them
        first = range(self._count)[step] * self._size
        return self._order[first : first + self._size]

    def first(self, limit: int | None) -> GlobalBatches:
        """The first `limit` of them; None: all."""
        return GlobalBatches(self._order, self._size, self._count if limit is None else min(limit, self._count))


class Pass(NamedTuple):
    """One pass over a training loader's data."""

    loader: str  # its name
    epoch: int
    start: int  # the step at which it begins
    batches: Callable[[], Iterable[Sequence[int]]]  # the indices of all global batches of the epoch; a Sequence
    # where those before a step need not be made to have that step's
    micro_batch: int | None  # the most examples of a micro-batch
    probing: bool = False  # whether the processes are to compare the first global batch
    sampled: bool = False  # whether an example may come several times in an epoch
    whole: bool = False  # whether each request has all indices of its global batch

    def steps(self) -> Iterator[tuple[int, Sequence[int]]]:
        """(step, indices of its global batch), from `start` on."""
        batches = self.batches()
        if isinstance(batches, Sequence):
            return ((step, batches[step]) for step in range(self.start, len(batches)))
        return islice(enumerate(batches), self.start, None)


class Layout(NamedTuple):
    """How a global batch of one size becomes the yields of a process."""

    yields: list[tuple[tuple[int, int, int, int], ...]]  # for each its (shard, micro-batch, first, end) in the batch
    mean_over: int  # how many examples this process's gradient is a mean over
    micro_batches: int  # of each shard


@dataclass(frozen=True)
class BatchPlan(ABC):
    """The base of all plans."""

    shards: int  # into how many a global batch is cut
    mine: tuple[int, ...]  # the shards that this process computes

    bundled = False  # whether a yield holds several collated batches, so that only a closure can compute it
    whole_shards = False  # whether a yield holds all micro-batches of a shard, as the stages of a pipeline compute them
    in_step = True  # whether all processes compute the same global batch at the same time
    sequential = 0  # how many shards this process yields one after the other; 0 where it has one, or all at once

    @abstractmethod
    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        """For each yield of a global batch, its pairs. micro_batches: how many each shard has."""

    def mean_over(self, total: int) -> int:
        """How many of the `total` examples of a global batch this process's gradient is a mean over."""
        return total

    def micro_batches(self, total: int, micro_batch: int | None) -> int:
        """How many micro-batches, of at most `micro_batch` examples, each shard has: as many as the largest needs."""
        largest = -(-total // self.shards)
        return 1 if micro_batch is None else max(1, -(-largest // micro_batch))

    def count(self, sizes: Mapping[int, int], micro_batch: int | None) -> int:
        """How many yields global batches have. sizes: size -> how many have it. Raises TypeError where that is not
        known."""
        return sum(number * len(self.yields(self.micro_batches(size, micro_batch))) for size, number in sizes.items())

    def layout(self, total: int, micro_batch: int | None) -> Layout:
        """How a global batch of `total` examples becomes the yields of this process."""
        micro_batches = self.micro_batches(total, micro_batch)

        def place(shard: int, micro: int) -> tuple[int, int, int, int]:
            start, stop = cut(total, self.shards, shard) if shard < self.shards else (total, total)
            low, high = cut(stop - start, micro_batches, micro)
            return shard, micro, start + low, start + high

        yields = [tuple([place(shard, micro) for shard, micro in pairs]) for pairs in self.yields(micro_batches)]
        return Layout(yields, self.mean_over(total), micro_batches)

    def requests(
        self,
        batch: Sequence[int],
        epoch: int,
        step: int,
        micro_batch: int | None,
        probe: Any = None,
        *,
        sampled: bool = False,
        whole: bool = False,
    ) -> Iterator[Request]:
        """The yields of one global batch, given by its indices. The last one carries the probe. sampled, whole: see
        Pass."""
        return self._requests(self.layout(len(batch), micro_batch), batch, epoch, step, probe, sampled, whole)

    def _requests(
        self, layout: Layout, batch: Sequence[int], epoch: int, step: int, probe: Any, sampled: bool, whole: bool
    ) -> Iterator[Request]:
        visits = _visits(batch, step) if sampled else ()
        everything = _integers(batch) if whole else ()
        total, first, last = len(batch), int(batch[0]), len(layout.yields) - 1
        array = isinstance(batch, np.ndarray)
        for number, places in enumerate(layout.yields):
            examples, parts = 0, []
            for shard, micro, low, high in places:
                piece: Any = batch[low:high]
                indices = tuple(piece.tolist()) if array else _integers(piece)
                parts.append(Part(shard, micro, indices, low, visits[low:high]))
                examples += high - low
            final = number == last
            yield Request(
                epoch,
                step,
                number,
                last + 1,
                total,
                first,
                tuple(parts),
                probe if final else None,
                layout.mean_over,
                everything,
                layout.micro_batches,
                examples,
                final,
            )

    def fetch(self, data: Pass, probe: Callable[[Sequence[int]], Any], made: Made) -> Iterator[Fetched]:
        """This process's yields of a pass. made: turns requests into batches. probe: makes the probe of a global
        batch."""

        def wanted() -> Iterator[Request]:
            due, layouts = data.probing, dict[int, Layout]()  # by the size of a global batch
            for step, batch in data.steps():
                total = len(batch)
                if not total:
                    continue
                layout = layouts.get(total)
                if layout is None:
                    layout = layouts[total] = self.layout(total, data.micro_batch)
                its, due = probe(batch) if due else None, False
                yield from self._requests(layout, batch, data.epoch, step, its, data.sampled, data.whole)

        return made(wanted())

    def shared_sums(self) -> Queue | None:
        """Who keeps sums of all processes, where they are not in step."""
        return None

    def shifted(self) -> BatchPlan:
        """This plan with the next process's shards. `paceline verify` uses it to see whether a model depends on the
        rank."""
        return replace(self, mine=tuple((shard + 1) % self.shards for shard in self.mine))


@dataclass(frozen=True)
class OneShard(BatchPlan):
    """A process computes one shard, a micro-batch a yield. independent: the gradient is the mean over this shard alone,
    since the replicas are independent."""

    independent: bool = False

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        (shard,) = self.mine
        return [((shard, micro),) for micro in range(micro_batches)]

    def mean_over(self, total: int) -> int:
        if not self.independent:
            return total
        start, stop = cut(total, self.shards, self.mine[0])
        return max(stop - start, 1)


@cache
def one_shard(shards: int, shard: int, *, independent: bool = False) -> OneShard:
    """The plan of the process that computes this shard; always the same object."""
    return OneShard(shards, (shard,), independent)


@dataclass(frozen=True)
class ShardsInSequence(BatchPlan):
    """A process computes its shards one after the other."""

    # The most shards that a process has. One that has fewer yields zero-length batches in their place, so that all
    # yield equally often.
    sequential: int = 0

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        # A shard whose number is `shards` has no examples.
        in_order = [*self.mine, *[self.shards] * (self.sequential - len(self.mine))]
        return [((shard, micro),) for shard in in_order for micro in range(micro_batches)]


@dataclass(frozen=True)
class AllShards(BatchPlan):
    """A yield holds a micro-batch of each of the process's shards. A process with a single shard yields bundles too, so
    that a script is the same on every process."""

    bundled = True

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        return [tuple([(shard, micro) for shard in self.mine]) for micro in range(micro_batches)]


@dataclass(frozen=True)
class AllMicroBatches(BatchPlan):
    """A yield holds all micro-batches of the process's shard."""

    bundled = whole_shards = True

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        return [tuple([(shard, micro) for shard in self.mine for micro in range(micro_batches)])]


class Queue(ABC):
    """Chunks of global batches, handed out to the processes as they come free."""

    @abstractmethod
    def begin(self, loader: str, epoch: int, first: int, steps: int) -> None:
        """A pass over the steps from `first` to `steps` - 1 begins. Every process calls it, alike."""

    @abstractmethod
    def next_chunk(self, loader: str, epoch: int, wait: bool) -> Chunk | None:
        """The next chunk for this process. None: there is none now; with `wait`, all have been computed."""

    @abstractmethod
    def started(self, loader: str, epoch: int, chunk: Chunk) -> None:
        """This process begins to compute a chunk."""

    @abstractmethod
    def finished(self, loader: str, epoch: int, chunk: Chunk, empty: bool = False) -> None:
        """This process has computed a chunk. empty: it has no examples."""

    @abstractmethod
    def leave(self, loader: str, epoch: int) -> None:
        """This process leaves the pass before its end. The chunks that it still has are free."""

    @abstractmethod
    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        """Adds pairs to a store that all processes share. With `take` it empties the store and returns what was in it.
        Nobody waits for anybody."""


@dataclass(frozen=True)
class WorkQueue(BatchPlan):
    """A global batch is cut into `shards` chunks, each of which is then a global batch of its own. The queue hands them
    out, so that a process does not know beforehand which ones it computes."""

    queue: Queue | None  # None until the processes are connected

    in_step = False

    def shared_sums(self) -> Queue | None:
        return self.queue

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        raise TypeError("chunks are handed out as processes come free: how many yields are this one's is not known")

    def micro_batches(self, total: int, micro_batch: int | None) -> int:
        return 1 if micro_batch is None else max(1, -(-total // micro_batch))

    def fetch(self, data: Pass, probe: Callable[[Sequence[int]], Any], made: Made) -> Iterator[Fetched]:
        """Where no chunk is free it waits until one is given back, or all are computed. Batches that torch's loader has
        fetched ahead are computed first."""
        assert self.queue is not None
        queue, key, batches = self.queue, (data.loader, data.epoch), data.batches()
        batches = batches if isinstance(batches, Sequence) else list(batches)
        queue.begin(*key, data.start, len(batches))
        complete = False
        try:
            while (chunk := queue.next_chunk(*key, wait=True)) is not None:
                for request, batch in made(self._chunks(queue, chunk, data, batches)):
                    computed = (request.step, request.parts[0].shard)
                    if request.micro == 0:
                        queue.started(*key, computed)
                    yield request, batch
                    if request.final:
                        queue.finished(*key, computed)
            complete = True
        finally:
            if not complete:
                queue.leave(*key)

    def _chunks(
        self, queue: Queue, chunk: Chunk | None, data: Pass, batches: Sequence[Sequence[int]]
    ) -> Iterator[Request]:
        """The requests of this chunk, and of further ones while there are some."""
        alone, key = one_shard(1, 0), (data.loader, data.epoch)
        while chunk is not None:
            step, shard = chunk
            low, high = cut(len(batches[step]), self.shards, shard)
            if low == high:
                queue.finished(*key, chunk, empty=True)
            else:
                for request in alone.requests(batches[step][low:high], data.epoch, step, data.micro_batch):
                    yield request._replace(parts=tuple(part._replace(shard=shard) for part in request.parts))
            chunk = queue.next_chunk(*key, wait=False)


def _integers(indices: Any) -> tuple[int, ...]:
    """An array's, or those of a list in which each may be of another type."""
    if isinstance(indices, range):
        return tuple(indices)
    return tuple(indices.tolist() if isinstance(indices, np.ndarray) else [int(index) for index in indices])


def _visits(batch: Sequence[int], step: int) -> tuple[int, ...]:
    """For each example of a global batch a number that no other visit of this example in the epoch has."""
    repeats: dict[int, int] = {}  # index -> its visits in this global batch, from 0
    found = []
    for index in map(int, batch):
        repeats[index] = repeats.get(index, -1) + 1
        found.append(step << 32 | repeats[index])
    return tuple(found)
