"""Fetchers: they answer a loader's requests with examples, fetched and collated in the main process or in workers.

Both fetchers are data sets for torch's DataLoader with `batch_size=None`: its "index" is a Request, and an item is the
request with its collated batches. So torch's workers, prefetching and pinning thread are used as they are. Every random
draw is keyed by its address, in whichever process it happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert

from paceline.data.agreement import digest_of_example, probe_of_stream
from paceline.data.batch_plan import BatchPlan, Fetched, Part, Request
from paceline.data.collating import Collator
from paceline.data.example_reader import ExampleReader
from paceline.data.made_batches import RowAddresses, RowDataset
from paceline.data.placement import pinned
from paceline.data.randomness import mix, tag
from paceline.errors import SettingError


class Answer(NamedTuple):
    """What a fetcher gives to torch's DataLoader."""

    request: Request
    batches: list[Any]  # the collated batch of each part of the request

    def pin_memory(self) -> Answer:
        """The DataLoader calls this in place of its own pinning, which would take the request apart, index by index,
        and raise where a tensor is on the device already."""
        return Answer(self.request, [pinned(batch) for batch in self.batches])


def converted(answer: Answer) -> Answer:
    """The answer with its batches as a DataLoader without a collate function leaves them: arrays become tensors."""
    return Answer(answer.request, [default_convert(batch) for batch in answer.batches])


class MapFetcher(Dataset[Fetched]):
    """Answers the requests of a loader over a map-style data set."""

    def __init__(self, dataset: Any, collator: Collator) -> None:
        self.dataset, self.collator = dataset, collator
        self._reader = ExampleReader(dataset, collator.streams.example_keys)

    def __getitem__(self, request: Request) -> Fetched:
        def examples(indices: Sequence[int]) -> list[Any]:
            return self._examples(request.epoch, indices)

        if request.probe is not None:
            # Before this rank's own examples, while a generator that the data set holds has one state on all ranks.
            digests = tuple(digest_of_example(example) for example in examples(request.probe.indices))
            request = request._replace(probe=request.probe._replace(examples=digests))
        return Answer(request, [self._collated(request, part, examples) for part in request.parts])

    def _collated(self, request: Request, part: Part, examples: Callable[[Sequence[int]], list[Any]]) -> Any:
        batch = self._reader.collated(part.indices) if self.collator.collate is default_collate else None
        return self.collator.collate_part(request, part, examples) if batch is None else batch

    def _examples(self, epoch: int, indices: Sequence[int]) -> Any:
        if isinstance(self.dataset, RowDataset):
            return RowAddresses(epoch, indices)
        return self._reader.read(epoch, indices)


class StreamFetcher(IterableDataset[Fetched]):
    """Cuts the stream of an iterable data set into the yields of this process.

    Every process reads the whole stream and keeps its own part, since no process knows what another one has read. The
    index of an example is its position in the stream. Shuffling yields a random one of `buffer` waiting examples, as
    tf.data's `shuffle` does.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collator: Collator,
        *,
        seed: int,
        global_batch: int,
        micro_batch: int | None,
        buffer: int,
        drop_last: bool,
    ) -> None:
        self.dataset, self.collator, self.seed = dataset, collator, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.buffer, self.drop_last = buffer, drop_last
        # Set before each pass:
        self.plan: BatchPlan | None = None
        self.epoch, self.start = 0, 0  # start: the step at which the pass begins
        self.probing = False  # whether the ranks are to compare their data

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
        """(index, example), each made with generators that are keyed by its index."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        source = iter(self.dataset)
        index = 0
        while True:
            self.collator.streams.seed_example(self.epoch, index)
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
        whole = self.collator.scope == "global"
        order = list(examples)

        def read(indices: Sequence[int]) -> list[Any]:
            return [examples[index] for index in indices]

        assert self.plan is not None
        for request in self.plan.requests(order, self.epoch, step, self.micro_batch, probe, whole=whole):
            parts = [self.collator.collate_part(request, part, read) for part in request.parts]
            yield Answer(request, parts)


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated. Raises SettingError for what is no data set."""
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
