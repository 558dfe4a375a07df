"""The source of a loader's global batches: a data set and its order, read through torch's DataLoader.

1. `make_source` checks the arguments of `run.loader` against each other.
2. For each pass, the source determines the examples in each global batch of the epoch.
3. The strategy's plan turns global batches into requests, one for each yield of this process (batch_plan.py).
4. torch's DataLoader answers each request with collated batches (fetch.py), in this process or in its workers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from paceline.comm.mesh import world_group
from paceline.data import order
from paceline.data.agreement import check_same_data, probe_of_indices
from paceline.data.batch_plan import BatchPlan, Fetched, GlobalBatches, Pass, Request
from paceline.data.collating import SCOPES, Collator, Streams
from paceline.data.fetch import Answer, MapFetcher, StreamFetcher, converted, is_stream
from paceline.data.randomness import mix, tag
from paceline.data.sampler_rng import SamplerRNG, generators_of
from paceline.data.shard_pass import ShardPass
from paceline.data.shards import (
    Found,
    ShardFetcher,
    Shards,
    StreamReader,
    Wanted,
    blocks_of,
    shards_of,
    shuffle_key,
    stream_count,
    unchanged,
)
from paceline.data.user_batches import RowDataset
from paceline.errors import SettingError, suggest, warn

SOCKET_PATH = 107
"""The largest number of characters in a Unix socket's path on Linux (man 7 unix)."""

LONGEST_DIRECTORY = SOCKET_PATH - len("/pymp-12345678/listener-12345678")
"""The largest number of characters in TMPDIR, in which Python's multiprocessing makes these names."""

STREAM_BUFFER = 1000
"""Default size of the shuffle buffer of an iterable data set."""

DATALOADER_OPTIONS = frozenset(
    [
        "num_workers",
        "collate_fn",
        "pin_memory",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
        "prefetch_factor",
        "persistent_workers",
        "pin_memory_device",
    ]
)
"""Arguments that `run.loader` passes to torch's DataLoader."""


@dataclass(frozen=True)
class LoaderArguments:
    """The arguments of `run.loader`, documented there."""

    global_batch: int | None = None
    micro_batch: int | None = None
    shuffle: bool = False
    train: bool = True
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    name: str = "train"
    shuffle_buffer: int | None = None
    collate: str = "example"
    limit_batches: int | float | None = None
    options: dict[str, Any] = field(default_factory=dict)  # for torch's DataLoader


PACELINE_ARGUMENTS = frozenset(argument.name for argument in fields(LoaderArguments)) - {"options"}
"""Arguments of `run.loader` that torch's DataLoader lacks or defines differently."""


