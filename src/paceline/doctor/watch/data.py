"""DataLoaders: which examples each batch holds, as indices and as digests of their rows, and how long it was awaited.

Indices are seen where the main process draws them from the sampler, before anything is fetched; batches come in that
order, so that those of a batch are the oldest not yet taken. Through `Subset`s they are followed to the data set that
has them. An iterable data set has none: there the rows' digests tell.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.doctor.watch.notebook import Notebook, put

DIGESTED = 64  # batches of each pass whose rows are digested
_MOST_ROWS, _ELEMENTS, _MOST_LEAVES = 256, 64, 4
_QUEUE, _PASS = "_paceline_doctor_indices", "_paceline_doctor_pass"


def watch(book: Notebook) -> None:
    loaders = _Loaders(book)
    put(DataLoader, "__init__", loaders.init)
    put(DataLoader, "__iter__", loaders.iter)
    put(_BaseDataLoaderIter, "_next_index", loaders.next_index)
    put(_BaseDataLoaderIter, "__next__", loaders.next)


class _Loaders:
    def __init__(self, book: Notebook) -> None:
        self._book = book
        self._made: Counter[str] = Counter()
        self._passes = 0

    def init(self, original: Any) -> Any:
        def __init__(loader: Any, *args: Any, **options: Any) -> None:
            original(loader, *args, **options)
            with self._book.aside():
                self._book.note("loader", loader=self._name(loader), **_describe(loader))

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
            if loader._iterator is not None:
                loader._iterator.__dict__[_QUEUE] = deque()
            name = loader.__dict__.get("_paceline_doctor", "")
            self._passes += 1
            sampler = _innermost(loader)
            self._book.note("pass", loader=name, n=self._passes, epoch=getattr(sampler, "epoch", None))
            began = self._book.clock()
            iterator = original(loader)
            iterator.__dict__[_PASS] = [name, self._passes, 0, self._book.clock() - began]
            return iterator

        return __iter__

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
                indices = _resolve(iterator._dataset, index)
                rows = _rows(batch, None if indices is None else len(indices)) if place[2] < DIGESTED else None
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
    explicit = getattr(sampler, "_num_samples", None) is not None or getattr(sampler, "replacement", False)
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
    }


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


def _resolve(dataset: Any, index: Any) -> list[int] | None:
    """The indices of a batch in the data set that has them, or None where it has none or they are no numbers."""
    if index is None:
        return None
    index = getattr(index, "indices", index)  # of what a sampler hands out in its own way, as Paceline's does
    indices = list(index) if isinstance(index, (list, tuple)) else [index]
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


def _rows(batch: Any, size: int | None) -> list[list[int]] | None:
    """For each tensor that has a row for each example: the rows' digests."""
    found = []
    for leaf in _leaves(batch):
        if leaf.device.type == "meta" or leaf.layout is not torch.strided or leaf.dim() == 0:
            continue
        size = leaf.shape[0] if size is None else size
        if leaf.shape[0] == size and size:
            found.append(rows_of(leaf))
        if len(found) == _MOST_LEAVES:
            break
    return found or None


def rows_of(leaf: torch.Tensor) -> list[int]:
    """A number for each row of a tensor, from at most _ELEMENTS of its values."""
    flat = leaf.detach()[:_MOST_ROWS].reshape(min(len(leaf), _MOST_ROWS), -1)
    stride = max(1, flat.shape[1] // _ELEMENTS)
    taken = flat[:, ::stride].cpu()
    if taken.dtype is torch.bfloat16:
        taken = taken.float()
    data = taken.contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in data]
