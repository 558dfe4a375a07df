"""How a global batch becomes the yields of one process.

A global batch is split into `shards` shards. Each shard is split into the same number of micro-batches. A plan decides
which (shard, micro-batch) pairs this process computes, and when:

    OneShard            one shard; one micro-batch per yield
    ShardsInSequence    several shards, one after the other; one micro-batch per yield
    DealtShards         the same; whole shards may go to other processes
    AllShards           one micro-batch of each shard per yield: several devices in one process
    AllMicroBatches     all micro-batches of a shard per yield: a pipeline
    WorkQueue           chunks of global batches, assigned to processes as they become free

A plan is immutable. Its shards are of equal size, up to one example, unless it has `shard_sizes`: then their
sizes may change from one global batch to the next (shard_sizes.py). In an evaluation they are `fixed`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.data.bundle import Bundle, Piece
from paceline.data.placement import move
from paceline.data.shard_sizes import ShardSizes, Weights, bounds, sizes_of
from paceline.errors import SettingError

_device_of = attrgetter("device")

Pair = tuple[int, int]
"""(shard, micro-batch within the shard)."""

Chunk = tuple[int, int]
"""(step in the epoch, chunk within its global batch)."""


Fetched = tuple["Request", list[Any]]
"""A request, and the collated batch of each of its parts."""

Made = Callable[[Iterator["Request"]], Iterator[Fetched]]
"""Turns requests into batches: torch's DataLoader (data/sources.py)."""


class Part(NamedTuple):
    """One micro-batch of one shard."""

    shard: int
    micro: int
    indices: tuple[int, ...]  # the examples, by their index in the data set
    start: int = 0  # position of the first example in the global batch
    visits: tuple[int, ...] = ()  # for each example, the number of its visit; () if no example repeats


class Request(NamedTuple):
    """One yield of a loader on one process."""

    epoch: int
    step: int
    micro: int  # number of this yield within its global batch
    micros: int  # number of yields of this global batch on this process
    total: int  # examples in the whole global batch
    first: int  # index of the global batch's first example, the template for zero-length batches
    parts: tuple[Part, ...]
    probe: Any = None  # data.agreement.Probe, on the last yield of a global batch that the processes compare
    mean_over: int = 0  # number of examples that this process's gradient is a mean over
    whole: tuple[int, ...] = ()  # indices of the whole global batch, if collate receives all of it
    micro_batches: int = 1  # per shard
    examples: int = 0  # in this yield
    final: bool = True  # is this the last yield of its global batch?
    weights: Weights = ()  # of this global batch's cut

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of all examples in this yield."""
        return tuple(i for part in self.parts for i in part.indices)


def cut(count: int, parts: int, part: int, weights: Weights = ()) -> tuple[int, int]:
    """(start, end) of part `part` if `count` items are split into `parts` contiguous parts, as evenly as possible. The
    first parts are larger, so that rank 0, which prints the metrics, has an example if any rank has one.

    weights: the parts' relative sizes, if they are not equal. They do not matter if there are fewer items than parts.
    """
    if weights and count >= parts:
        return bounds(count, weights)[part]
    size, left = divmod(count, parts)
    start = part * size + min(part, left)
    return start, start + size + (part < left)


class GlobalBatches(Sequence[Sequence[int]]):
    """The indices of each global batch of an epoch: an order, split into `count` batches of `size`. The last batch may
    be shorter.

    order: anything that supports slicing, such as an array, a range, or an order.KeyedOrder.
    """

    def __init__(self, order: Any, size: int, count: int) -> None:
        self._order, self._size, self._count = order, size, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> Sequence[int]:  # type: ignore[override]  # an index only, no slice
        first = range(self._count)[step] * self._size
        return self._order[first : first + self._size]

    def first(self, limit: int | None) -> GlobalBatches:
        """The first `limit` global batches, or all if limit is None."""
        return GlobalBatches(self._order, self._size, self._count if limit is None else min(limit, self._count))


class Pass(NamedTuple):
    """One pass over a training loader's data."""

    loader: str  # name of the loader
    epoch: int
    start: int  # first step
    batches: Callable[[], Iterable[Sequence[int]]]  # the indices of all global batches of the epoch. A Sequence
    # if it can make a batch without making the earlier batches
    micro_batch: int | None  # largest number of examples in a micro-batch
    probing: bool = False  # should the processes compare the first global batch?
    sampled: bool = False  # may an epoch repeat examples?
    whole: bool = False  # does each request carry all indices of its global batch?

    def steps(self) -> Iterator[tuple[int, Sequence[int]]]:
        """(step, indices of its global batch), from step `start`."""
        batches = self.batches()
        if isinstance(batches, Sequence):
            return ((step, batches[step]) for step in range(self.start, len(batches)))
        return islice(enumerate(batches), self.start, None)


