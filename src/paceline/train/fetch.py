"""The data set's side of a loader: fetch, augment and collate, in the main process or in workers.

Both classes are data sets for torch's DataLoader with `batch_size=None`: its "index" is a Request, and what it
returns is the request with its collated batches. So torch's workers, prefetching and pinning do the work, and every
draw of a random number is keyed by its address, in whichever process it happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from paceline.errors import SettingError
from paceline.strategies.base import Layout
from paceline.train.agreement import digest_of_example, probe_of_stream
from paceline.train.empty import empty_batch
from paceline.train.order import Part, Request, requests
from paceline.train.randomness import mix, seed_all, tag

Collate = Callable[[list[Any]], Any]
Fetched = tuple[Request, list[Any]]


class Streams:
    """The keys of one loader's draws."""

    def __init__(self, seed: int, name: str) -> None:
        self._example = mix(seed, tag("example"), tag(name))
        self._collate = mix(seed, tag("collate"), tag(name))
        self._yield = mix(seed, tag("yield"), tag(name))

    def for_example(self, epoch: int, index: int) -> None:
        """Before a data set makes one example."""
        seed_all(mix(self._example, epoch, index))

    def for_collate(self, request: Request, part: Part) -> None:
        """Before the examples of a micro-batch are collated."""
        seed_all(mix(self._collate, request.epoch, request.step, part.shard, part.micro))

    def torch_key(self, request: Request, shard: int, micro: int) -> int:
        """While a micro-batch is computed: other noise on every shard and micro-batch."""
        return mix(self._yield, request.epoch, request.step, shard, micro)

    def python_key(self, request: Request) -> int:
        """While a global batch is computed: choices that all shards must agree on."""
        return mix(self._yield, request.epoch, request.step)


class MapFetcher(Dataset[Fetched]):
    """A map-style data set, asked for the examples of a request."""

    def __init__(self, dataset: Any, collate: Collate, streams: Streams) -> None:
        self.dataset, self.collate, self.streams = dataset, collate, streams

    def __getitem__(self, request: Request) -> Fetched:
        if request.probe is not None:  # before its own, so that a generator of the data set's stands alike on all ranks
            examples = (self._example(request.epoch, index) for index in request.probe.indices)
            probe = request.probe._replace(examples=tuple(map(digest_of_example, examples)))
            request = request._replace(probe=probe)
        return request, [self._collated(request, part) for part in request.parts]

    def _collated(self, request: Request, part: Part) -> Any:
        if not part.indices:
            example = self._example(request.epoch, request.first)
            self.streams.for_collate(request, part)
            return empty_batch(self.collate, example)
        examples = [self._example(request.epoch, index) for index in part.indices]
        self.streams.for_collate(request, part)
        return self.collate(examples)

    def _example(self, epoch: int, index: int) -> Any:
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
        collate: Collate,
        streams: Streams,
        *,
        seed: int,
        layout: Layout,
        global_batch: int,
        micro_batch: int | None,
        buffer: int,
        drop_last: bool,
    ) -> None:
        self.dataset, self.collate, self.streams, self.seed = dataset, collate, streams, seed
        self.layout, self.global_batch, self.micro_batch = layout, global_batch, micro_batch
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
        for request in requests(list(examples), self.epoch, step, self.layout, self.micro_batch, probe):
            batches = []
            for part in request.parts:
                self.streams.for_collate(request, part)
                if part.indices:
                    batches.append(self.collate([examples[index] for index in part.indices]))
                else:
                    batches.append(empty_batch(self.collate, examples[request.first]))
            yield request, batches


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
