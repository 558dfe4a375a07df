"""Predictions: each example's result once, in the order of the data set, on every process.

Phase 1: each process computes its part of each global batch; results move to the CPU as they come. They are cut into
leaves, each with an example in each row: a tensor, or a list. Dicts and tuples around them are kept.
Phase 2: the processes tell each other the form of their leaves. Where all rows of a tensor leaf have one shape and
dtype they are joined as a tensor; else (sequences of unequal length, boxes) as a list of rows, which travel by pickle.
Phase 3: rows are put in the places of their examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.collectives import data_group
from paceline.errors import SettingError, UsageError
from paceline.train.loader import Loader

LIST, TENSOR = "list", "tensor"
_Row = tuple[tuple[int, ...], str]  # the shape and dtype of a row


class _Form(NamedTuple):
    """What a process's results look like. frame: dicts and tuples, with leaves as numbers. kinds: LIST or TENSOR of
    each leaf; shapes: those of the rows of each tensor leaf, with their dtypes; without those of empty batches."""

    frame: Any
    kinds: tuple[str, ...]
    shapes: tuple[frozenset[_Row], ...]


def predict(
    model: Any, fn: Callable[[Any, Any], Any], loader: Loader, autocast: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """The results of `fn(model, batch)` for each example of an evaluation loader. Raises UsageError where a result has
    not one row for each example."""
    indices: list[int] = []
    batches: list[list[Any]] = []
    frame: Any = None
    empty: list[Any] = []
    for batch in loader:
        with autocast():
            result = fn(model, batch)
        leaves: list[Any] = []
        frame = _cut(result, loader.examples, leaves, "")
        if loader.examples:
            indices += loader.indices
            batches.append(leaves)
        else:
            empty = leaves
    columns: list[Any] = list(zip(*batches, strict=True)) if batches else [() for _ in empty]
    form = _Form(frame, tuple(LIST if isinstance(leaf, list) else TENSOR for leaf in (batches or [empty])[0]), ())
    form = form._replace(shapes=tuple(_shapes(column) for column in columns))
    forms = collectives.gather_objects(form, data_group())
    if all(other.frame is None for other in forms):
        raise UsageError(
            "run.predict: the data set has no examples, and what the results would look like is not known without one. "
            "Leave the call out where len(dataset) is 0."
        )
    _check_alike(forms)
    order = collectives.gather_uneven(torch.tensor(indices, dtype=torch.int64), data_group()).argsort()
    rows = [
        _join(column, form.kinds[number], frozenset().union(*(other.shapes[number] for other in forms)), order)
        for number, column in enumerate(columns)
    ]
    return _fill(frame, rows)


def check_options(options: Mapping[str, Any]) -> None:
    """Raises SettingError for loader arguments that would change which examples come, or in which order."""
    for name in ("shuffle", "sampler", "batch_sampler", "drop_last", "train", "shuffle_buffer"):
        if name in options:
            raise SettingError(
                f"run.predict({name}=...): it gives each example's result once, in the order of the data set. Leave it "
                "out, and give the data set that is meant, such as torch.utils.data.Subset."
            )


def on_first_input(model: Any, batch: Any) -> Any:
    """What is computed when nothing else is said: of a batch that is a tuple or list (inputs, labels), its first part
    goes into the model."""
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


# --- phase 1


def _cut(node: Any, count: int, leaves: list[Any], path: str) -> Any:
    """Puts the leaves into `leaves`, on the CPU. Returns what is around them, with their numbers in their places."""
    if isinstance(node, dict):
        return {key: _cut(value, count, leaves, f"{path}[{key!r}]") for key, value in node.items()}
    if isinstance(node, tuple):
        parts = [_cut(value, count, leaves, f"{path}[{number}]") for number, value in enumerate(node)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if node is None and path:
        return None
    if isinstance(node, np.ndarray):
        node = torch.from_numpy(node)
    if not isinstance(node, (Tensor, list)):
        raise UsageError(
            f"run.predict: the result{path} is a {type(node).__name__}. Return a tensor or list with an entry for each "
            "example, or a tuple or dict of these."
        )
    size = len(node) if isinstance(node, list) or node.dim() else None
    if size != count:
        shape = tuple(node.shape) if isinstance(node, Tensor) else f"{size} entries"
        raise UsageError(
            f"run.predict: the result{path} has {shape} for a batch of {count} examples. Return a tensor or list with "
            "an entry for each example in dimension 0."
        )
    leaves.append(node.detach().cpu() if isinstance(node, Tensor) else [_on_cpu(item) for item in node])
    return len(leaves) - 1


def _on_cpu(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.detach().cpu()
    if isinstance(item, dict):
        return {key: _on_cpu(value) for key, value in item.items()}
    if isinstance(item, (tuple, list)) and not hasattr(item, "_fields"):
        return type(item)(_on_cpu(value) for value in item)
    return item


# --- phase 2


def _shapes(column: tuple[Any, ...]) -> frozenset[_Row]:
    return frozenset((tuple(leaf.shape[1:]), str(leaf.dtype)) for leaf in column if isinstance(leaf, Tensor))


def _check_alike(forms: list[_Form]) -> None:
    if any((other.frame, other.kinds) != (forms[0].frame, forms[0].kinds) for other in forms):
        told = "; ".join(f"rank {rank}: {other.frame} {other.kinds}" for rank, other in enumerate(forms))
        raise UsageError(f"run.predict: results have another form from process to process ({told}). Make them alike.")


def _join(column: tuple[Any, ...], kind: str, shapes: frozenset[_Row], order: Tensor) -> Any:
    """All processes' rows of one leaf, in the order of the data set: a tensor, or a list."""
    if kind == TENSOR and len(shapes) == 1:
        ((shape, name),) = shapes
        dtype = getattr(torch, name.removeprefix("torch."))
        own = torch.cat(column) if column else torch.empty((0, *shape), dtype=dtype)
        return collectives.gather_uneven(own, data_group())[order]
    mine = [row for leaf in column for row in _rows(leaf)]
    everyone = [row for rows in collectives.gather_objects(mine, data_group()) for row in rows]
    return [everyone[i] for i in order.tolist()]


def _rows(leaf: Any) -> Iterator[Any]:
    return iter(leaf) if isinstance(leaf, list) else (row.clone() for row in leaf)


# --- phase 3


def _fill(frame: Any, rows: list[Any]) -> Any:
    if isinstance(frame, dict):
        return {key: _fill(value, rows) for key, value in frame.items()}
    if isinstance(frame, tuple):
        parts = [_fill(value, rows) for value in frame]
        return type(frame)(*parts) if hasattr(frame, "_fields") else tuple(parts)
    return None if frame is None else rows[frame]