class Layout(NamedTuple):
    """How a global batch of one size becomes the yields of a process."""

    yields: list[tuple[tuple[int, int, int, int], ...]]  # per yield: (shard, micro-batch, first, end) in the batch
    mean_over: int  # number of examples that this process's gradient is a mean over
    micro_batches: int  # per shard
    weights: Weights


@dataclass(frozen=True)
class BatchPlan(ABC):
    """Base class of all plans."""

    shards: int  # number of shards per global batch
    mine: tuple[int, ...]  # the shards that this process computes

    shard_sizes: ShardSizes | None = field(default=None, kw_only=True)  # of training; None: see `fixed`
    fixed: Weights = field(default=(), kw_only=True)  # the sizes in every global batch; (): all are of equal size

    bundled = False  # is a yield a bundle, which only a closure can compute?
    whole_shards = False  # does a yield hold all micro-batches of a shard, for the stages of a pipeline?
    in_step = True  # do all processes compute the same global batch at the same time?
    unit = "example"  # what a new cut distributes: "example", or "shard"
    sequential = 0  # number of shards that this process yields in sequence; 0 for one shard, or all shards at once

    @abstractmethod
    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        """The pairs in each yield of a global batch. micro_batches: the number of micro-batches per shard."""

    def weights(self, loader: str, epoch: int, step: int) -> Weights:
        """The weights of the shards in a global batch that this process is about to plan."""
        return self.fixed if self.shard_sizes is None else self.shard_sizes.plan(loader, epoch, step)

    def units(self, total: int) -> int:
        """The number of `unit`s in a global batch of `total` examples."""
        return total

    def mean_over(self, total: int, weights: Weights) -> int:
        """Number of examples that this process's gradient is a mean over. total: examples in the global batch."""
        return total

    def micro_batches(self, total: int, micro_batch: int | None, weights: Weights = ()) -> int:
        """Number of micro-batches per shard: the fewest such that none has more than `micro_batch` examples."""
        largest = -(-total // self.shards)
        if weights and total >= self.shards:
            largest = max(sizes_of(total, weights))
        return 1 if micro_batch is None else max(1, -(-largest // micro_batch))

    def count(self, sizes: Mapping[int, int], micro_batch: int | None) -> int:
        """Total number of yields. sizes: global batch size -> number of global batches of that size. Raises TypeError
        if the number is not known in advance."""
        if self.shard_sizes is not None and micro_batch is not None:
            raise TypeError(
                "with balance=True and micro_batch, the number of micro-batches follows the size of the largest shard, "
                "which is measured. Use loader.steps, the number of updates."
            )
        return sum(
            number * len(self.yields(self.micro_batches(size, micro_batch, self.fixed)))
            for size, number in sizes.items()
        )

    def layout(self, total: int, micro_batch: int | None, weights: Weights = ()) -> Layout:
        """How a global batch of `total` examples becomes the yields of this process."""
        micro_batches = self.micro_batches(total, micro_batch, weights)

        def place(shard: int, micro: int) -> tuple[int, int, int, int]:
            start, stop = cut(total, self.shards, shard, weights) if shard < self.shards else (total, total)
            low, high = cut(stop - start, micro_batches, micro)
            return shard, micro, start + low, start + high

        yields = [tuple([place(shard, micro) for shard, micro in pairs]) for pairs in self.yields(micro_batches)]
        return Layout(yields, self.mean_over(total, weights), micro_batches, weights)

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
        weights: Weights = (),
    ) -> Iterator[Request]:
        """The requests of one global batch. batch: its indices. The last request carries the probe. sampled, whole: see
        Pass. weights: of the shards."""
        return self._requests(self.layout(len(batch), micro_batch, weights), batch, epoch, step, probe, sampled, whole)

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
                layout.weights,
            )

    def fetch(self, data: Pass, probe: Callable[[Sequence[int]], Any], made: Made) -> Iterator[Fetched]:
        """This process's yields of a pass. made: turns requests into batches. probe: makes the probe of a global
        batch from its indices."""

        def wanted() -> Iterator[Request]:
            due, layouts = data.probing, dict[tuple[int, Weights], Layout]()  # by the size of a global batch, and cut
            for step, batch in data.steps():
                total = len(batch)
                if not total:
                    continue
                key = total, self.weights(data.loader, data.epoch, step)
                layout = layouts.get(key)
                if layout is None:
                    layout = layouts[key] = self.layout(total, data.micro_batch, key[1])
                its, due = probe(batch) if due else None, False
                yield from self._requests(layout, batch, data.epoch, step, its, data.sampled, data.whole)

        return made(wanted())

    def present(self, request: Request, batches: list[Any], device: torch.device) -> Any:
        """The object that the script gets for a yield. batches: the collated batch of each part."""
        batch = batches[0]
        if type(batch) is list and {*map(type, batch)} == {Tensor} and {*map(_device_of, batch)} == {device}:
            return batch  # nearly always: default_collate's result, on a CPU
        return move(batch, device)

    def part(self, request: Request) -> Part | None:
        """The part in a yield; None if the yield is a bundle of several parts."""
        return request.parts[0]

    def check_stream(self, kind: str) -> None:
        """Raise SettingError if this plan cannot read a stream. kind: the type of the data set, for the message."""
        return None

    def shared_sums(self) -> Queue | None:
        """The queue that pools the processes' sums if the processes are not in step; otherwise None."""
        return None

    def balanced(self, sizes: ShardSizes | None) -> BatchPlan:
        """This plan with shards of these sizes; None: of equal size."""
        return replace(self, shard_sizes=sizes, fixed=())

    def with_cut(self, weights: Weights) -> BatchPlan:
        """This plan with shards of these sizes in every global batch."""
        return replace(self, fixed=weights)

    def shifted(self) -> BatchPlan:
        """This plan with the next process's shards. `paceline verify` uses it to check whether a model depends on the
        rank."""
        return replace(self, mine=tuple((shard + 1) % self.shards for shard in self.mine))


@dataclass(frozen=True)
class OneShard(BatchPlan):
    """A process computes one shard, with one micro-batch per yield. independent: whether replicas are independent. Then
    the gradient is the mean over this shard only."""

    independent: bool = False

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        (shard,) = self.mine
        return [((shard, micro),) for micro in range(micro_batches)]

    def mean_over(self, total: int, weights: Weights) -> int:
        if not self.independent:
            return total
        start, stop = cut(total, self.shards, self.mine[0], weights)
        return max(stop - start, 1)


@cache
def one_shard(shards: int, shard: int, *, independent: bool = False) -> OneShard:
    """The plan of the process that computes this shard. Returns the same object for the same arguments."""
    return OneShard(shards, (shard,), independent)


@dataclass(frozen=True)
class ShardsInSequence(BatchPlan):
    """A process computes its shards in sequence."""

    # The largest number of shards of any process. A process with fewer shards adds zero-length batches, so that all
    # processes yield the same number of times.
    sequential: int = 0

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        # Shard number `shards` has no examples.
        in_order = [*self.mine, *[self.shards] * (self.sequential - len(self.mine))]
        return [((shard, micro),) for shard in in_order for micro in range(micro_batches)]


@dataclass(frozen=True)
class DealtShards(ShardsInSequence):
    """A process computes its shards in sequence. A new cut gives whole shards to other processes.

    process: the number of this process. Weights are those of the processes.
    """

    process: int = 0

    unit = "shard"

    def units(self, total: int) -> int:
        return self.shards

    def count(self, sizes: Mapping[int, int], micro_batch: int | None) -> int:
        if self.shard_sizes is not None:
            raise TypeError(
                "with balance=True and reproducible, the number of yields follows the largest number of shards of any "
                "process, which is measured. Use loader.steps, the number of updates."
            )
        return super().count(sizes, micro_batch)

    def layout(self, total: int, micro_batch: int | None, weights: Weights = ()) -> Layout:
        if not weights:
            return super().layout(total, micro_batch)
        owned = bounds(self.shards, weights)
        most = max(end - start for start, end in owned)
        dealt = replace(self, mine=tuple(range(*owned[self.process])), sequential=most)
        return dealt.layout(total, micro_batch)._replace(weights=weights)


@dataclass(frozen=True)
class _Bundled(BatchPlan):
    """A yield is a bundle. The strategy moves its batches to their devices."""

    bundled = True

    def present(self, request: Request, batches: list[Any], device: torch.device) -> Any:
        parts = zip(request.parts, batches, strict=True)
        return Bundle([Piece(part.shard, part.micro, len(part.indices), batch) for part, batch in parts])

    def part(self, request: Request) -> Part | None:
        return None


@dataclass(frozen=True)
class AllShards(_Bundled):
    """A yield holds one micro-batch of each of the process's shards. A process with a single shard also yields bundles,
    so that the script is the same on every process."""

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        return [tuple([(shard, micro) for shard in self.mine]) for micro in range(micro_batches)]


@dataclass(frozen=True)
class AllMicroBatches(_Bundled):
    """A yield holds all micro-batches of the process's shard."""

    whole_shards = True

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        return [tuple([(shard, micro) for shard in self.mine for micro in range(micro_batches)])]


class Queue(ABC):
    """Assigns chunks of global batches to processes as they become free."""

    @abstractmethod
    def begin(self, loader: str, epoch: int, first: int, steps: int) -> None:
        """Start a pass over the steps from `first` to `steps` - 1. Every process calls it, with the same arguments."""

    @abstractmethod
    def next_chunk(self, loader: str, epoch: int, wait: bool) -> Chunk | None:
        """The next chunk for this process. None means that no chunk is free, or with `wait`, that all are finished."""

    @abstractmethod
    def started(self, loader: str, epoch: int, chunk: Chunk) -> None:
        """Record that this process begins to compute a chunk."""

    @abstractmethod
    def finished(self, loader: str, epoch: int, chunk: Chunk, empty: bool = False) -> None:
        """Record that this process has computed a chunk. empty: the chunk has no examples."""

    @abstractmethod
    def leave(self, loader: str, epoch: int) -> None:
        """Leave the pass early. This process's unfinished chunks become free."""

    @abstractmethod
    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        """Add pairs to a store that all processes share. With `take`, empty the store and return its content. Does not
        wait for other processes."""


@dataclass(frozen=True)
class WorkQueue(BatchPlan):
    """A global batch is split into `shards` chunks. Each chunk counts as a separate global batch. The queue assigns
    chunks to processes as they become free, so a process does not know in advance which chunks it computes."""

    queue: Queue | None  # None until the processes are connected

    in_step = False

    def check_stream(self, kind: str) -> None:
        raise SettingError(
            f"run.loader(dataset={kind}): the chosen strategy assigns chunks of the data to processes as they become "
            "free, and a stream cannot be read from an arbitrary position. Use parameter_server:mode=sync, another "
            "strategy, or a data set with __getitem__ and __len__."
        )

    def shared_sums(self) -> Queue | None:
        return self.queue

    def yields(self, micro_batches: int) -> list[tuple[Pair, ...]]:
        raise TypeError("chunks are assigned as processes become free: this process's number of yields is not known")

    def micro_batches(self, total: int, micro_batch: int | None, weights: Weights = ()) -> int:
        return 1 if micro_batch is None else max(1, -(-total // micro_batch))

    def fetch(self, data: Pass, probe: Callable[[Sequence[int]], Any], made: Made) -> Iterator[Fetched]:
        """Yield the batches of chunks until all chunks are computed. If no chunk is free, first yield the batches that
        torch's loader has prefetched. Then wait until another process returns a chunk, or all chunks are computed."""
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
        """The requests of this chunk, and of further chunks while any are free."""
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
    """The integers of an array, or of a list with entries of any type."""
    if isinstance(indices, range):
        return tuple(indices)
    return tuple(indices.tolist() if isinstance(indices, np.ndarray) else [int(index) for index in indices])


def _visits(batch: Sequence[int], step: int) -> tuple[int, ...]:
    """Number the visits of the examples in a global batch. All visits of an example in an epoch differ in number."""
    repeats: dict[int, int] = {}  # index -> number of its last visit in this global batch, from 0
    found = []
    for index in map(int, batch):
        repeats[index] = repeats.get(index, -1) + 1
        found.append(step << 32 | repeats[index])
    return tuple(found)