class Source:
    """Base class of the sources of map-style and iterable data sets.

    plan: returns the strategy's plan, the same object until the plan changes.
    """

    def __init__(self, dataset: Any, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]) -> None:
        self.dataset, self.name, self.train, self.seed, self.plan = dataset, given.name, given.train, seed, plan
        self.global_batch = given.global_batch  # None if a batch sampler makes the batches
        self.micro_batch, self.drop_last = given.micro_batch, given.drop_last
        self.limit_batches = given.limit_batches
        self.options = {key: value for key, value in given.options.items() if key != "collate_fn"}
        if self.options.get("num_workers"):
            _check_temporary_directory(given.name, self.options["num_workers"])
        self.streams = Streams(seed, given.name)
        self.collator = Collator(given.options.get("collate_fn") or default_collate, self.streams, given.collate)
        self.sampled_batch = 0  # size of the batch sampler's first batch, if a work queue assigns its chunks
        self.probing = False  # do the ranks still have to compare their data?
        # The epoch that continues in order version 1 (order.VERSION), since a checkpoint of that version began it.
        self.first_order_epoch: int | None = None

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        """This process's yields of an epoch, from step `start`."""
        raise NotImplementedError

    def all_batch_sizes(self) -> Mapping[int, int]:
        """The sizes of all global batches of the data, in order: size -> number of global batches of that size. Raises
        TypeError if the sizes are not known in advance."""
        raise NotImplementedError

    def batch_sizes(self) -> Mapping[int, int]:
        """The sizes of an epoch's global batches, up to the limit: size -> number of global batches of that size."""
        limit, found = self.limit(), dict[int, int]()
        for size, number in self.all_batch_sizes().items():
            found[size] = number if limit is None else min(number, limit - sum(found.values()))
        return found

    def limit(self) -> int | None:
        """The largest number of global batches per epoch; None: all. Raises TypeError if the limit is a fraction of a
        number of global batches that is not known in advance."""
        limit = self.limit_batches
        return int(limit * sum(self.all_batch_sizes().values())) if isinstance(limit, float) else limit

    def identity(self) -> dict[str, Any]:
        """The values that must be the same for a run to resume in mid-epoch."""
        raise NotImplementedError

    def progress(self, epoch: int) -> dict[str, Any]:
        """The state that a checkpoint in the middle of this epoch needs besides the step."""
        return {}

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        """Continue an epoch from a checkpoint with this `progress`."""
        return None

    def order_version(self, epoch: int) -> int:
        """Version of the order of this epoch's examples."""
        return 1 if epoch == self.first_order_epoch else order.VERSION

    def check_same_data(self, request: Request) -> None:
        """Check that all ranks read the same data. Collective: all ranks call it at the same optimizer step. Raises
        UsageError."""
        self.probing = False
        made_of = {"kind": type(self).__name__, **self.identity(), "micro_batch": self.micro_batch}
        check_same_data(self.name, made_of, request.probe)

    def steps(self) -> int:
        """Optimizer steps per epoch. Raises TypeError if the number is not known in advance."""
        return sum(self.batch_sizes().values())

    def why_empty(self) -> str:
        """The error message for a training loader that has yielded nothing."""
        count = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        begin = f"loader {self.name!r} has no batch:"
        if not count or self.global_batch is None:
            what = "its data set is empty" if count == 0 else "its data set, or its sampler, gives no example"
            return f"{begin} {what}. Provide examples to train on, the same on every rank."
        if count >= self.global_batch:
            return f"{begin} its sampler gives no global batch of {self.global_batch} examples."
        return (
            f"{begin} its data set has {count} examples, but its global batch needs {self.global_batch}, and "
            f"drop_last=True drops incomplete batches. Set global_batch to {count} or less, or drop_last=False."
        )

    def yields(self) -> int:
        """Yields per epoch on this process. Raises TypeError if the number is not known in advance."""
        return self.plan().count(self.batch_sizes(), self.micro_batch)

    def data_loader(self, dataset: Any, requests: Any) -> DataLoader[Fetched]:
        """torch's DataLoader over a fetcher. requests: passed as its sampler."""
        # Pass a generator: otherwise each iteration of torch's DataLoader draws from the default generator.
        fixed: dict[str, Any] = {"batch_size": None, "collate_fn": converted, "generator": torch.Generator()}
        return DataLoader(dataset, sampler=requests, **fixed, **self.options)


