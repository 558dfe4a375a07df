"""DataLoaders: the indices and row digests of each batch, and the time that the script waited for it.

Indices are recorded when the main process draws them from the sampler, before anything is fetched. Batches arrive in
the same order, so the indices of a batch are the oldest indices that have no batch yet. Indices of a `Subset` are
mapped to the underlying data set. An iterable data set has no indices: the digests of its rows identify the examples.
"""

from __future__ import annotations

import inspect
import os
import random
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from paceline.doctor.recorders.shared_state import number_of, set_number
from paceline.launcher.import_hook import after_import
from paceline.observe.digests import SOME, digest, padded_rows, row_digests, tensors_in
from paceline.observe.event_log import EventLog
from paceline.observe.records import append_record
from paceline.torch_private.observed import (
    LOADER_WORKERS,
    NEXT_INDEX,
    WORKER_MAIN,
    LoaderIterator,
    dataset_of,
    has_number_of_samples,
    persistent_iterator,
)

_MAX_DIGESTED = 64  # digested batches per pass
_MAX_ITEMS = 400  # digested items of streams that a library shards
_MAX_TENSORS = 4  # digested tensors per batch
_MIN_INDICES = 4  # fewer indices may equal the labels of a batch by chance
# For the digests of a data set's contents: digested elements of a list; minimum length of a list or tensor; maximum
# number of digests; maximum depth of attributes.
_LIST_ELEMENTS, _MIN_ELEMENTS, _MAX_DIGESTS, _MAX_DEPTH = 64, 16, 32, 5
# Attributes that the recorder sets on a loader's iterator (the first two) and on samplers and subsets.
_INDICES, _PASS, _MADE_AT = "_paceline_doctor_indices", "_paceline_doctor_pass", "_paceline_doctor_made"


def install(log: EventLog) -> None:
    recorder, patches = _LoaderRecorder(log), log.patches
    patches.after(DataLoader, "__init__", recorder.after_init)
    patches.around(DataLoader, "__iter__", recorder.around_iter)
    patches.around(LoaderIterator, NEXT_INDEX, recorder.around_next_index)
    patches.around(LoaderIterator, "__next__", recorder.around_next)
    patches.wrap(LOADER_WORKERS, WORKER_MAIN, recorder.wrap_worker_loop)
    after_import("accelerate.data_loader", recorder.patch_accelerate)
    after_import("transformers.trainer_pt_utils", recorder.patch_sharded_stream)
    for cls in (DistributedSampler, Subset):
        patches.after(cls, "__init__", recorder.after_construction)


