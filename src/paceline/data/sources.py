"""Where a loader's global batches come from: a data set and its order, carried out by torch's DataLoader.

1. `make_source` checks the arguments of `run.loader` against each other.
2. For each pass the source says which examples each global batch of the epoch has.
3. The strategy's plan turns global batches into requests, one for each yield of this process (batch_plan.py).
4. torch's DataLoader answers each request with collated batches (fetch.py), here or in its workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from paceline.data import order
from paceline.data.agreement import check_same_data, probe_of_indices
from paceline.data.batch_plan import BatchPlan, Fetched, GlobalBatches, Pass, Request
from paceline.data.collating import SCOPES, Collator, Streams
from paceline.data.fetch import MapFetcher, StreamFetcher, converted, is_stream
from paceline.data.made_batches import RowDataset
from paceline.data.randomness import mix, tag
from paceline.data.sampler_rng import SamplerRNG, generators_of
from paceline.errors import SettingError, suggest

STREAM_BUFFER = 1000
"""Examples in the shuffle buffer of an iterable data set, unless `shuffle_buffer` says otherwise."""

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
"""Arguments of torch's DataLoader that `run.loader` passes on."""


@dataclass(frozen=True)
class LoaderArguments:
    """The arguments of `run.loader`, which documents them."""

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
    options: dict[str, Any] = field(default_factory=dict)  # of torch's DataLoader


OWN_ARGUMENTS = frozenset(own.name for own in fields(LoaderArguments)) - {"options"}
"""Arguments of `run.loader` that torch's DataLoader does not have, or that mean something else there."""


class Source:
    """What sources of map-style and of iterable data sets have in common.

    plan: returns the strategy's plan, the same object until the plan changes.
    """

    def __init__(self, dataset: Any, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]) -> None:
        self.dataset, self.name, self.train, self.seed, self.plan = dataset, given.name, given.train, seed, plan
        self.global_batch = given.global_batch  # None where a batch sampler makes the batches
        self.micro_batch, self.drop_last = given.micro_batch, given.drop_last
        self.limit_batches = given.limit_batches
        self.options = {key: value for key, value in given.options.items() if key != "collate_fn"}
        self.streams = Streams(seed, given.name)
        self.collator = Collator(given.options.get("collate_fn") or default_collate, self.streams, given.collate)
        self.sampled_batch = 0  # size of the batch sampler's first batch, where a work queue hands out its chunks
        self.probing = False  # whether the ranks have yet to compare their data
        # An epoch that a checkpoint of an earlier release has begun, in that release's order (order.VERSION).
        self.first_order_epoch: int | None = None

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        """This process's yields of an epoch, from step `start` on."""
        raise NotImplementedError

    def all_batch_sizes(self) -> Mapping[int, int]:
        """The global batches of the data: examples -> how many have so many, in the order in which they come. TypeError
        where that is not known beforehand."""
        raise NotImplementedError

    def batch_sizes(self) -> Mapping[int, int]:
        """Those of an epoch, in the same form."""
        limit, found = self.limit(), dict[int, int]()
        for size, number in self.all_batch_sizes().items():
            found[size] = number if limit is None else min(number, limit - sum(found.values()))
        return found

    def limit(self) -> int | None:
        """How many global batches of the data an epoch has at most; None: all. TypeError for a fraction of a number
        that is not known beforehand."""
        limit = self.limit_batches
        return int(limit * sum(self.all_batch_sizes().values())) if isinstance(limit, float) else limit

    def identity(self) -> dict[str, Any]:
        """What must not change for a position in mid-epoch to keep its meaning."""
        raise NotImplementedError

    def order_version(self, epoch: int) -> int:
        """Of the order of this epoch's examples."""
        return 1 if epoch == self.first_order_epoch else order.VERSION

    def check_same_data(self, request: Request) -> None:
        """Do all ranks read the same data? Collective, at an optimizer step. Raises UsageError."""
        self.probing = False
        made_of = {"kind": type(self).__name__, **self.identity(), "micro_batch": self.micro_batch}
        check_same_data(self.name, made_of, request.probe)

    def steps(self) -> int:
        """Optimizer steps in an epoch. TypeError where they are not known beforehand."""
        return sum(self.batch_sizes().values())

    def why_empty(self) -> str:
        """The error message for a training loader that has yielded nothing."""
        count = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        begin = f"loader {self.name!r} has no batch:"
        if not count or self.global_batch is None:
            what = "its data set is empty" if count == 0 else "its data set, or its sampler, gives no example"
            return f"{begin} {what}. Give it examples to train on, alike on every rank."
        if count >= self.global_batch:
            return f"{begin} its sampler gives no global batch of {self.global_batch} examples."
        return (
            f"{begin} its data set has {count} examples, its global batch {self.global_batch}, and drop_last=True "
            f"leaves out what does not fill one. Set global_batch to {count} or less, or drop_last=False."
        )

    def yields(self) -> int:
        """Yields of an epoch on this process. TypeError where they are not known beforehand."""
        return self.plan().count(self.batch_sizes(), self.micro_batch)

    def data_loader(self, dataset: Any, requests: Any) -> DataLoader[Fetched]:
        """torch's DataLoader over a fetcher. requests: what it takes for a sampler."""
        # A generator of its own, since torch's loaders draw from the default one each time they are iterated.
        own: dict[str, Any] = {"batch_size": None, "collate_fn": converted, "generator": torch.Generator()}
        return DataLoader(dataset, sampler=requests, **own, **self.options)


