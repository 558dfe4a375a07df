"""Where a loader's global batches come from: the plan of an epoch, and torch's DataLoader that carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from paceline.errors import SettingError, suggest
from paceline.strategies.batch_plan import BatchPlan, Fetched, Pass, Request
from paceline.train import agreement
from paceline.train.collating import SCOPES, Collating, Streams
from paceline.train.fetch import MapFetcher, StreamFetcher, is_stream
from paceline.train.made_batches import Places
from paceline.train.order import permutation
from paceline.train.randomness import mix, tag
from paceline.train.sampler_rng import Keyed, generators_of

STREAM_BUFFER = 1000
"""Examples that wait in the buffered shuffle of an iterable data set, unless `shuffle_buffer` says otherwise."""

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

OWN_ARGUMENTS = frozenset(
    [
        "global_batch",
        "micro_batch",
        "shuffle",
        "train",
        "sampler",
        "batch_sampler",
        "drop_last",
        "name",
        "shuffle_buffer",
        "collate",
    ]
)


class Source:
    """The common part. plan: returns what this process computes of each
    global batch, the same object until that changes."""

    global_batch: int | None  # as it was asked for; None where a batch sampler makes the batches

    def __init__(
        self,
        dataset: Any,
        *,
        plan: Callable[[], BatchPlan],
        streams: Streams,
        micro_batch: int | None,
        scope: str,
        options: dict[str, Any],
    ) -> None:
        self.dataset, self.plan, self.streams = dataset, plan, streams
        self.micro_batch = micro_batch
        self.collating = Collating(options.pop("collate_fn", None) or default_collate, streams, scope)
        self.options = options
        self.whole_batch = 0  # examples of a global batch whose chunks are handed out
        self.probing = False  # whether the ranks have yet to compare their data

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        raise NotImplementedError

    def batch_sizes(self) -> Sequence[int]:
        """Examples in each global batch of an epoch. TypeError where they are not known beforehand."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """What must be the same for a position in mid-epoch to mean the same."""
        raise NotImplementedError

    def compare(self, name: str, request: Request | None) -> None:
        """Whether all ranks read the same data, at a step. Collective. Raises UsageError."""
        self.probing = False
        made_of = {"kind": type(self).__name__, **self.identity(), "micro_batch": self.micro_batch}
        agreement.compare(name, made_of, request.probe if request is not None else None)

    def steps(self) -> int:
        return len(self.batch_sizes())

    def why_empty(self, name: str) -> str:
        """An error message for a training loader that has yielded nothing."""
        count = len(self.dataset) if hasattr(self.dataset, "__len__") else None
        begin = f"loader {name!r} has no batch:"
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
        """Of an epoch on this process. TypeError where that is not known beforehand."""
        return self.plan().count(self.batch_sizes(), self.micro_batch)

    def data_loader(self, dataset: Any, plan: Any) -> DataLoader[Fetched]:
        # A generator of its own, since torch's loaders draw from the default one each time they are iterated.
        return DataLoader(dataset, batch_size=None, sampler=plan, generator=torch.Generator(), **self.options)


class MapSource(Source):
    """A map-style data set, in its own order, shuffled, or in the order of the user's own (batch) sampler."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        name: str,
        shuffle: bool,
        sampler: Any,
        batch_sampler: Any,
        global_batch: int | None,
        drop_last: bool,
        **common: Any,
    ) -> None:
        super().__init__(dataset, **common)
        self.seed, self.name, self.shuffle = seed, name, shuffle
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.global_batch, self.drop_last = global_batch, drop_last
        self._wanted = _Wanted()
        self._loader = self.data_loader(MapFetcher(dataset, self.collating), self._wanted)

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        plan = self.plan()
        data = Pass(
            loader=self.name,
            epoch=epoch,
            start=start,
            batches=lambda: self._batches(epoch),
            micro_batch=self.micro_batch,
            probing=self.probing,
            sampled=self.sampler is not None or self.batch_sampler is not None,
            whole=self.collating.scope == "global",
        )
        if not plan.in_step and self.global_batch is None:
            self.whole_batch = len(next(iter(self._batches(epoch)), ()))
        return plan.fetch(data, agreement.probe_of_indices, self._made)

    def _made(self, wanted: Iterator[Request]) -> Iterator[Fetched]:
        self._wanted.requests = wanted
        return iter(self._loader)

    def _batches(self, epoch: int) -> Iterator[Sequence[int]]:
        if self.batch_sampler is not None:
            yield from self._sampled(self.batch_sampler, epoch)
            return
        size = self.global_batch
        assert size is not None
        if self.sampler is not None:
            sampled = self._sampled(self.sampler, epoch)
            while batch := list(islice(sampled, size)):
                if len(batch) == size or not self.drop_last:
                    yield batch
            return
        length = len(self.dataset)
        order: Any = permutation(length, self.seed, self.name, epoch) if self.shuffle else range(length)
        for first in range(0, length - size + 1 if self.drop_last else length, size):
            yield order[first : first + size]

    def _sampled(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """The user's sampler, alike on every rank: it draws from generators keyed by the epoch, and the rest of the
        program finds its own untouched."""
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        stream = Keyed(mix(self.seed, tag("sampler"), tag(self.name), epoch), generators_of(sampler))
        with stream:
            if hasattr(sampler, "__len__"):
                yielded: Iterator[Any] = iter(list(sampler))  # at once: putting generators back costs 40 us
            else:
                yielded = stream.around(iter(sampler))
        yield from yielded

    def batch_sizes(self) -> Sequence[int]:
        if self.batch_sampler is not None:
            size = getattr(self.batch_sampler, "batch_size", None)
            if self.micro_batch is not None and size is None:
                raise TypeError("the sizes of this batch_sampler's batches are not known before it is iterated")
            return [size or 1] * len(self.batch_sampler)
        assert self.global_batch is not None
        if isinstance(self.dataset, Places) and self.dataset.steps is None:
            raise TypeError("run.batches without steps= has no end")
        return _even(len(self.sampler if self.sampler is not None else self.dataset), self.global_batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        sampler = self.sampler if self.sampler is not None else self.batch_sampler
        return {
            "length": len(self.dataset),
            "global_batch": self.global_batch,
            "drop_last": self.drop_last,
            "shuffle": self.shuffle,
            "sampler": None if sampler is None else type(sampler).__name__,
            "subset": _subset(self.dataset),
        }


class StreamSource(Source):
    """An iterable data set."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        global_batch: int,
        drop_last: bool,
        buffer: int,
        **common: Any,
    ) -> None:
        super().__init__(dataset, **common)
        self.global_batch, self.drop_last, self.buffer = global_batch, drop_last, buffer
        # One reader: data sets split themselves by worker, and a second one would read every example again.
        self.options["num_workers"] = min(1, self.options.get("num_workers", 0))
        self.options.pop("persistent_workers", None)  # each epoch starts its reader with that epoch's number
        self._fetcher = StreamFetcher(
            dataset,
            self.collating,
            seed=seed,
            global_batch=global_batch,
            micro_batch=self.micro_batch,
            buffer=buffer,
            drop_last=drop_last,
        )

    def fetch(self, epoch: int, start: int) -> Iterator[Fetched]:
        self._fetcher.epoch, self._fetcher.start, self._fetcher.probing = epoch, start, self.probing
        self._fetcher.plan = self.plan()
        return iter(self.data_loader(self._fetcher, None))

    def batch_sizes(self) -> Sequence[int]:
        assert self.global_batch is not None
        return _even(len(self.dataset), self.global_batch, self.drop_last)

    def identity(self) -> dict[str, Any]:
        return {"global_batch": self.global_batch, "drop_last": self.drop_last, "shuffle_buffer": self.buffer}


class _Wanted:
    """What torch's DataLoader takes for a sampler: the requests of the epoch at hand."""

    requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


def _even(length: int, global_batch: int, drop_last: bool) -> Sequence[int]:
    whole, rest = divmod(length, global_batch)
    return [global_batch] * whole + ([rest] if rest and not drop_last else [])


ADDED_LATER = frozenset(["shuffle", "sampler", "subset"])
"""Keys of an identity that older checkpoints do not have."""


def _subset(dataset: Any) -> int | None:
    """A digest of which examples a torch Subset holds, as random_split makes them."""
    if not isinstance(dataset, Subset):
        return None
    return agreement.probe_of_indices(dataset.indices).order


def make_source(
    dataset: Any,
    *,
    plan: Callable[[], BatchPlan],
    seed: int,
    name: str,
    global_batch: int | None,
    micro_batch: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: Any,
    drop_last: bool,
    shuffle_buffer: int | None,
    collate: str = "example",
    options: dict[str, Any],
) -> Source:
    """Checks the arguments of `run.loader` against each other. Raises SettingError."""
    check_scope(collate)
    stream = is_stream(dataset)
    _check(stream, global_batch, micro_batch, shuffle, sampler, batch_sampler, shuffle_buffer, options)
    common: dict[str, Any] = {
        "plan": plan,
        "streams": Streams(seed, name),
        "micro_batch": micro_batch,
        "scope": collate,
        "options": options,
    }
    if stream:
        assert global_batch is not None
        if not plan().in_step:
            raise SettingError(
                f"run.loader(dataset={type(dataset).__name__}): the chosen strategy hands out parts of the data as "
                "processes come free, and a stream cannot be read from any place. Use parameter_server:mode=sync, "
                "another strategy, or a data set with __getitem__ and __len__."
            )
        buffer = (shuffle_buffer or STREAM_BUFFER) if shuffle else 1
        return StreamSource(dataset, seed=seed, global_batch=global_batch, drop_last=drop_last, buffer=buffer, **common)
    return MapSource(
        dataset,
        seed=seed,
        name=name,
        shuffle=shuffle,
        sampler=sampler,
        batch_sampler=batch_sampler,
        global_batch=global_batch,
        drop_last=drop_last,
        **common,
    )


def check_scope(collate: Any) -> None:
    if callable(collate):
        raise SettingError("run.loader(collate=a function): say collate_fn=, as of torch's DataLoader.")
    if collate not in SCOPES:
        raise SettingError(f"run.loader(collate={collate!r}) is not known. {suggest(str(collate), SCOPES)}")


def _check(
    stream: bool,
    global_batch: int | None,
    micro_batch: int | None,
    shuffle: bool,
    sampler: Any,
    batch_sampler: Any,
    shuffle_buffer: int | None,
    options: dict[str, Any],
) -> None:
    for key, value in (
        ("global_batch", global_batch),
        ("micro_batch", micro_batch),
        ("shuffle_buffer", shuffle_buffer),
    ):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.loader({key}={value!r}): a whole number of examples, at least 1, is needed.")
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
    if batch_sampler is None and global_batch is None:
        raise SettingError("run.loader: say global_batch, the examples of one optimizer step over all devices.")
    own_batches = batch_sampler is not None
    own_order = own_batches or sampler is not None
    for given, other, why in (
        (own_batches, global_batch is not None, "batch_sampler makes the global batches: leave out global_batch"),
        (own_batches, sampler is not None, "give sampler or batch_sampler, not both"),
        (own_order, shuffle, "the sampler decides the order: leave out shuffle"),
        (stream, own_order, "an iterable data set has no indices to sample"),
        (not stream, shuffle_buffer is not None, "shuffle_buffer is for iterable data sets; others are shuffled whole"),
    ):
        if given and other:
            raise SettingError(f"run.loader: {why}.")
    for key, value in (("sampler", sampler), ("batch_sampler", getattr(batch_sampler, "sampler", None))):
        if isinstance(value, DistributedSampler):
            raise SettingError(
                f"run.loader({key}={type(value).__name__}): it picks a part for each rank, and Paceline cuts the "
                "global batch itself, so that most examples would be lost. Give a sampler over the whole data set, or "
                "shuffle=True."
            )