class _LoaderRecorder:
    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._made: Counter[str] = Counter()
        self._passes = 0
        self._streams: Any = weakref.WeakSet()  # data sets inside a library's shards
        self._stream_classes: set[type] = set()  # their patched classes

    def after_init(self, loader: Any, /, *_: Any, **__: Any) -> None:
        self._log.record("loader", loader=self._name(loader), **_describe(loader))

    def after_construction(self, thing: Any, /, *_: Any, **__: Any) -> None:
        """Remember the line that makes a sampler or a Subset."""
        thing.__dict__[_MADE_AT] = self._log.stack.caller(lambda frame: frame.f_code.co_name == "__init__")

    def _name(self, loader: Any) -> str:
        """A name that is the same on all ranks: the line that makes the loader, and a number among the loaders from
        that line. (A number among all loaders would shift if one rank has an additional loader.)"""
        at = self._log.stack.caller()
        line = f"line {at[1]} of {at[0]}" if at else "a library"
        self._made[line] += 1
        return str(set_number(loader, f"{line}, {self._made[line]}"))

    def around_iter(self, loader: Any) -> Generator[None, Any, None]:
        if (iterator := persistent_iterator(loader)) is not None:
            iterator.__dict__[_INDICES] = deque()
        self._passes += 1
        place, epoch = _Place(number_of(loader) or "", self._passes), getattr(_innermost_sampler(loader), "epoch", None)
        self._log.record("pass", loader=place.loader, n=place.n, epoch=epoch)
        iterator = yield
        place.length = _number_of_batches(loader)
        iterator.__dict__[_PASS] = place

    def wrap_worker_loop(self, original: Any) -> Any:
        """In a forked worker, record the state in which each random generator began, if the worker used the generator.
        The record goes to a separate file, because the event log is closed in a forked child."""
        signature = inspect.signature(original)

        def _worker_loop(*args: Any, **options: Any) -> Any:
            given = signature.bind(*args, **options)
            initialize = given.arguments.get("init_fn")
            begun: dict[str, int] = {}

            def init_fn(number: int) -> None:
                if initialize is not None:
                    initialize(number)
                begun.update(_generators())

            given.arguments["init_fn"] = init_fn
            result = original(*given.args, **given.kwargs)
            with self._log.overhead():
                ended = _generators()
                moved = {name: state for name, state in begun.items() if ended.get(name) != state}
                event = {"k": "worker", "n": self._passes, "worker": given.arguments.get("worker_id"), "begun": moved}
                shared = self._log.shared
                append_record(os.path.join(shared.directory, f"workers-{shared.rank}.jsonl"), event)
            return result

        return _worker_loop

    def around_next_index(self, iterator: Any) -> Generator[None, Any, None]:
        with suppress(StopIteration):
            index = yield
            iterator.__dict__.setdefault(_INDICES, deque()).append(index)

    def _variables(self) -> dict[str, float] | None:
        """Read the script's variables at the end of a loop over a loader."""
        self._log.shared.variables.pass_ended = True
        numbers: dict[str, float] | None = self._log.shared.variables.numbers()
        return numbers

    def wrap_prefetching_iter(self, original: Any) -> Any:
        """Wrap `__iter__` of a loader that reads a batch ahead, such as Accelerate's loaders. The pass ends before the
        script gets the last batch, so read the script's variables again when the loop asks for another batch."""

        def __iter__(loader: Any) -> Any:
            yield from original(loader)
            if self._log.active:
                with self._log.overhead():
                    self._log.record("loop_end", loader=number_of(loader) or "", vars=self._variables())

        return __iter__

    def patch_accelerate(self, module: Any) -> None:
        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            if hasattr(module, name):
                self._log.patches.wrap(getattr(module, name), "__iter__", self.wrap_prefetching_iter)
        self.patch_sharded_stream(module)

    def patch_sharded_stream(self, module: Any) -> None:
        """Watch streams that a library shards: each rank reads the whole stream, and drops the other ranks' items."""
        if hasattr(module, "IterableDatasetShard"):
            self._log.patches.before(module.IterableDatasetShard, "__iter__", self.before_sharded_iter)

    def before_sharded_iter(self, shard: Any, /) -> None:
        cls = type(shard.dataset)
        self._streams.add(shard.dataset)
        if cls not in self._stream_classes and hasattr(cls, "__iter__"):
            self._stream_classes.add(cls)
            self._log.patches.wrap(cls, "__iter__", self.wrap_stream)

    def wrap_stream(self, original: Any) -> Any:
        def __iter__(stream: Any) -> Any:
            items = iter(original(stream))
            return self._watched(items) if stream in self._streams and self._log.active else items

        return __iter__

    def _watched(self, items: Iterable[Any]) -> Any:
        for item in items:
            if self._log.active and self._log.few("items", _MAX_ITEMS):
                with self._log.overhead():
                    first = next((leaf for leaf in tensors_in(item) if leaf.dim()), None)
                    row = None if first is None else row_digests(first.detach()[None])[0]
                    self._log.record("item", row=row)
            yield item

    def around_next(self, iterator: Any) -> Generator[None, Any, None]:
        log, place = self._log, iterator.__dict__.get(_PASS)
        if place is None:
            return
        began = log.clock()
        try:
            batch = yield
        except StopIteration:
            log.record("pass_end", loader=place.loader, n=place.n, vars=self._variables())
            return
        waited = log.clock() - began
        log.shared.draws.clear()
        queue = iterator.__dict__.get(_INDICES)
        index = queue.popleft() if queue else None
        indices = _base_indices(dataset_of(iterator), index)
        rows, padded = None, None
        if place.batches < _MAX_DIGESTED:
            rows, padded = _row_digests(batch, _batch_indices(index), indices)
        place.batches += 1
        if place.batches == place.length:  # some scripts never ask for another batch after the last one
            log.shared.variables.pass_ended = True
        about = {"loader": place.loader, "n": place.n, "idx": indices, "rows": rows, "padded": padded}
        log.record("yield", **about, waited=waited, grad=torch.is_grad_enabled())