class MapSource(Source):
    """A map-style data set, in its own order, shuffled, or in the order of the user's (batch) sampler."""

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
        # A tool that wraps the iterators of torch's loaders sees this loader too.
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
            return self._cut(self._sampled(self.sampler, epoch), size)
        length = len(self.dataset)
        places: Any = range(length)
        if self.shuffle:
            places = order.order_of(length, self.seed, self.name, epoch, self.order_version(epoch))
        return GlobalBatches(places, size, length // size if self.drop_last else -(-length // size))

    def _cut(self, sampled: Iterator[Any], size: int) -> Iterator[Sequence[int]]:
        while batch := list(islice(sampled, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def _limited(self, batches: Iterable[Sequence[int]]) -> Iterable[Sequence[int]]:
        limit = self.limit()
        if isinstance(batches, GlobalBatches):
            return batches.first(limit)
        return islice(batches, limit)

    def _sampled(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """What the user's sampler gives, alike on every rank: while it runs, generators are keyed by the epoch."""
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
            if _cuts_a_sampler(self.batch_sampler):
                cut = self.batch_sampler
                return _equal_batches(len(cut.sampler), cut.batch_size, cut.drop_last)
            size = getattr(self.batch_sampler, "batch_size", None)
            if self.micro_batch is not None and size is None:
                raise TypeError("the sizes of this batch_sampler's batches are not known before it is iterated")
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
            # Which examples a torch Subset has, as random_split makes it.
            "subset": probe_of_indices(self.dataset.indices).order if isinstance(self.dataset, Subset) else None,
        }


class StreamSource(Source):
    """An iterable data set, of which every process reads the whole stream."""

    def __init__(self, dataset: Any, given: LoaderArguments, seed: int, plan: Callable[[], BatchPlan]) -> None:
        super().__init__(dataset, given, seed, plan)
        assert given.global_batch is not None
        # One reader: data sets split themselves by worker, and a second one would read every example again.
        self.options["num_workers"] = min(1, self.options.get("num_workers", 0))
        self.options.pop("persistent_workers", None)  # each epoch starts its reader with that epoch's number
        self._fetcher = StreamFetcher(
            dataset,
            self.collator,
            seed=seed,
            global_batch=given.global_batch,
            micro_batch=given.micro_batch,
            buffer=(given.shuffle_buffer or STREAM_BUFFER) if given.shuffle else 1,
            drop_last=given.drop_last,
        )

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        self._fetcher.epoch, self._fetcher.start, self._fetcher.probing = epoch, start, self.probing
        self._fetcher.plan = self.plan()
        fetched = iter(self.data_loader(self._fetcher, None))
        limit = self.limit()
        return fetched if limit is None else _first_steps(fetched, start, limit)

    def all_batch_sizes(self) -> Mapping[int, int]:
        assert self.global_batch is not None
        return _equal_batches(len(self.dataset), self.global_batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        buffer = self._fetcher.buffer
        return {"global_batch": self.global_batch, "drop_last": self.drop_last, "shuffle_buffer": buffer}


def _first_steps(fetched: Iterator[Fetched], start: int, limit: int) -> Iterator[Fetched]:
    """The yields of the steps from `start` to `limit`, without reading the data of a further one."""
    if start >= limit:
        return
    for request, batches in fetched:
        yield request, batches
        if request.final and request.step == limit - 1:
            return


class _RequestSampler:
    """What torch's DataLoader takes for a sampler: the requests of the current pass."""

    current: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.current


def _cuts_a_sampler(batch_sampler: Any) -> bool:
    """Whether it cuts the indices of a sampler into batches as torch's BatchSampler does."""
    return isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__len__ is BatchSampler.__len__


def _equal_batches(length: int, global_batch: int, drop_last: bool) -> Mapping[int, int]:
    """The sizes of an epoch's global batches, of which the last one may be short: size -> how many."""
    whole, rest = divmod(length, global_batch)
    return {global_batch: whole, **({rest: 1} if rest and not drop_last else {})}


ADDED_LATER = frozenset(["shuffle", "sampler", "subset"])
"""Keys of `identity` that older checkpoints do not have."""


def make_source(dataset: Any, given: LoaderArguments, *, seed: int, plan: Callable[[], BatchPlan]) -> Source:
    """The source of a loader. Raises SettingError for arguments that cannot be, or contradict each other."""
    stream = is_stream(dataset)
    _check(stream, given)
    if stream and not plan().in_step:
        raise SettingError(
            f"run.loader(dataset={type(dataset).__name__}): the chosen strategy hands out parts of the data as "
            "processes come free, and a stream cannot be read from any place. Use parameter_server:mode=sync, "
            "another strategy, or a data set with __getitem__ and __len__."
        )
    source: Source = (StreamSource if stream else MapSource)(dataset, given, seed, plan)
    if isinstance(given.limit_batches, float):
        _check_fraction(source, given.limit_batches)
    return source


def make_sources(
    dataset: Any, given: LoaderArguments, schedule: Any, *, seed: int, plan: Callable[[], BatchPlan]
) -> dict[int, Source]:
    """The sources of a loader, by the epoch from which on each is read.

    schedule: the global batch, or {epoch: global batch from it on}. Raises SettingError.
    """
    if not isinstance(schedule, Mapping):
        return {0: make_source(dataset, replace(given, global_batch=schedule), seed=seed, plan=plan)}
    epochs = list(schedule)
    if 0 not in epochs or any(isinstance(e, bool) or not isinstance(e, int) or e < 0 for e in epochs):
        raise SettingError(
            f"run.loader(global_batch={dict(schedule)!r}): a schedule is {{epoch: global batch from it on}}, with "
            "epochs that are whole numbers, and begins with epoch 0, such as {0: 64, 4: 128}."
        )
    if not given.train or given.batch_sampler is not None:
        what = (
            "whose batch_sampler makes the batches"
            if given.batch_sampler is not None
            else "for evaluation has no epochs"
        )
        raise SettingError(f"run.loader(global_batch={dict(schedule)!r}): a loader {what}, and takes no schedule.")
    return {
        epoch: make_source(dataset, replace(given, global_batch=schedule[epoch]), seed=seed, plan=plan)
        for epoch in sorted(epochs)
    }


def _check_fraction(source: Source, fraction: float) -> None:
    """Raises SettingError for a fraction of an unknown number of global batches, and for one that is none of them."""
    try:
        whole = sum(source.all_batch_sizes().values())
    except TypeError as error:
        raise SettingError(
            f"run.loader(limit_batches={fraction}): of how many global batches is not known, since the data have no "
            "length. Say how many: limit_batches=100."
        ) from error
    if whole and not source.limit():
        raise SettingError(
            f"run.loader(limit_batches={fraction}): this part of {whole} global batches is none. Say how many: "
            "limit_batches=1."
        )


def check_limit(setting: str, limit: Any) -> None:
    """setting: its name, as it is called: "run.loader(limit_batches". Raises SettingError."""
    fits = 0.0 < limit <= 1.0 if isinstance(limit, float) else limit is None or (isinstance(limit, int) and limit >= 1)
    if isinstance(limit, bool) or not fits:
        raise SettingError(
            f"{setting}={limit!r}): a whole number of global batches, at least 1, or a fraction of all of them, such "
            "as 0.1, is needed; None and 1.0 are all."
        )


def _check(stream: bool, given: LoaderArguments) -> None:
    """stream: whether the data set is iterable. Raises SettingError."""
    options = given.options
    if callable(given.collate):
        raise SettingError("run.loader(collate=a function): say collate_fn=, as of torch's DataLoader.")
    if given.collate not in SCOPES:
        raise SettingError(f"run.loader(collate={given.collate!r}) is not known. {suggest(str(given.collate), SCOPES)}")
    for key in ("global_batch", "micro_batch", "shuffle_buffer"):
        value = getattr(given, key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.loader({key}={value!r}): a whole number of examples, at least 1, is needed.")
    check_limit("run.loader(limit_batches", given.limit_batches)
    if "batch_size" in options:
        raise SettingError(
            f"run.loader(batch_size={options['batch_size']!r}): say global_batch, the examples of one optimizer step "
            "over all devices (batch_size is per process elsewhere)."
        )
    if "generator" in options:
        raise SettingError(
            "run.loader(generator=...): the order of a loader is keyed by the seed, the loader's name and the epoch, "
            "so that it is the same on every rank and after a restart. Say paceline.start(seed=...), or give a sampler "
            "of your own."
        )
    unknown = set(options) - DATALOADER_OPTIONS
    if unknown:
        name = min(unknown)
        raise SettingError(f"run.loader has no argument {name!r}. {suggest(name, DATALOADER_OPTIONS | OWN_ARGUMENTS)}")
    if given.batch_sampler is None and given.global_batch is None:
        raise SettingError("run.loader: say global_batch, the examples of one optimizer step over all devices.")
    own_batches = given.batch_sampler is not None
    own_order = own_batches or given.sampler is not None
    for one, other, why in (
        (own_batches, given.global_batch is not None, "batch_sampler makes the global batches: leave out global_batch"),
        (own_batches, given.sampler is not None, "give sampler or batch_sampler, not both"),
        (own_order, given.shuffle, "the sampler decides the order: leave out shuffle"),
        (stream, own_order, "an iterable data set has no indices to sample"),
        (
            not stream,
            given.shuffle_buffer is not None,
            "shuffle_buffer is for iterable data sets; others are shuffled whole",
        ),
    ):
        if one and other:
            raise SettingError(f"run.loader: {why}.")
    for key, value in (("sampler", given.sampler), ("batch_sampler", getattr(given.batch_sampler, "sampler", None))):
        if isinstance(value, DistributedSampler):
            raise SettingError(
                f"run.loader({key}={type(value).__name__}): it picks a part for each rank, and Paceline cuts the "
                "global batch itself, so that most examples would be lost. Give a sampler over the whole data set, or "
                "shuffle=True."
            )
