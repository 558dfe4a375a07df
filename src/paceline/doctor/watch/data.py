"""DataLoaders: which examples each batch holds, as indices and as digests of their rows, and how long it was awaited.

Indices are seen where the main process draws them from the sampler, before anything is fetched; batches come in that
order, so that those of a batch are the oldest not yet taken. Through `Subset`s they are followed to the data set that
has them. An iterable data set has none: there the rows' digests tell.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator
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

from paceline.doctor.watch.notebook import Notebook, put
from paceline.torch_private.observed import (
    LOADER_WORKERS,
    NEXT_INDEX,
    WORKER_MAIN,
    LoaderIterator,
    dataset_of,
    has_number_of_samples,
    persistent_iterator,
)

DIGESTED = 64  # batches of each pass whose rows are digested
_MOST_ROWS, _ELEMENTS, _MOST_LEAVES = 256, 64, 4
_LEAST_NUMBERS = 4
_HELD, _LEAST_HELD, _MOST_HELD, _DEEP = 512, 16, 32, 5
_QUEUE, _PASS, _MADE = "_paceline_doctor_indices", "_paceline_doctor_pass", "_paceline_doctor_made"


def watch(book: Notebook) -> None:
    loaders = _Loaders(book)
    put(DataLoader, "__init__", loaders.init)
    put(DataLoader, "__iter__", loaders.iter)
    put(LoaderIterator, NEXT_INDEX, loaders.next_index)
    put(LoaderIterator, "__next__", loaders.next)
    put(LOADER_WORKERS, WORKER_MAIN, loaders.work)
    for cls in (DistributedSampler, Subset):
        put(cls, "__init__", loaders.made)


class _Loaders:
    def __init__(self, book: Notebook) -> None:
        self._book = book
        self._made: Counter[str] = Counter()
        self._passes = 0

    def init(self, original: Any) -> Any:
        def __init__(loader: Any, /, *args: Any, **options: Any) -> None:
            original(loader, *args, **options)
            with self._book.aside():
                self._book.note("loader", loader=self._name(loader), **_describe(loader))

        return __init__

    def made(self, original: Any) -> Any:
        """Of a sampler or a part of a data set: the line that makes it."""

        def __init__(thing: Any, /, *args: Any, **options: Any) -> None:
            original(thing, *args, **options)
            if self._book.watching:
                thing.__dict__[_MADE] = self._book.at(lambda frame: frame.f_code.co_name == "__init__")

        return __init__

    def _name(self, loader: Any) -> str:
        """By the line that makes it: a loader that one rank alone has must not shift the others' numbers."""
        at = self._book.at()
        line = f"line {at[1]} of {at[0]}" if at else "a library"
        self._made[line] += 1
        name: str = loader.__dict__.setdefault("_paceline_doctor", f"{line}, {self._made[line]}")
        return name

    def iter(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if not self._book.watching:
                return original(loader)
            if (iterator := persistent_iterator(loader)) is not None:
                iterator.__dict__[_QUEUE] = deque()
            name = loader.__dict__.get("_paceline_doctor", "")
            self._passes += 1
            sampler = _innermost(loader)
            self._book.note("pass", loader=name, n=self._passes, epoch=getattr(sampler, "epoch", None))
            began = self._book.clock()
            iterator = original(loader)
            iterator.__dict__[_PASS] = [name, self._passes, 0, self._book.clock() - began]
            return iterator

        return __iter__

    def work(self, original: Any) -> Any:
        """In a worker that is forked: what its random generators begin and end with. A file of its own takes it, since
        this process is no longer the one that is watched."""
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
            with self._book.aside():
                ended = _generators()
                moved = {name: state for name, state in begun.items() if ended.get(name) != state}
                event = {"k": "worker", "n": self._passes, "worker": given.arguments.get("worker_id"), "begun": moved}
                path = os.path.join(self._book.directory, f"workers-{self._book.rank}.jsonl")
                with open(path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(event) + "\n")
            return result

        return _worker_loop

    def next_index(self, original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            iterator.__dict__.setdefault(_QUEUE, deque()).append(index)
            return index

        return _next_index

    def next(self, original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            book = self._book
            place = iterator.__dict__.get(_PASS)
            if place is None or not book.watching:
                return original(iterator)
            began = book.clock()
            try:
                batch = original(iterator)
            except StopIteration:
                book.note("pass_end", loader=place[0], n=place[1], yields=place[2])
                raise
            waited = book.clock() - began
            with book.aside():
                queue = iterator.__dict__.get(_QUEUE)
                index = queue.popleft() if queue else None
                indices = _resolve(dataset_of(iterator), index)
                rows = _rows(batch, _given(index), indices) if place[2] < DIGESTED else None
                place[2] += 1
                self._book.note(
                    "yield",
                    loader=place[0],
                    n=place[1],
                    idx=indices,
                    rows=rows,
                    waited=waited,
                    grad=torch.is_grad_enabled(),
                )
            return batch

        return __next__


def _generators() -> dict[str, int]:
    """Digests of the states of this process's own random generators."""
    numpys: Any = np.random.get_state()
    return {
        "NumPy's": zlib.crc32(numpys[1].tobytes() + str(numpys[2:]).encode()),
        "Python's": zlib.crc32(repr(random.getstate()).encode()),
        "torch's": zlib.crc32(torch.get_rng_state().numpy().tobytes()),
    }


def _describe(loader: Any) -> dict[str, Any]:
    sampler = _innermost(loader)
    iterable = isinstance(loader.dataset, IterableDataset)
    kind = "other"
    for name, cls in (
        ("distributed", DistributedSampler),
        ("random", RandomSampler),
        ("sequential", SequentialSampler),
    ):
        if isinstance(sampler, cls):
            kind = name
    explicit = has_number_of_samples(sampler) or getattr(sampler, "replacement", False)
    return {
        "size": None if iterable else _size(loader.dataset),
        "iterable": iterable,
        "batch": loader.batch_size
        if loader.batch_size is not None
        else getattr(loader.batch_sampler, "batch_size", None),
        "workers": loader.num_workers,
        "pinned": bool(loader.pin_memory),
        "drop_last": bool(loader.drop_last),
        "sampler": kind,
        "sampler_name": type(sampler).__name__,
        "set_epoch": any(hasattr(part, "set_epoch") for part in (sampler, loader.batch_sampler, loader.sampler)),
        "drawn": bool(explicit),
        "replicas": getattr(sampler, "num_replicas", None),
        "shuffles": getattr(sampler, "shuffle", None) is not False,
        "repeats": _number(sampler, "num_repeats") > 1 or _number(sampler, "repetitions") > 1,
        "sampler_at": getattr(sampler, "__dict__", {}).get(_MADE),
        **_part(loader.dataset),
        "holds": None if iterable else holds(loader.dataset),
    }


def _part(dataset: Any) -> dict[str, Any]:
    """Of a part of a data set: where it was cut, and a digest of what it has; of a data set, the name of its class."""
    cut = [int(i) for i in dataset.indices] if isinstance(dataset, Subset) else None
    digest = None if cut is None else zlib.crc32(str(cut).encode())
    return {"cut_at": getattr(dataset, "__dict__", {}).get(_MADE), "cut": digest, "set_name": type(dataset).__name__}


def _number(thing: Any, name: str) -> int:
    value = getattr(thing, name, 1)
    return value if type(value) is int else 1


def holds(dataset: Any) -> dict[str, int]:
    """Digests of what a data set holds, by the way to it: tensors, arrays, and lists of plain things. Empty where it
    makes or reads its examples one by one."""
    found: dict[str, int] = {}
    todo: list[tuple[str, Any, int]] = [("", dataset, 0)]
    while todo and len(found) < _MOST_HELD:
        way, thing, depth = todo.pop(0)
        if isinstance(thing, Subset):
            todo.append((way, thing.dataset, depth))
        elif isinstance(thing, (torch.Tensor, np.ndarray)):
            tensor = thing if isinstance(thing, torch.Tensor) else _as_tensor(thing)
            if tensor is not None and tensor.numel() >= _LEAST_HELD and tensor.device.type != "meta":
                found[way] = _digest(tensor)
        elif isinstance(thing, (list, tuple)) and len(thing) >= _LEAST_HELD:
            some = [thing[i] for i in range(0, len(thing), max(1, len(thing) // _ELEMENTS))]
            found[way] = zlib.crc32(repr([_plain(one) for one in some]).encode())
        elif depth < _DEEP:
            parts: Iterable[Any] = enumerate(thing) if isinstance(thing, (list, tuple)) else ()
            if isinstance(thing, Dataset):
                parts = vars(thing).items()
            elif isinstance(thing, dict) and len(thing) <= _MOST_HELD:
                parts = thing.items()
            todo += [(f"{way}.{name}", part, depth + 1) for name, part in parts]
    return found


def _as_tensor(array: Any) -> torch.Tensor | None:
    try:
        return torch.from_numpy(array)
    except TypeError:  # of strings, or objects
        return None


def _plain(thing: Any) -> Any:
    if isinstance(thing, torch.Tensor):
        return _digest(thing) if thing.numel() and thing.device.type != "meta" else None
    if isinstance(thing, (list, tuple)):
        return [_plain(one) for one in thing[:4]]
    return thing if isinstance(thing, (str, int, float, bytes)) else None


def _digest(leaf: torch.Tensor) -> int:
    return rows_of(leaf.detach().reshape(1, -1), _HELD)[0]


def _innermost(loader: Any) -> Any:
    """The sampler under batch samplers and other wrappers that have one."""
    sampler = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    for _ in range(4):
        inner = getattr(sampler, "sampler", None)
        if inner is None or not (isinstance(sampler, BatchSampler) or hasattr(inner, "__iter__")):
            break
        sampler = inner
    return sampler


def _size(dataset: Any) -> int | None:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    try:
        return len(dataset)
    except Exception:  # the user's own __len__
        return None


def _given(index: Any) -> list[Any]:
    """The indices of a batch, as the sampler gave them."""
    if index is None:
        return []
    index = getattr(index, "indices", index)  # of what a sampler hands out in its own way, as Paceline's does
    return list(index) if isinstance(index, (list, tuple)) else [index]


def _resolve(dataset: Any, index: Any) -> list[int] | None:
    """The indices of a batch in the data set that has them, or None where it has none or they are no numbers."""
    if index is None:
        return None
    indices = _given(index)
    try:
        while isinstance(dataset, Subset):
            indices = [dataset.indices[i] for i in indices]
            dataset = dataset.dataset
        return [int(i) for i in indices]
    except (TypeError, ValueError, IndexError):
        return None


def _leaves(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 4:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
        for part in parts:
            yield from _leaves(part, depth + 1)


def _rows(batch: Any, given: list[Any], indices: list[int] | None) -> list[list[int]] | None:
    """For each tensor that has a row for each example: the rows' digests. Not of one that holds the indices: it says
    nothing of the example."""
    size = None if indices is None else len(indices)
    found = []
    for leaf in _leaves(batch):
        if leaf.device.type == "meta" or leaf.layout is not torch.strided or leaf.dim() == 0:
            continue
        size = leaf.shape[0] if size is None else size
        numbers = len(given) >= _LEAST_NUMBERS and leaf.dim() == 1 and not leaf.is_floating_point()
        if numbers and leaf.tolist() in (given, indices):  # in a batch of few a label may be the index by chance
            found.append([0] * len(given))
            continue
        if leaf.shape[0] == size and size:
            found.append(rows_of(leaf))
        if len(found) == _MOST_LEAVES:
            break
    return found or None


def rows_of(leaf: torch.Tensor, elements: int = _ELEMENTS) -> list[int]:
    """A number for each row of a tensor, from about so many of its values."""
    flat = leaf.detach()[:_MOST_ROWS].reshape(min(len(leaf), _MOST_ROWS), -1)
    stride = max(1, flat.shape[1] // elements)
    taken = flat[:, ::stride].cpu()
    if taken.dtype is torch.bfloat16:
        taken = taken.float()
    data = taken.contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in data]