@dataclass
class _Place:
    """The position of an iterator over a loader."""

    loader: str  # the loader's name
    n: int  # the number of the pass
    batches: int = 0  # batches read so far
    length: int | None = None  # batches in the pass


def _generators() -> dict[str, int]:
    """Digests of the states of this process's random generators."""
    numpys: Any = np.random.get_state()
    return {
        "NumPy's": zlib.crc32(numpys[1].tobytes() + str(numpys[2:]).encode()),
        "Python's": zlib.crc32(repr(random.getstate()).encode()),
        "torch's": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    }


def _describe(loader: Any) -> dict[str, Any]:
    """The fields of a "loader" event."""
    sampler = _innermost_sampler(loader)
    iterable = isinstance(loader.dataset, IterableDataset)
    kinds = {"distributed": DistributedSampler, "random": RandomSampler, "sequential": SequentialSampler}
    kind = next((name for name, cls in kinds.items() if isinstance(sampler, cls)), "other")
    explicit = has_number_of_samples(sampler) or getattr(sampler, "replacement", False)
    return {
        "size": None if iterable else _base_size(loader.dataset),
        "iterable": iterable,
        "batch": loader.batch_size
        if loader.batch_size is not None
        else getattr(loader.batch_sampler, "batch_size", None),
        "length": _number_of_batches(loader),
        "workers": loader.num_workers,
        "pinned": bool(loader.pin_memory),
        "sampler": kind,
        "sampler_name": type(sampler).__name__,
        "set_epoch": any(hasattr(part, "set_epoch") for part in (sampler, loader.batch_sampler, loader.sampler)),
        "drawn": bool(explicit),
        "replicas": getattr(sampler, "num_replicas", None),
        "shuffles": getattr(sampler, "shuffle", None) is not False,
        "repeats": _number(sampler, "num_repeats") > 1 or _number(sampler, "repetitions") > 1,
        "sampler_at": getattr(sampler, "__dict__", {}).get(_MADE_AT),
        "initialize": _first_line(loader.worker_init_fn),
        **_describe_subset(loader.dataset),
        "holds": None if iterable else content_digests(loader.dataset),
    }


def _first_line(function: Any) -> list[Any]:
    """[file, line] of a Python function; [] for other callables."""
    code = getattr(getattr(function, "func", function), "__code__", None)  # a partial's function
    return [] if code is None else [code.co_filename, code.co_firstlineno]


def _describe_subset(dataset: Any) -> dict[str, Any]:
    """The line that makes a data set, and the digest of its indices if it is a Subset."""
    cut = [int(i) for i in dataset.indices] if isinstance(dataset, Subset) else None
    digest = None if cut is None else zlib.crc32(str(cut).encode())
    return {"cut_at": getattr(dataset, "__dict__", {}).get(_MADE_AT), "cut": digest}


def _number_of_batches(loader: Any) -> int | None:
    try:
        return None if isinstance(loader.dataset, IterableDataset) else len(loader)
    except Exception:  # the sampler has no length
        return None


def _number(thing: Any, name: str) -> int:
    value = getattr(thing, name, 1)
    return value if type(value) is int else 1


