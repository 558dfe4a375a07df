"""Fetchers answer a loader's requests: they fetch and collate examples in the main process or in workers.

Both fetchers are data sets for torch's DataLoader with `batch_size=None`. Their "index" is a Request, and their item is
an Answer: the request with its collated batches. So torch's workers, prefetching and pinning thread work unchanged. In
every process, a random draw is keyed by its address (randomness.py).

An example's draws depend on the example alone (ExampleReader). Before an example is read, the three global generators
are seeded with its key. That takes 8 us. Most data sets return an example in less time, and few data sets draw. So:

1. Read the first examples one by one, with all generators seeded.
2. For later examples, seed only the generators that the first examples used. If the first examples used none, read all
   examples of a part of a global batch at once, with `__getitems__` if the data set has it, as torch's fetcher does.
3. If another generator moves while a part is read, an example has drawn from that generator. Read the part again with
   the generator seeded too, and keep seeding it.

So an example draws the same numbers that it would draw with all generators seeded. One exception: a data set that draws
nothing for the first examples, and later caches its draws by index, keeps the draws of the first reading in step 3. It
should use its own generator, seeded by the index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate, default_convert

from paceline.data.agreement import digest_of_example, probe_of_stream
from paceline.data.batch_plan import BatchPlan, Fetched, Request
from paceline.data.collating import Collator
from paceline.data.placement import pinned
from paceline.data.randomness import GENERATORS, drawn_from, just_seeded, mix, seed_all, seed_some, tag
from paceline.data.shards import shards_of, shuffled
from paceline.data.user_batches import RowAddresses, RowDataset
from paceline.errors import SettingError


class Answer(NamedTuple):
    """One item for torch's DataLoader."""

    request: Request
    batches: list[Any]  # the collated batch of each part of the request

    def pin_memory(self) -> Answer:
        """The answer with its batches in pinned memory. The DataLoader calls this instead of its own pinning, which
        would also search the request, index by index, and raise for a tensor that is already on the device."""
        return Answer(self.request, [pinned(batch) for batch in self.batches])


def converted(answer: Answer) -> Answer:
    """The answer with arrays converted to tensors, as a DataLoader without a collate function does."""
    return Answer(answer.request, [default_convert(batch) for batch in answer.batches])


_LOOKED_AT = 64
"""Number of examples that a process, or a worker of its loader, reads first with all generators seeded."""
_ANY_KEY = 0  # the key of generators that no example is expected to use


class ExampleReader:
    """Reads examples by their indices.

    Args:
        dataset: a map-style data set.
        keys: (epoch, indices) -> the keys of these examples' streams.
    """

    def __init__(self, dataset: Any, keys: Callable[[int, Sequence[int]], list[int]]) -> None:
        self.dataset, self._keys = dataset, keys
        self._drawn: frozenset[str] = frozenset()  # the generators that examples have drawn from
        self._looked_at = 0  # examples read so far with all generators seeded
        self._at_once = _reads_at_once(type(dataset))
        self._select = self.takes_rows and all(type(one) is Tensor and one.is_cpu for one in dataset.tensors)

    def read(self, epoch: int, indices: Sequence[int]) -> list[Any]:
        """The examples with these indices, in this order."""
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
        """Whether the examples are rows of tensors, so that `collated` can read them at once."""
        return type(self.dataset) is TensorDataset

    def collated(self, indices: Sequence[int]) -> list[Tensor]:
        """The result of default_collate for these examples, if `takes_rows`. A TensorDataset draws nothing."""
        rows = torch.from_numpy(np.array(indices))  # torch.tensor takes twice as long
        if self._select:
            try:
                return [tensor.index_select(0, rows) for tensor in self.dataset.tensors]  # half the time of indexing
            except IndexError:  # a sampler may count from the end; if an index is too large, indexing says which
                pass
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
    """Is the class's `__getitems__` consistent with its `__getitem__`? Not if a subclass inherits `__getitems__` and
    overrides `__getitem__`. Not if `__getattr__` finds `__getitems__` in a wrapped data set."""
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
            # Read the probe before this rank's shard: a generator stored in the data set still has the same state on
            # all ranks.
            digests = tuple(digest_of_example(example) for example in examples(request.probe.indices))
            request = request._replace(probe=request.probe._replace(examples=digests))
        return Answer(request, [self.collator.collate_part(request, part, examples) for part in request.parts])

    def answers(self, requests: Iterable[Request], pins: bool) -> Iterator[Answer]:
        """The answers to these requests, made in this process. Replaces torch's DataLoader without workers, which costs
        40 us per batch. pins: put batches into pinned memory."""
        plain = self.collator.collate is default_collate  # its result needs no conversion
        for request in requests:
            answer = self[request] if plain else converted(self[request])
            yield answer.pin_memory() if pins else answer

    def _examples(self, epoch: int, indices: Sequence[int]) -> Any:
        if isinstance(self.dataset, RowDataset):
            return RowAddresses(epoch, indices)
        return self._reader.read(epoch, indices)


class StreamFetcher(IterableDataset[Fetched]):
    """Splits the stream of an iterable data set into the yields of this process.

    Every process reads the whole stream and keeps its shards, since it does not know what other processes have read.
    The index of an example is its position in the stream. Shuffling picks random examples from a buffer of `buffer`
    examples, like tf.data's `shuffle`.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collator: Collator,
        *,
        name: str,
        seed: int,
        global_batch: int,
        micro_batch: int | None,
        buffer: int,
        drop_last: bool,
    ) -> None:
        self.dataset, self.collator, self.name, self.seed = dataset, collator, name, seed
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.buffer, self.drop_last = buffer, drop_last
        # Set before each pass:
        self.plan: BatchPlan | None = None
        self.epoch, self.start = 0, 0  # start: the first step of the pass
        self.probing = False  # should the ranks compare their data?

    def __iter__(self) -> Iterator[Fetched]:
        stream = self._shuffled(self._numbered())
        step = 0
        while batch := list(islice(stream, self.global_batch)):
            if len(batch) < self.global_batch and self.drop_last:
                return
            if step >= self.start:
                yield from self._split(batch, step)
            step += 1

    def _numbered(self) -> Iterator[tuple[int, Any]]:
        """(index, example) for each example of the stream, read with the generators keyed by its index."""
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
            return examples
        return shuffled(examples, random.Random(mix(self.seed, tag("shuffle"), self.epoch)), self.buffer)

    def _split(self, batch: list[tuple[int, Any]], step: int) -> Iterator[Fetched]:
        examples = dict(batch)
        probe = probe_of_stream(examples.values()) if self.probing and step == self.start else None
        whole = self.collator.scope == "global"
        order = list(examples)

        def read(indices: Sequence[int]) -> list[Any]:
            return [examples[index] for index in indices]

        assert self.plan is not None
        weights = self.plan.weights(self.name, self.epoch, step)
        for request in self.plan.requests(
            order, self.epoch, step, self.micro_batch, probe, whole=whole, weights=weights
        ):
            parts = [self.collator.collate_part(request, part, read) for part in request.parts]
            yield Answer(request, parts)


def is_stream(dataset: Any) -> bool:
    """Whether a data set can only be iterated. Raises SettingError if the object is not a data set."""
    if isinstance(dataset, IterableDataset) or shards_of(dataset) is not None:
        return True
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__"):
        return True
    raise SettingError(
        f"run.loader(dataset={type(dataset).__name__}): a data set needs __getitem__ and __len__, or an __iter__ that "
        "starts again at each call (an iterator or generator can be read only once)."
    )
