"""The data set's side of a loader: fetch, augment and collate, in the main process or in workers.

Both classes are data sets for torch's DataLoader with `batch_size=None`: its "index" is a Request, and what it
returns is the request with its collated batches. So torch's workers, prefetching and pinning do the work, and every
draw of a random number is keyed by its address, in whichever process it happens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from paceline.errors import SettingError
from paceline.strategies.batch_plan import BatchPlan, Fetched, Part, Request
from paceline.train.agreement import digest_of_example, probe_of_stream
from paceline.train.collating import Collating
from paceline.train.made_batches import Places
from paceline.train.randomness import mix, tag


class MapFetcher(Dataset[Fetched]):
    """A map-style data set, asked for the examples of a request."""

    def __init__(self, dataset: Any, collating: Collating) -> None:
        self.dataset, self.collating, self.streams = dataset, collating, collating.streams

    def __getitem__(self, request: Request) -> Fetched:
        if request.probe is not None:  # before its own, so that a generator of the data set's stands alike on all ranks
            examples = (self._example(request.epoch, index) for index in request.probe.indices)
            probe = request.probe._replace(examples=tuple(map(digest_of_example, examples)))
            request = request._replace(probe=probe)
        return request, [self._collated(request, part) for part in request.parts]

    def _collated(self, request: Request, part: Part) -> Any:
        if request.whole:
            return self.collating.rows(
                request, part, lambda: [self._example(request.epoch, index) for index in request.whole]
            )
        if not part.indices:
            return self.collating.empty(request, part, self._example(request.epoch, request.first))
        return self.collating.batch(request, part, [self._example(request.epoch, index) for index in part.indices])

    def _example(self, epoch: int, index: int) -> Any:
        if isinstance(self.dataset, Places):
            return self.dataset.of_epoch(epoch, index)
        self.streams.for_example(epoch, index)
        return self.dataset[index]


class StreamFetcher(IterableDataset[Fetched]):
    """An iterable data set: every process reads the whole stream, and keeps what is its own.

    That is the price of an order that does not depend on the world: no process knows what another one has read. An
    example's index is its position in the stream. The buffered shuffle draws a random one of `buffer` waiting
    examples, as in tf.data's `shuffle`.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collating: Collating,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None,
        buffer: int,
        drop_last: bool,
    ) -> None:
        self.dataset, self.collating, self.streams, self.seed = dataset, collating, collating.streams, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.plan: BatchPlan | None = None  # set before each pass
        self.buffer, self.drop_last = buffer, drop_last
        self.epoch, self.start = 0, 0
        self.probing = False

    def __iter__(self) -> Iterator[Fetched]:
        stream = self._shuffled(self._numbered())
        step = 0
        while batch := list(islice(stream, self.global_batch)):
            if len(batch) < self.global_batch and self.drop_last:
                return
            if step >= self.start:
                yield from self._cut(batch, step)
            step += 1

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        source = iter(self.dataset)
        index = 0
        while True:
            self.streams.for_example(self.epoch, index)
            try:
                example = next(source)
            except StopIteration:
                return
            yield index, example
            index += 1

    def _shuffled(self, examples: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        if self.buffer <= 1:
            yield from examples
            return
        draw = random.Random(mix(self.seed, tag("shuffle"), self.epoch))
        waiting = list(islice(examples, self.buffer))
        for example in examples:
            slot = draw.randrange(len(waiting))
            chosen, waiting[slot] = waiting[slot], example
            yield chosen
        draw.shuffle(waiting)
        yield from waiting

    def _cut(self, batch: list[tuple[int, Any]], step: int) -> Iterator[Fetched]:
        examples = dict(batch)
        probe = probe_of_stream(examples.values()) if self.probing and step == self.start else None
        whole = self.collating.scope == "global"
        order = list(examples)
        assert self.plan is not None
        for request in self.plan.requests(order, self.epoch, step, self.micro_batch, probe, whole=whole):
            yield request, [self._collated(request, part, examples) for part in request.parts]

    def _collated(self, request: Request, part: Part, examples: dict[int, Any]) -> Any:
        if request.whole:
            return self.collating.rows(request, part, lambda: list(examples.values()))
        if not part.indices:
            return self.collating.empty(request, part, examples[request.first])
        return self.collating.batch(request, part, [examples[index] for index in part.indices])


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated. Raises SettingError for what is no data set at all."""
    if isinstance(dataset, IterableDataset):
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__"):
        return True
    raise SettingError(
        f"run.loader(dataset={type(dataset).__name__}): a data set needs __getitem__ and __len__, or __iter__ that "
        "starts anew each time it is called (an iterator or generator can be read only once)."
    )
