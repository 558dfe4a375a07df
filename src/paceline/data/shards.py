"""A data set of shards, and its examples as streams that are read side by side.

The shards of an epoch are dealt to S streams: stream s reads the shards s, s + S, ... of the epoch's order, in turn.
S depends on the number of shards and the global batch alone. A round takes the next `blocks[s]` examples of each stream
s, in the order of the streams; a full round is a global batch. A stream that has ended gives
nothing, and the global batches continue over the examples of later rounds (StreamOrder).

The index of an example is its shard's number times 2**32, plus its position in the shard.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, Protocol, cast

from torch.utils.data import Dataset

from paceline.data.batch_plan import cut
from paceline.data.randomness import mix, tag
from paceline.errors import SettingError, UsageError
from paceline.torch_private.workers import as_in_the_main_process

Place = tuple[int, int]
"""(stream, position in the stream)."""

Example = tuple[int, Any]
"""(index, example)."""


class Shards(Protocol):
    """A data set of shards, as its reader sees it."""

    count: int
    digest: int  # of the names of the shards: the same on every rank

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""

    def read(self, shard: int, position: int) -> Iterable[Any]:
        """The examples of a shard, from this position on."""


class UserShards:
    """A data set with `shards`, a list or a number, and `read(shard, position)`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, given = dataset, dataset.shards
        self._names = range(given) if isinstance(given, int) else list(given)
        self.count = len(self._names)
        self.digest = zlib.crc32(repr([n for n in self._names if isinstance(n, (str, int))]).encode())

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def read(self, shard: int, position: int) -> Iterable[Any]:
        return cast("Iterable[Any]", self._dataset.read(self._names[shard], position))


class HuggingFaceShards:
    """An IterableDataset of Hugging Face `datasets`. Its shards have no position: earlier examples are read again."""

    digest = 0

    def __init__(self, dataset: Any) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise SettingError(
                "run.loader(dataset=IterableDataset): split_dataset_by_node has given each rank a part of the data. "
                "Paceline splits it itself, so most examples would be lost. Remove that split."
            )
        self._dataset, self.count, self._epoch = dataset, int(dataset.num_shards), 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def read(self, shard: int, position: int) -> Iterable[Any]:
        one = self._dataset.shard(self.count, shard)
        one.set_epoch(self._epoch)
        return islice(one, position, None)


def shards_of(dataset: Any) -> Shards | None:
    """The shards of a data set; None if it does not say what they are, or has one. Raises SettingError for no shard."""
    # A data set with rows may have these names too. torch's Dataset has a __getitem__ that raises NotImplementedError.
    has_rows = getattr(type(dataset), "__getitem__", Dataset.__getitem__) is not Dataset.__getitem__
    if not has_rows and hasattr(dataset, "shards") and callable(getattr(dataset, "read", None)):
        found = UserShards(dataset)
        if not found.count:
            raise SettingError(
                f"run.loader(dataset={type(dataset).__name__}): its attribute `shards` is empty. Give it a list of at "
                "least one shard, or their number."
            )
        return found
    parts = ("num_shards", "shard", "set_epoch", "state_dict")
    if all(hasattr(dataset, name) for name in parts) and dataset.num_shards > 1:
        return HuggingFaceShards(dataset)
    return None