class MapSource(Source):
    """A map-style data set, read in its own order, shuffled, or in the order of the user's (batch) sampler."""

    def __init__(self, dataset: Any, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]) -> None:
        super().__init__(dataset, given, seed, plan)
        self.shuffle, self.sampler, self.batch_sampler = given.shuffle, given.sampler, given.batch_sampler
        self._requests = _RequestSampler()
        self._fetcher = MapFetcher(dataset, self.collator)
        self._loader = self.data_loader(self._fetcher, self._requests)

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        plan = self.plan()
        data = Pass(
            loader=self.name,
            epoch=epoch,
            start=start,
            batches=lambda: self._limited(self._batches(epoch)),
            micro_batch=self.micro_batch,
            probing=self.probing,
            sampled=self.sampler is not None or self.batch_sampler is not None,
            whole=self.collator.scope == "global",
        )
        if not plan.in_step and self.global_batch is None:
            self.sampled_batch = len(next(iter(self._batches(epoch)), ()))
        return plan.fetch(data, probe_of_indices, self._answer)

    def _answer(self, requests: Iterator[Request]) -> Iterator[Fetched]:
        # If a tool wraps the iterators of torch's DataLoader, use torch's DataLoader, so that the tool sees each batch.
        if self._loader.num_workers == 0 and not hasattr(DataLoader.__iter__, "__wrapped__"):
            return self._fetcher.answers(requests, self._loader.pin_memory and torch.accelerator.is_available())
        self._requests.current = requests
        return iter(self._loader)

    def _batches(self, epoch: int) -> Iterable[Sequence[int]]:
        """The indices of each global batch of the data."""
        if self.batch_sampler is not None:
            return self._sampled(self.batch_sampler, epoch)
        size = self.global_batch
        assert size is not None
        if self.sampler is not None:
            return self._split(self._sampled(self.sampler, epoch), size)
        length = len(self.dataset)
        positions: Any = range(length)
        if self.shuffle:
            positions = order.order_of(length, self.seed, self.name, epoch, self.order_version(epoch))
        return GlobalBatches(positions, size, length // size if self.drop_last else -(-length // size))

    def _split(self, sampled: Iterator[Any], size: int) -> Iterator[Sequence[int]]:
        while batch := list(islice(sampled, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def _limited(self, batches: Iterable[Sequence[int]]) -> Iterable[Sequence[int]]:
        limit = self.limit()
        if isinstance(batches, GlobalBatches):
            return batches.first(limit)
        return islice(batches, limit)

    def _sampled(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """The items of the user's sampler, the same on every rank: generators are keyed by the epoch while it runs."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        rng = SamplerRNG(mix(self.seed, tag("sampler"), tag(self.name), epoch), generators_of(sampler))
        with rng:
            if hasattr(sampler, "__len__"):
                sampled: Iterator[Any] = iter(list(sampler))  # at once: each change of generators costs 40 us
            else:
                sampled = rng.around_each(iter(sampler))
        yield from sampled

    def all_batch_sizes(self) -> Mapping[int, int]:
        if self.batch_sampler is not None:
            if _splits_a_sampler(self.batch_sampler):
                splitter = self.batch_sampler
                return _equal_batches(len(splitter.sampler), splitter.batch_size, splitter.drop_last)
            size = getattr(self.batch_sampler, "batch_size", None)
            if self.micro_batch is not None and size is None:
                raise TypeError("the batch sizes of this batch_sampler are not known before it is iterated")
            return {size or 1: len(self.batch_sampler)}
        assert self.global_batch is not None
        if isinstance(self.dataset, RowDataset) and self.dataset.steps is None:
            raise TypeError("run.batches without steps= has no end")
        length = len(self.sampler if self.sampler is not None else self.dataset)
        return _equal_batches(length, self.global_batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        sampler = self.sampler if self.sampler is not None else self.batch_sampler
        return {
            "length": len(self.dataset),
            "global_batch": self.global_batch,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "sampler": None if sampler is None else type(sampler).__name__,
            # A probe of the indices of a torch Subset, such as random_split returns.
            "subset": probe_of_indices(self.dataset.indices).order if isinstance(self.dataset, Subset) else None,
        }


class StreamSource(Source):
    """An iterable data set of one stream. Every process reads it whole."""

    def __init__(self, dataset: Any, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]) -> None:
        super().__init__(dataset, given, seed, plan)
        assert given.global_batch is not None
        # At most one worker: each of several workers would read only a part of the stream if the data set splits itself
        # by worker, and otherwise every example again.
        self.options["num_workers"] = min(1, self.options.get("num_workers", 0))
        self.options.pop("persistent_workers", None)  # each epoch starts a new worker with the epoch's number
        self._fetcher = StreamFetcher(
            dataset,
            self.collator,
            name=given.name,
            seed=seed,
            global_batch=given.global_batch,
            micro_batch=given.micro_batch,
            buffer=(given.shuffle_buffer or STREAM_BUFFER) if given.shuffle else 1,
            drop_last=given.drop_last,
        )

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        self._fetcher.epoch, self._fetcher.start, self._fetcher.probing = epoch, start, self.probing
        plan = self.plan()
        # A worker plans in its own process, where it would not see a new cut.
        sees_cuts = plan.shard_sizes is None or not self.options["num_workers"]
        self._fetcher.plan = plan if sees_cuts else plan.balanced(None)
        fetched = iter(self.data_loader(self._fetcher, None))
        limit = self.limit()
        return fetched if limit is None else _first_steps(fetched, start, limit)

    def all_batch_sizes(self) -> Mapping[int, int]:
        assert self.global_batch is not None
        return _equal_batches(len(self.dataset), self.global_batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        buffer = self._fetcher.buffer
        return {"global_batch": self.global_batch, "drop_last": self.drop_last, "shuffle_buffer": buffer}


class ShardSource(Source):
    """A data set of shards. Each process reads and computes its share of them (shard_pass.py)."""

    def __init__(
        self, dataset: Any, shards: Shards, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]
    ) -> None:
        super().__init__(dataset, given, seed, lambda: plan().balanced(None))
        assert given.global_batch is not None
        self._shards, self._shuffle, self._batch = shards, given.shuffle, given.global_batch
        self._count = stream_count(shards.count, given.global_batch)
        self._blocks = blocks_of(given.global_batch, self._count)
        # The streams share the buffer. A shard is shuffled on its own, so that a restart reads only one again.
        self._buffer = -(-(given.shuffle_buffer or STREAM_BUFFER) // self._count) if given.shuffle else 1
        self._reader = StreamReader(shards, self.streams.seed_example, self._buffer, shuffle_key(seed, given.name))
        self._lengths: tuple[int, dict[int, int]] = (-1, {})  # (epoch, shard -> its number of examples)
        self.options.pop("persistent_workers", None)  # each epoch starts workers that know the epoch
        self._workers = self.options.pop("num_workers", 0)
        pins = self.options.pop("pin_memory", False)
        self._pins = pins and torch.accelerator.is_available()

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        known = start == 0 or self._lengths[0] == epoch
        if self._lengths[0] != epoch:
            self._lengths = epoch, {}
        lengths, count = self._lengths[1], self._count
        numbers = range(self._shards.count)
        dealt = list(order.order_of(len(numbers), self.seed, self.name, epoch)[:]) if self._shuffle else list(numbers)
        mine = [[int(shard) for shard in dealt[stream::count]] for stream in range(count)]
        self._reader.begin(epoch, mine, lengths)
        plan, whole, limit = self.plan(), self.collator.scope == "global", self.limit()
        made = ShardPass(
            self.name,
            epoch,
            start,
            limit,
            blocks=self._blocks,
            shards=mine,
            lengths=lengths,
            known=known,
            reader=self._reader,
        )
        plain = self.collator.collate is default_collate  # its result needs no conversion
        for step in made.steps(plan, self.micro_batch, whole, self._workers, self._found, self.drop_last):

            def read(indices: Sequence[int], examples: Mapping[int, Any] = step.examples) -> list[Any]:
                return [examples[index] for index in indices]

            for request in plan.requests(step.indices, epoch, step.number, self.micro_batch, whole=whole):
                answer = Answer(request, [self.collator.collate_part(request, part, read) for part in request.parts])
                answer = answer if plain else converted(answer)
                yield answer.pin_memory() if self._pins else answer

    def _found(self, wanted: Iterator[Wanted], workers: int) -> Iterator[Found]:
        """The answers to requests, made in this process or in workers that take them in turn."""
        fetcher = ShardFetcher(self._reader)
        if not self._workers:
            return map(fetcher.__getitem__, wanted)
        fixed: dict[str, Any] = {"batch_size": None, "collate_fn": unchanged, "generator": torch.Generator()}
        loader: Any = DataLoader(fetcher, sampler=_Requests(wanted), num_workers=workers, **fixed, **self.options)
        return iter(loader)

    def all_batch_sizes(self) -> Mapping[int, int]:
        return _equal_batches(len(self.dataset), self._batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        return {
            "global_batch": self.global_batch,
            "drop_last": self.drop_last,
            "shuffle_buffer": self._buffer,
            "shards": self._shards.count,
            "names_of_shards": self._shards.digest,
        }

    def progress(self, epoch: int) -> dict[str, Any]:
        known, lengths = self._lengths
        return {"lengths": [[shard, lengths[shard]] for shard in sorted(lengths)]} if known == epoch else {}

    def resume(self, epoch: int, state: Mapping[str, Any]) -> None:
        if "lengths" in state:
            self._lengths = epoch, {int(shard): int(length) for shard, length in state["lengths"]}


class _Requests:
    """A sampler for torch's DataLoader with no length."""

    def __init__(self, requests: Iterator[Wanted]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Wanted]:
        return self._requests


def _check_temporary_directory(name: str, workers: int) -> None:
    """Raises SettingError if TMPDIR is too long for workers. They send a tensor through a socket in it, and a socket's
    path has a limit. torch would print an error in a thread of the worker, and wait for the tensor for ever."""
    directory = tempfile.gettempdir()
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor" and len(directory) > LONGEST_DIRECTORY:
        raise SettingError(
            f"run.loader(name={name!r}, num_workers={workers}): workers send tensors through sockets in the directory "
            f"for temporary files, and a socket's path has at most {SOCKET_PATH} characters. TMPDIR has "
            f"{len(directory)} characters, {len(directory) - LONGEST_DIRECTORY} too many: {directory}. Set TMPDIR to a "
            "shorter one, such as /tmp."
        )


def _warn_of_repeated_reads(
    name: str, dataset: Any, shards: Shards | None, global_batch: int, data_shards: int
) -> None:
    """Warn on rank 0 if processes with different examples read the same ones, because the data set has too few streams.

    data_shards: of a global batch. Processes of the same data shard need the same examples.
    """
    processes = world_group().size
    streams = 1 if shards is None else stream_count(shards.count, global_batch)
    if world_group().rank or processes == 1 or streams >= data_shards:
        return
    what = f"run.loader(name={name!r}, dataset={type(dataset).__name__})"
    if shards is not None:
        text = (
            f"{shards.count} shard(s) make {streams} stream(s) for {processes} processes, so several processes read "
            f"the same examples. Cut the data into {data_shards} shards or more."
        )
    else:
        text = (
            f"the data set is one stream, so each of the {processes} processes reads all of it and keeps its part. "
            "Reading is no faster than in one process. To read it in parts, give the data set `shards` and "
            "`read(shard, position)`; an IterableDataset of Hugging Face needs num_shards of 2 or more."
        )
    warn(f"{what}: {text}")


def _warn_of_equal_shards(name: str, dataset: Any, shards: Shards | None) -> None:
    """Warn on rank 0 that `balance` does not reach this loader."""
    if world_group().rank:
        return
    what = f"run.loader(name={name!r}, dataset={type(dataset).__name__})"
    if shards is not None:
        why = "each process reads its own shards of the data set"
    else:
        why = "a worker splits the stream. Set num_workers=0"
    warn(f"{what}: balance=True has no effect on this loader, because {why}. All processes get equal parts.")


def _first_steps(fetched: Iterator[Fetched], start: int, limit: int) -> Iterator[Fetched]:
    """The yields of the steps from `start` to `limit` - 1. Does not read data for further steps."""
    if start >= limit:
        return
    for request, batches in fetched:
        yield request, batches
        if request.final and request.step == limit - 1:
            return


class _RequestSampler:
    """A sampler for torch's DataLoader that yields the requests of the current pass."""

    current: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.current


def _splits_a_sampler(batch_sampler: Any) -> bool:
    """Whether a batch sampler splits the indices of a sampler into batches as torch's BatchSampler does."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__len__ is BatchSampler.__len__


def _equal_batches(length: int, global_batch: int, drop_last: bool) -> Mapping[int, int]:
    """The sizes of an epoch's global batches, with a possibly short last one: size -> number of batches."""
    whole, rest = divmod(length, global_batch)
    return {global_batch: whole, **({rest: 1} if rest and not drop_last else {})}


ADDED_LATER = frozenset(["shuffle", "sampler", "subset"])
"""Keys of `identity` that older checkpoints do not have."""


def make_source(dataset: Any, given: LoaderArguments, *, seed: int, plan: Callable[[], BatchPlan]) -> Source:
    """The source of a loader. Raises SettingError for invalid or contradictory arguments."""
    shards = shards_of(dataset)
    stream = shards is not None or is_stream(dataset)
    _check(stream, given)
    if stream:
        plan().check_stream(type(dataset).__name__)
        assert given.global_batch is not None
        _warn_of_repeated_reads(given.name, dataset, shards, given.global_batch, plan().shards)
        if plan().shard_sizes is not None and (shards is not None or given.options.get("num_workers")):
            _warn_of_equal_shards(given.name, dataset, shards)
    if shards is not None:
        source: Source = ShardSource(dataset, shards, given, seed, plan)
    else:
        source = (StreamSource if stream else MapSource)(dataset, given, seed, plan)
    if isinstance(given.limit_batches, float):
        _check_fraction(source, given.limit_batches)
    return source


def make_sources(
    dataset: Any, given: LoaderArguments, schedule: Any, *, seed: int, plan: Callable[[], BatchPlan]
) -> dict[int, Source]:
    """The sources of a loader: first epoch -> source.

    schedule: the global batch, or {first epoch: global batch}. Raises SettingError.
    """
    if not isinstance(schedule, Mapping):
        return {0: make_source(dataset, replace(given, global_batch=schedule), seed=seed, plan=plan)}
    epochs = list(schedule)
    if 0 not in epochs or any(isinstance(e, bool) or not isinstance(e, int) or e < 0 for e in epochs):
        raise SettingError(
            f"run.loader(global_batch={dict(schedule)!r}): a schedule is {{first epoch: global batch}}. Its epochs "
            "are integers and start at 0, such as {0: 64, 4: 128}."
        )
    if not given.train or given.batch_sampler is not None:
        what = (
            "with a batch_sampler gets its batches from the sampler"
            if given.batch_sampler is not None
            else "for evaluation has no epochs"
        )
        raise SettingError(f"run.loader(global_batch={dict(schedule)!r}): a loader {what}, and takes no schedule.")
    return {
        epoch: make_source(dataset, replace(given, global_batch=schedule[epoch]), seed=seed, plan=plan)
        for epoch in sorted(epochs)
    }


def _check_fraction(source: Source, fraction: float) -> None:
    """Raises SettingError if the number of global batches is not known, or this fraction of it rounds down to 0."""
    try:
        whole = sum(source.all_batch_sizes().values())
    except TypeError as error:
        raise SettingError(
            f"run.loader(limit_batches={fraction}): a fraction needs the number of global batches, but the data set "
            "has no length. Pass a number: limit_batches=100."
        ) from error
    if whole and not source.limit():
        raise SettingError(
            f"run.loader(limit_batches={fraction}): this fraction of {whole} global batches is less than one. Pass a "
            "number: limit_batches=1."
        )


def check_limit(setting: str, limit: Any) -> None:
    """Check a value of limit_batches. setting: the beginning of the call, such as "run.loader(limit_batches". Raises
    SettingError."""
    fits = 0.0 < limit <= 1.0 if isinstance(limit, float) else limit is None or (isinstance(limit, int) and limit >= 1)
    if isinstance(limit, bool) or not fits:
        raise SettingError(
            f"{setting}={limit!r}): pass an integer number of global batches, at least 1, or a fraction, such as 0.1; "
            "None and 1.0 mean all."
        )


def _check(stream: bool, given: LoaderArguments) -> None:
    """Check the arguments of `run.loader`. stream: whether the data set is iterable. Raises SettingError."""
    options = given.options
    if callable(given.collate):
        raise SettingError("run.loader(collate=a function): use collate_fn=, as in torch's DataLoader.")
    if given.collate not in SCOPES:
        raise SettingError(f"run.loader(collate={given.collate!r}) is not known. {suggest(str(given.collate), SCOPES)}")
    for key in ("global_batch", "micro_batch", "shuffle_buffer"):
        value = getattr(given, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.loader({key}={value!r}): pass an integer number of examples, at least 1.")
    check_limit("run.loader(limit_batches", given.limit_batches)
    if "batch_size" in options:
        raise SettingError(
            f"run.loader(batch_size={options['batch_size']!r}): use global_batch, the number of examples per "
            "optimizer step over all devices (in other libraries, batch_size is per process)."
        )
    if "generator" in options:
        raise SettingError(
            "run.loader(generator=...): the order of a loader is keyed by the seed, the loader's name and the epoch, "
            "so that it is the same on every rank and after a restart. Use paceline.start(seed=...), or pass your own "
            "sampler."
        )
    unknown = set(options) - DATALOADER_OPTIONS
    if unknown:
        name = min(unknown)
        raise SettingError(
            f"run.loader has no argument {name!r}. {suggest(name, DATALOADER_OPTIONS | PACELINE_ARGUMENTS)}"
        )
    if given.batch_sampler is None and given.global_batch is None:
        raise SettingError("run.loader: pass global_batch, the number of examples per optimizer step over all devices.")
    custom_batches = given.batch_sampler is not None
    custom_order = custom_batches or given.sampler is not None
    for one, other, why in (
        (
            custom_batches,
            given.global_batch is not None,
            "batch_sampler makes the global batches: remove global_batch",
        ),
        (custom_batches, given.sampler is not None, "pass sampler or batch_sampler, not both"),
        (custom_order, given.shuffle, "the sampler decides the order: remove shuffle"),
        (stream, custom_order, "an iterable data set has no indices to sample"),
        (
            not stream,
            given.shuffle_buffer is not None,
            "shuffle_buffer is for iterable data sets; others are shuffled as a whole",
        ),
    ):
        if one and other:
            raise SettingError(f"run.loader: {why}.")
    for key, value in (("sampler", given.sampler), ("batch_sampler", getattr(given.batch_sampler, "sampler", None))):
        if isinstance(value, DistributedSampler):
            raise SettingError(
                f"run.loader({key}={type(value).__name__}): it picks a part for each rank, but Paceline splits each "
                "global batch itself, so most examples would be lost. Pass a sampler over the whole data set, or "
                "shuffle=True."
            )
