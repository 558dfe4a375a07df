"""One pass over a data set of shards: this process reads its streams, and its examples of each global batch.

1. The streams whose blocks contain positions of this process in a full global batch are its own. It reads them in
   windows of several rounds, with torch's DataLoader: worker w of W reads every W-th of them.
2. After each window, of up to 8 rounds, the ranks gather which streams have ended, until all have. So every rank
   knows which examples a round has, before a global batch takes them.
3. While no stream has ended, a process has read the examples of its positions. Later, the positions of the rest are
   those of other streams too: it reads these examples itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.comm.mesh import world_group
from paceline.data.batch_plan import BatchPlan
from paceline.data.shards import Example, Found, Place, StreamOrder, StreamReader, Wanted
from paceline.errors import UsageError

WINDOW = 8
"""The largest number of rounds that are read before the ranks tell each other what they found."""


class Step(NamedTuple):
    """One global batch, as this process sees it."""

    number: int
    indices: list[int]  # of all positions; -1 for an example that this process has not read
    examples: dict[int, Any]  # index -> example, of this process's positions


class ShardPass:
    """One pass.

    Args:
        name, epoch, start: the loader, the epoch and the first step.
        limit: the number of steps; None: all.
        blocks: for each stream, its examples in a full round.
        shards: for each stream, its shards.
        lengths: shard -> its number of examples, as far as known. The pass adds to it. Every rank has the same.
        known: do `lengths` hold all shards that the steps before `start` have read to the end?
        reader: reads single examples of streams that are not this process's own. It has begun.
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        start: int,
        limit: int | None,
        *,
        blocks: Sequence[int],
        shards: Sequence[Sequence[int]],
        lengths: dict[int, int],
        known: bool,
        reader: StreamReader,
    ) -> None:
        self._about, self._start, self._limit = [name, epoch], start, limit
        self._blocks, self._shards, self._lengths = blocks, shards, lengths
        self._reader, self._batch = reader, sum(blocks)
        self._totals: dict[int, int] = {}  # stream -> number of its examples, if it has ended
        self._held: dict[Place, Example] = {}  # examples that no global batch has taken yet
        self._template: Any = None
        self._note_totals()
        self._order = StreamOrder(blocks, self._totals)
        # The round with the first place of step `start`, and the number of places to skip from its first one.
        self._first_round = self._order.round_of(start * self._batch) if known else 0
        self._skip = start * self._batch - self._order.before(self._first_round)

    def steps(
        self, plan: BatchPlan, micro_batch: int | None, whole: bool, workers: int,
        fetch: Callable[[Iterator[Wanted], int], Iterator[Found]], drop_last: bool,
    ) -> Iterator[Step]:  # fmt: skip
        """The steps from `start` on.

        whole: does this process need all examples of each global batch?
        workers: the largest number of workers.
        fetch: answers requests: (requests, number of workers that take them in turn) -> answers in the same order.
        """
        if self._limit is not None and self._start >= self._limit:
            return
        everything = whole or world_group().size == 1
        mine = range(len(self._blocks)) if everything else self._mine(plan, micro_batch)
        share = [list(mine)[worker :: max(1, workers)] for worker in range(min(max(1, workers), len(mine)))]
        answers = fetch(self._wanted(share), len(share))
        waiting: deque[Place] = deque()
        number = self._start
        for first, end in self._windows():
            self._keep(first, end, [next(answers) for _ in share])
            for number_of_round in range(first, end):
                waiting.extend(self._after_skip(self._order.places(number_of_round)))
                while len(waiting) >= self._batch:
                    places = [waiting.popleft() for _ in range(self._batch)]
                    yield self._taken(number, places, plan, micro_batch, whole)
                    number += 1
                    if number == self._limit:
                        return
            if len(self._totals) == len(self._blocks) and not self._order.places(end):
                break
        if waiting and not drop_last:
            yield self._taken(number, list(waiting), plan, micro_batch, whole)

    def _after_skip(self, places: list[Place]) -> list[Place]:
        """The places without those before the first step."""
        skipped = places[: self._skip]
        self._skip -= len(skipped)
        for place in skipped:
            self._held.pop(place, None)
        return places[len(skipped) :]

    def _windows(self) -> Iterator[tuple[int, int]]:
        """(first round, end) of each window. The first ones are short, so that the first step does not wait long."""
        first, size = self._first_round, 1
        while True:
            end = first + size
            if self._limit is not None and first < self._limit:
                end = min(end, self._limit)  # further rounds are needed only if a stream has ended
            yield first, end
            first, size = end, min(2 * size, WINDOW)

    def _wanted(self, share: Sequence[Sequence[int]]) -> Iterator[Wanted]:
        for first, end in self._windows():
            for streams in share:
                blocks = [(stream, self._blocks[stream]) for stream in streams]
                yield Wanted(tuple((stream, first * block, end * block) for stream, block in blocks))

    def _mine(self, plan: BatchPlan, micro_batch: int | None) -> list[int]:
        """The streams with a position of this process in a full global batch; stream 0 if it has none."""
        positions = set(_positions(plan, self._batch, micro_batch))
        found, start = [], 0
        for stream, block in enumerate(self._blocks):
            if not positions.isdisjoint(range(start, start + block)):
                found.append(stream)
            start += block
        return found or [0]

    def _keep(self, first: int, end: int, answers: Sequence[Found]) -> None:
        """Keep the examples of a window, and gather which streams have ended. Collective, unless all have."""
        totals, lengths = dict[int, int](), dict[int, int]()
        for answer in answers:
            lengths |= answer.lengths
            for (stream, start, stop), examples in zip(answer.wanted.ranges, answer.examples, strict=True):
                self._held |= {(stream, start + place): example for place, example in enumerate(examples)}
                if len(examples) < stop - start and stream not in self._totals:
                    totals[stream] = start + len(examples)
        if len(self._totals) == len(self._blocks):
            return  # on every rank
        sent = [[*self._about, first, end], list(totals.items()), list(lengths.items())]
        received: list[Any] = world_group().gather(sent, "the lengths of a data set's shards")
        for rank, (about, ended, read) in enumerate(received):
            if list(about) != sent[0]:
                raise UsageError(
                    f"loader {self._about[0]!r}: rank {rank} reads another part of its shards ({about}) than this rank "
                    f"({sent[0]}). Every rank must iterate the loaders of data sets of shards in the same order, and "
                    "as far."
                )
            self._totals.update((int(stream), int(total)) for stream, total in ended)
            self._lengths.update((int(shard), int(length)) for shard, length in read)
        self._reader.lengths.update(self._lengths)

    def _note_totals(self) -> None:
        """The totals of the streams whose shards all have a known length."""
        for stream, shards in enumerate(self._shards):
            if all(shard in self._lengths for shard in shards):
                self._totals[stream] = sum(self._lengths[shard] for shard in shards)

    def _taken(
        self, number: int, places: Sequence[Place], plan: BatchPlan, micro_batch: int | None, whole: bool
    ) -> Step:
        """The step that takes the examples of these places."""
        held = {place: self._held.pop(place) for place in places if place in self._held}
        indices, examples = [-1] * len(places), dict[int, Any]()
        for position in range(len(places)) if whole else _positions(plan, len(places), micro_batch):
            index, example = held.get(places[position]) or self._read(places[position])
            indices[position], examples[index] = index, example
        # The template of zero-length batches.
        if examples:
            self._template = next(iter(examples.values()))
        elif self._template is None:
            self._template = (next(iter(held.values()), None) or self._read(places[0]))[1]
        examples[-1] = self._template
        return Step(number, indices, examples)

    def _read(self, place: Place) -> Example:
        stream, position = place
        return self._reader.read(stream, position, position + 1)[0]


def _positions(plan: BatchPlan, total: int, micro_batch: int | None) -> Iterator[int]:
    """The positions of this process in a global batch of `total` examples."""
    for places in plan.layout(total, micro_batch).yields:
        for _, _, low, high in places:
            yield from range(low, high)
