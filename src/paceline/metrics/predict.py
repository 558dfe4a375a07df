"""Predictions: each example's result once, in the order of the data set, on every process.

Phase 1: each process computes its part of each global batch, and moves the result to the CPU. The result is split into
leaves (tensors or lists with one row per example) and the structure around them (dicts and tuples).
Phase 2: the processes exchange the structure and the shapes of their leaves. If all rows of a tensor leaf have the same
shape and dtype, they are joined as a tensor. Other leaves (sequences of unequal length, boxes) are joined as lists of
rows. Rows are sorted into the order of the data set.
Phase 3: the structure is filled with the joined leaves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.comm import gathering
from paceline.comm.mesh import data_group
from paceline.data.loader import Loader
from paceline.errors import SettingError, UsageError
from paceline.step.precision import to_fp32

LABELS = "label", "label_ids", "labels"
"""The entries of a batch that Hugging Face's models compute a loss from."""
LIST, TENSOR = "list", "tensor"
_Row = tuple[tuple[int, ...], str]  # the shape and dtype of a row


class _Form(NamedTuple):
    """The form of a process's results."""

    structure: str | None  # repr of dicts and tuples, with a number in place of each leaf
    kinds: tuple[str, ...]  # LIST or TENSOR, per leaf
    shapes: tuple[frozenset[_Row], ...]  # per leaf, its kinds of tensor rows, except in empty batches


def predict(
    model: Any, fn: Callable[[Any, Any], Any], loader: Loader, autocast: Callable[[], AbstractContextManager[Any]]
) -> Any:
    """Return the results of `fn(model, batch)` for each example of an evaluation loader.

    Raises UsageError if a result does not have one row per example.
    """
    indices: list[int] = []
    batches: list[list[Any]] = []
    structure: Any = None
    empty: list[Any] = []  # the leaves of an empty batch
    for batch in loader:
        with autocast():
            result = fn(model, batch)
        result = to_fp32(result)
        leaves: list[Any] = []
        structure = flatten(result, loader.examples, leaves, "")
        if loader.examples:
            indices += loader.indices
            batches.append(leaves)
        else:
            empty = leaves
    columns: list[Any] = list(zip(*batches, strict=True)) if batches else [() for _ in empty]
    kinds = tuple(LIST if isinstance(leaf, list) else TENSOR for leaf in (batches or [empty])[0])
    form = _Form(None if structure is None else repr(structure), kinds, tuple(map(_shapes, columns)))
    received: list[Any] = data_group().gather(tuple(form))
    forms = [_Form(*other) for other in received]
    if all(other.structure is None for other in forms):
        raise UsageError(
            "run.predict: the data set has no examples, so the form of the results is unknown. Skip the call if "
            "len(dataset) is 0."
        )
    _check_alike(forms)
    order = gathering.gather_uneven(torch.tensor(indices, dtype=torch.int64), data_group()).argsort()
    rows = [
        _join(column, form.kinds[number], frozenset().union(*(other.shapes[number] for other in forms)), order)
        for number, column in enumerate(columns)
    ]
    return _unflatten(structure, rows)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise SettingError for loader arguments that would change the examples or their order."""
    for name in ("shuffle", "sampler", "batch_sampler", "drop_last", "train", "shuffle_buffer", "limit_batches"):
        if name in options:
            raise SettingError(
                f"run.predict({name}=...): predict returns the result of each example once, in the order of the data "
                "set. Remove the argument. To predict for other examples, pass a torch.utils.data.Subset."
            )


def on_first_input(model: Any, batch: Any) -> Any:
    """Return the model's result for a batch. This is the default function of `predict`.

    The model is called with the batch, or with the first element of a tuple or list (inputs, labels). A dict is passed
    as keyword arguments, without the labels, if the model's forward has parameters with these names, as in Hugging
    Face's models. The result is then the output's "logits", if it has any.
    """
    if isinstance(batch, (tuple, list)):
        return model(batch[0])
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name not in LABELS}
        if inputs and inputs.keys() <= inspect.signature(getattr(model, "forward", model)).parameters.keys():
            outputs = model(**inputs)
            return outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
    return model(batch)


# --- phase 1


def flatten(node: Any, count: int, leaves: list[Any], path: str) -> Any:
    """Append the leaves of `node` to `leaves`, on the CPU, and return the structure around them.

    Args:
        count: the number of examples.
        path: the position of `node` in the result, for messages.

    Raises:
        UsageError: a leaf does not have one row per example.
    """
    if isinstance(node, dict):
        return {key: flatten(value, count, leaves, f"{path}[{key!r}]") for key, value in node.items()}
    if isinstance(node, tuple):
        parts = [flatten(value, count, leaves, f"{path}[{number}]") for number, value in enumerate(node)]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    if node is None and path:
        return None
    if isinstance(node, np.ndarray):
        node = torch.from_numpy(node)
    if not isinstance(node, (Tensor, list)):
        raise UsageError(
            f"run.predict: the result{path} is a {type(node).__name__}. Return a tensor or list with one entry per "
            "example, or a tuple or dict of these."
        )
    size = len(node) if isinstance(node, list) or node.dim() else None
    if size != count:
        shape = tuple(node.shape) if isinstance(node, Tensor) else f"{size} entries"
        raise UsageError(
            f"run.predict: the result{path} has {shape} for a batch of {count} examples. Return a tensor or list with "
            "one entry per example in dimension 0."
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
    if any(other[:2] != forms[0][:2] for other in forms):
        listed = "; ".join(f"rank {rank}: {other.structure} {other.kinds}" for rank, other in enumerate(forms))
        raise UsageError(
            f"run.predict: the form of the results differs between processes ({listed}). Make it the same."
        )


def _join(column: tuple[Any, ...], kind: str, shapes: frozenset[_Row], order: Tensor) -> Any:
    """Return a leaf's rows from all processes, in the order of the data set: a tensor, or a list."""
    if kind == TENSOR and len(shapes) == 1:
        ((shape, name),) = shapes
        dtype = getattr(torch, name.removeprefix("torch."))
        local = torch.cat(column) if column else torch.empty((0, *shape), dtype=dtype)
        return gathering.gather_uneven(local, data_group())[order]
    mine = [row for leaf in column for row in _rows(leaf)]
    received = data_group().gather(mine, "run.predict: the rows of a result")
    everyone = [row for rows in received for row in rows]
    return [everyone[i] for i in order.tolist()]


def _rows(leaf: Any) -> Iterator[Any]:
    return iter(leaf) if isinstance(leaf, list) else (row.clone() for row in leaf)


# --- phase 3


def _unflatten(structure: Any, rows: list[Any]) -> Any:
    if isinstance(structure, dict):
        return {key: _unflatten(value, rows) for key, value in structure.items()}
    if isinstance(structure, tuple):
        parts = [_unflatten(value, rows) for value in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return None if structure is None else rows[structure]
