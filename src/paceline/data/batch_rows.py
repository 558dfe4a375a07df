"""The batch dimension of collated batches: makes zero-length batches for empty shards, and slices batches by example.

We call the collate function with one example, and with several copies of it. The dimension that grows from the first
result to the second is the batch dimension. This handles (N, C), time-major (T, N), padded, concatenated (graphs,
boxes) and nested batches without any setting. Values that are equal in both results do not depend on the examples.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.data.placement import rebuild
from paceline.errors import EmptyShardError, UsageError

SEVERAL = 4
"""Number of copies in the larger batch. More than 2, in case collate draws the length of its result at random: batches
of 1 and of 4 examples are unlikely to have equal lengths."""


def empty_batch(collate: Callable[[list[Any]], Any], example: Any) -> Any:
    """The result of `collate` for no examples. Raises EmptyShardError if it cannot be inferred."""
    return _emptied(collate([example]), collate([example] * SEVERAL))


def _emptied(one: Any, several: Any) -> Any:
    if isinstance(one, (Tensor, np.ndarray)):
        return _emptied_array(one, several)
    if isinstance(one, (str, bytes)):
        return one
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*(_emptied(a, b) for a, b in zip(one, several, strict=True)))
    if isinstance(one, (list, tuple)):
        if len(one) != len(several):
            return type(one)()
        return type(one)(_emptied(a, b) for a, b in zip(one, several, strict=True))
    if isinstance(one, Mapping):
        return rebuild(one, {key: _emptied(value, several[key]) for key, value in one.items()})
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        fields = [f.name for f in dataclasses.fields(one) if f.init]
        return dataclasses.replace(one, **{n: _emptied(getattr(one, n), getattr(several, n)) for n in fields})
    if isinstance(one, int) and not isinstance(one, bool) and one * SEVERAL == several:
        return 0  # a count of the examples or of their items
    if one is None or isinstance(one, (bool, int, float, complex)) or _alike(one, several):
        return one
    if hasattr(one, "__getitem__") and hasattr(one, "__len__"):
        return one[:0]
    raise EmptyShardError(
        f"a shard of this global batch is empty, and a zero-length {type(one).__name__}, the type that collate_fn "
        "returns, cannot be made. Give the class `__len__` and slicing (batch[:0]), make it a dataclass or a dict, or "
        "avoid empty shards: use a larger global_batch, or drop_last=True."
    )


def _alike(one: Any, several: Any) -> bool:
    """Whether a value of any type is the same in both batches. Objects that compare by identity and are created for
    each batch, such as a settings object, are compared by their content."""
    if type(one) is not type(several):
        return False
    try:
        return bool(one is several or one == several) or pickle.dumps(one) == pickle.dumps(several)
    except Exception:  # a user's class may raise anything
        return False


def _emptied_array(one: Any, several: Any) -> Any:
    if one.ndim != several.ndim:
        raise EmptyShardError(
            f"a shard of this global batch is empty, and collate_fn returns {tuple(one.shape)} for one example but "
            f"{tuple(several.shape)} for {SEVERAL}, so no zero-length batch can be made from it. Keep the number of "
            "dimensions, or avoid empty shards: use a larger global_batch, or drop_last=True."
        )
    if one.ndim == 0:
        return one * 0 if bool(one * SEVERAL == several) else one  # a count, as in `_emptied`
    return one[tuple(slice(0, 0) if a != b else slice(None) for a, b in zip(one.shape, several.shape, strict=True))]


def slice_examples(one: Any, several: Any, whole: Any, low: int, high: int, total: int) -> Any:
    """The examples [low, high) of `whole`, a collated batch of `total` examples.

    one, several: the results of the same collate function for one example and for SEVERAL examples. Raises UsageError
    if a dimension does not grow by one per example.
    """

    def part(one: Any, several: Any, whole: Any, place: str) -> Any:
        if isinstance(one, (Tensor, np.ndarray)):
            return part_of_array(one, several, whole, place)
        if one is None or isinstance(one, (str, bytes, bool)):
            return whole
        if isinstance(one, (int, float)):
            return count(one, several, whole, place)
        if isinstance(one, (list, tuple)) and len(one) == len(several):
            if len(whole) != len(one):
                raise _refusal(place, f"has {len(one)} entries for one example and {len(whole)} for {total}")
            made = [part(*its, f"{place}[{i}]") for i, its in enumerate(zip(one, several, whole, strict=True))]
            return type(one)(*made) if hasattr(one, "_fields") else type(one)(made)
        if isinstance(one, Mapping):
            if one.keys() != whole.keys():
                raise _refusal(place, f"has the keys {list(one)} for one example and {list(whole)} for {total}")
            return rebuild(whole, {key: part(one[key], several[key], whole[key], f"{place}[{key!r}]") for key in whole})
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            fields = [f.name for f in dataclasses.fields(one) if f.init]
            parts = {n: part(getattr(one, n), getattr(several, n), getattr(whole, n), f"{place}.{n}") for n in fields}
            return dataclasses.replace(whole, **parts)
        if hasattr(one, "__getitem__") and hasattr(one, "__len__"):
            check_rows(len(one), len(several), len(whole), place)
            return whole[low:high]
        return whole

    def check_rows(first: int, second: int, length: int, place: str) -> None:
        if (first, second) != (1, SEVERAL):
            raise _refusal(place, f"has {first} rows for one example and {second} for {SEVERAL}")
        if length != total:
            raise _refusal(place, f"has {length} rows for {total} examples")

    def part_of_array(one: Any, several: Any, whole: Any, place: str) -> Any:
        if one.ndim == 0 and several.ndim == 0 and whole.ndim == 0:
            made = count(one.item(), several.item(), whole.item(), place)
            return whole if made == whole.item() else whole * 0 + made
        grown = [d for d, (a, b) in enumerate(zip(one.shape, several.shape, strict=False)) if a != b]
        if one.ndim != several.ndim or one.ndim != whole.ndim or len(grown) > 1:
            shapes = f"{tuple(one.shape)} for one example and {tuple(several.shape)} for {SEVERAL}"
            raise _refusal(place, f"has the shape {shapes}, but only the dimension of the examples may differ")
        if not grown:
            return whole
        d = grown[0]
        check_rows(one.shape[d], several.shape[d], whole.shape[d], place)
        view = whole[(slice(None),) * d + (slice(low, high),)]
        return view.clone() if isinstance(whole, Tensor) else view.copy()

    def count(one: Any, several: Any, whole: Any, place: str) -> Any:
        """Slice a number. A number of examples becomes the number in this part; other numbers stay the same."""
        if one == several or one != one or not one:
            return whole
        if one == 1 and several == SEVERAL and whole == total:
            return type(whole)(high - low)
        if one * SEVERAL == several:
            raise _refusal(place, f"is a number that grows with the examples ({one} for one, {several} for {SEVERAL})")
        return whole

    return part(one, several, whole, "batch")


def _refusal(place: str, what: str) -> UsageError:
    return UsageError(
        f'run.loader(collate="global"): the batch that collate_fn makes cannot be split by example: {place} {what}. '
        "Return one row per example of the list (packed or concatenated batches do not have it), and compute the "
        'count for a mean in the loss function; or remove collate="global".'
    )