def stream_count(shards: int, global_batch: int) -> int:
    """S, the number of streams: at most the global batch, with as many shards in each as possible, or one fewer."""
    return -(-shards // -(-shards // global_batch))


class StreamOrder:
    """The global order of the examples.

    Args:
        blocks: for each stream, its examples in a full round.
        totals: stream -> its number of examples, for the streams that are known to have ended.
    """

    def __init__(self, blocks: Sequence[int], totals: Mapping[int, int]) -> None:
        self._blocks, self._totals = blocks, totals

    def before(self, number: int) -> int:
        """The number of places in the rounds before this one. The lengths of those must be known."""
        ended = self._totals
        return sum(min(number * b, ended.get(stream, number * b)) for stream, b in enumerate(self._blocks))

    def round_of(self, place: int) -> int:
        """The round with the place of this number in the global order. The streams' lengths before it must be known."""
        low, high = 0, place + 1  # a round has a place, unless all streams have ended
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.before(middle) <= place else (low, middle)
        return low

    def places(self, number: int) -> list[Place]:
        """The places of a round, in order. Its streams' lengths in it must be known."""
        found = []
        for stream, block in enumerate(self._blocks):
            first, total = number * block, self._totals.get(stream)
            last = first + block if total is None else min(first + block, total)
            found += [(stream, position) for position in range(first, last)]
        return found


class StreamReader:
    """Reads streams from any position. A stream that is read in sequence stays open.

    Args:
        seed_example: (epoch, index): seeds the global generators for an example.
        buffer: number of examples of a shard that are shuffled together; 1: none.
        shuffle_key: the key of that shuffle.
    """

    def __init__(self, data: Shards, seed_example: Callable[[int, int], None], buffer: int, shuffle_key: int) -> None:
        self._data, self._seed_example, self._buffer, self._key = data, seed_example, buffer, shuffle_key
        self._epoch = 0
        self._shards: Sequence[Sequence[int]] = ()  # of each stream
        self._open: dict[int, tuple[int, Iterator[Example]]] = {}  # stream -> (position of the next example, examples)
        self.lengths: dict[int, int] = {}  # shard -> its number of examples in this epoch, of shards read to the end

    def begin(self, epoch: int, shards: Sequence[Sequence[int]], lengths: Mapping[int, int]) -> None:
        """Begin a pass. shards: of each stream. lengths: those known, of all shards before the first position read."""
        self._epoch, self._shards, self._open, self.lengths = epoch, shards, {}, dict(lengths)
        self._data.set_epoch(epoch)

    def read(self, stream: int, start: int, stop: int) -> list[Example]:
        """The examples at these positions of a stream; fewer if it ends before."""
        position, examples = self._open.get(stream, (0, iter(())))
        if stream not in self._open or position > start:
            position, examples = start, self._examples(self._shards[stream], start)
        found = list(islice(examples, start - position, stop - position))
        self._open[stream] = stop, examples
        return found

    def _examples(self, shards: Sequence[int], position: int) -> Iterator[Example]:
        for shard in shards:
            length = self.lengths.get(shard)
            if length is not None and position >= length:
                position -= length
                continue
            count = position
            for example in self._of_shard(shard, position):
                yield example
                count += 1
            if self.lengths.setdefault(shard, count) != count:
                raise UsageError(
                    f"shard {shard} of the data set had {length} examples, and has {count} when it is read again in "
                    "the same epoch. A shard must give the same examples each time, and read(shard, position) those "
                    "from `position` on."
                )
            position = 0

    def _of_shard(self, shard: int, position: int) -> Iterator[Example]:
        if self._buffer <= 1:
            return self._numbered(shard, position)
        draw = random.Random(mix(self._key, self._epoch, shard))
        return islice(shuffled(self._numbered(shard, 0), draw, self._buffer), position, None)

    def _numbered(self, shard: int, position: int) -> Iterator[Example]:
        """(index, example) for each example of a shard, read with the generators keyed by its index."""
        index = (shard << 32) + position
        with as_in_the_main_process():
            self._seed_example(self._epoch, index)
            source = iter(self._data.read(shard, position))
            first = list(islice(source, 1))
        if not first:
            return
        yield index, first[0]
        while True:
            index += 1
            self._seed_example(self._epoch, index)
            try:
                example = next(source)
            except StopIteration:
                return
            yield index, example


def shuffled(examples: Iterator[Example], draw: random.Random, buffer: int) -> Iterator[Example]:
    """Picks random examples from a buffer, like tf.data's `shuffle`."""
    waiting = list(islice(examples, buffer))
    for example in examples:
        slot = draw.randrange(len(waiting))
        chosen, waiting[slot] = waiting[slot], example
        yield chosen
    draw.shuffle(waiting)
    yield from waiting


class Wanted(NamedTuple):
    """A request for the examples of some streams: (stream, first position, end) for each."""

    ranges: tuple[tuple[int, int, int], ...]


class Found(NamedTuple):
    """The answer to Wanted."""

    wanted: Wanted
    examples: list[list[Example]]
    lengths: dict[int, int]  # of the shards that were read to the end


class ShardFetcher(Dataset[Found]):
    """Answers requests for examples in a DataLoader, in this process or in a worker. The reader must have begun."""

    def __init__(self, reader: StreamReader) -> None:
        self.reader = reader

    def __getitem__(self, wanted: Wanted) -> Found:
        before = set(self.reader.lengths)
        examples = [self.reader.read(*one) for one in wanted.ranges]
        new = {shard: length for shard, length in self.reader.lengths.items() if shard not in before}
        return Found(wanted, examples, new)


def unchanged(found: Found) -> Found:
    """A collate function for torch's DataLoader that can be sent to a worker."""
    return found


def blocks_of(global_batch: int, streams: int) -> list[int]:
    """For each stream, its examples in a full round."""
    return [stop - start for start, stop in (cut(global_batch, streams, stream) for stream in range(streams))]


def shuffle_key(seed: int, name: str) -> int:
    """The key of a loader's shuffle buffers."""
    return mix(seed, tag("shuffle"), tag(name))
