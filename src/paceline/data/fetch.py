"""Fetchers: they answer a loader's requests with examples, fetched and collated in the main process or in workers.

Both fetchers are data sets for torch's DataLoader with `batch_size=None`: its "index" is a Request, and an item is the
request with its collated batches. So torch's workers, prefetching and pinning thread are used as they are. Every random
draw is keyed by its address, in whichever process it happens.

What an example draws depends on the example alone (ExampleReader). Before an example is made, the global generators are
seeded with its key. That costs 8 us for the three of them, more than it takes most data sets to give an example, and
few draw. So:

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

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, default_convert

from paceline.data.agreement import digest_of_example, probe_of_stream
from paceline.data.batch_plan import BatchPlan, Fetched, Request
from paceline.data.collating import Collator
from paceline.data.made_batches import RowAddresses, RowDataset
from paceline.data.placement import pinned
from paceline.data.randomness import GENERATORS, drawn_from, just_seeded, mix, seed_all, seed_some, tag
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

    @property
    def takes_rows(self) -> bool:
        """Whether the examples are rows of tensors, which `collated` takes at once."""
        return type(self.dataset) is TensorDataset

    def collated(self, indices: Sequence[int]) -> list[Tensor]:
        """What default_collate makes of these examples, of a data set that `takes_rows`. Nothing draws there."""
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


class MapFetcher(Dataset[Fetched]):
    """Answers the requests of a loader over a map-style data set."""

    def __init__(self, dataset: Any, collator: Collator) -> None:
        self.dataset, self.collator = dataset, collator
        self._reader = ExampleReader(dataset, collator.streams.example_keys)
        self._takes_rows = self._reader.takes_rows and collator.collate is default_collate

    def __getitem__(self, request: Request) -> Answer:
        if self._takes_rows and request.probe is None and len(request.parts) == 1 and request.examples:
            return Answer(request, [self._reader.collated(request.parts[0].indices)])

        def examples(indices: Sequence[int]) -> list[Any]:
            return self._examples(request.epoch, indices)

        if request.probe is not None:
            # Before this rank's own examples, while a generator that the data set holds has one state on all ranks.
            digests = tuple(digest_of_example(example) for example in examples(request.probe.indices))
            request = request._replace(probe=request.probe._replace(examples=digests))
        return Answer(request, [self.collator.collate_part(request, part, examples) for part in request.parts])

    def answers(self, requests: Iterable[Request], pins: bool) -> Iterator[Answer]:
        """The answers to these requests, made here: what torch's loader does without workers, without its 40 us a
        batch. pins: into page-locked memory."""
        plain = self.collator.collate is default_collate  # what it makes needs no conversion
        for request in requests:
            answer = self[request] if plain else converted(self[request])
            yield answer.pin_memory() if pins else answer

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