def content_digests(dataset: Any) -> dict[str, int | str]:
    """attribute path -> digest of each tensor, array or long list that a data set keeps in memory. Empty if the data
    set makes or reads its examples one by one."""
    found: dict[str, int | str] = {}
    pending: list[tuple[str, Any, int]] = [("", dataset, 0)]
    while pending and len(found) < _MAX_DIGESTS:
        way, thing, depth = pending.pop(0)
        if isinstance(thing, Subset):
            pending.append((way, thing.dataset, depth))
        elif isinstance(thing, (torch.Tensor, np.ndarray)):
            tensor = thing if isinstance(thing, torch.Tensor) else _as_tensor(thing)
            if tensor is not None and tensor.numel() >= _MIN_ELEMENTS and tensor.device.type != "meta":
                found[way] = digest(tensor, most=SOME)
        elif isinstance(thing, (list, tuple)) and len(thing) >= _MIN_ELEMENTS:
            some = [thing[i] for i in range(0, len(thing), max(1, len(thing) // _LIST_ELEMENTS))]
            found[way] = zlib.crc32(repr([_hashable(one) for one in some]).encode())
        elif depth < _MAX_DEPTH:
            parts: Iterable[Any] = enumerate(thing) if isinstance(thing, (list, tuple)) else ()
            if isinstance(thing, Dataset):
                parts = vars(thing).items()
            elif isinstance(thing, dict) and len(thing) <= _MAX_DIGESTS:
                parts = thing.items()
            pending += [(f"{way}.{name}", part, depth + 1) for name, part in parts]
    return found


def _as_tensor(array: Any) -> torch.Tensor | None:
    try:
        return torch.from_numpy(array)
    except TypeError:  # an array of strings or objects
        return None


def _hashable(thing: Any) -> Any:
    """The value in a form with the same repr on all ranks."""
    if isinstance(thing, torch.Tensor):
        return digest(thing, most=SOME) if thing.numel() and thing.device.type != "meta" else None
    if isinstance(thing, (list, tuple)):
        return [_hashable(one) for one in thing[:4]]
    return thing if isinstance(thing, (str, int, float, bytes)) else None


def _innermost_sampler(loader: Any) -> Any:
    """The sampler inside batch samplers and other wrappers."""
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(4):
        inner = getattr(sampler, "sampler", None)
        if inner is None or not (isinstance(sampler, BatchSampler) or hasattr(inner, "__iter__")):
            break
        sampler = inner
    return sampler


def _base_size(dataset: Any) -> int | None:
    """The length of the data set under all Subsets."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    try:
        return len(dataset)
    except Exception:  # the user's __len__
        return None


def _batch_indices(index: Any) -> list[Any]:
    """The indices of a batch as the sampler yielded them."""
    if index is None:
        return []
    index = getattr(index, "indices", index)  # samplers such as Paceline's yield an object with the indices
    return list(index) if isinstance(index, (list, tuple)) else [index]


def _base_indices(dataset: Any, index: Any) -> list[int] | None:
    """The indices of a batch in the data set under all Subsets; None if there are none, or they are not numbers."""
    if index is None:
        return None
    indices = _batch_indices(index)
    try:
        while isinstance(dataset, Subset):
            indices = [dataset.indices[i] for i in indices]
            dataset = dataset.dataset
        return [int(i) for i in indices]
    except (TypeError, ValueError, IndexError):
        return None


def _row_digests(
    batch: Any, given: list[Any], indices: list[int] | None
) -> tuple[list[list[int]] | None, list[Any] | None]:
    """The row digests and the `padded_rows` of each tensor of the batch that has one row per example. A tensor of
    indices gets zeros, because it contains nothing about the examples."""
    size = None if indices is None else len(indices)
    found: list[list[int]] = []
    padded: list[Any] = []
    for leaf in tensors_in(batch):
        if leaf.device.type == "meta" or leaf.layout is not torch.strided or leaf.dim() == 0:
            continue
        size = leaf.shape[0] if size is None else size
        numbers = len(given) >= _MIN_INDICES and leaf.dim() == 1 and not leaf.is_floating_point()
        if numbers and leaf.tolist() in (given, indices):  # only for several examples: one label may equal its index
            found.append([0] * len(given))
            padded.append(None)
            continue
        if leaf.shape[0] == size and size:
            found.append(row_digests(leaf))
            padded.append(padded_rows(leaf))
        if len(found) == _MAX_TENSORS:
            break
    return found or None, padded if any(padded) else None
