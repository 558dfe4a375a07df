"""Some examples' part of a collated batch: which dimension is the batch is told by two small batches of one example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import UsageError
from paceline.strategies.placement import rebuild


def take_rows(one: Any, several: Any, whole: Any, low: int, high: int, total: int, *, many: int) -> Any:
    """The examples [low, high) of `whole`, a collated batch of `total` examples.

    one, several: what the same collate function gives for one example, and for `many` of them. What is alike in both
    passes as it is. Raises UsageError where a dimension does not grow by one for each example.
    """

    def take(one: Any, several: Any, whole: Any, place: str) -> Any:
        if isinstance(one, (Tensor, np.ndarray)):
            return take_array(one, several, whole, place)
        if one is None or isinstance(one, (str, bytes, bool)):
            return whole
        if isinstance(one, (int, float)):
            return count(one, several, whole, place)
        if isinstance(one, (list, tuple)) and len(one) == len(several):
            if len(whole) != len(one):
                raise _refusal(place, f"has {len(one)} entries for one example and {len(whole)} for {total}")
            made = [take(*its, f"{place}[{i}]") for i, its in enumerate(zip(one, several, whole, strict=True))]
            return type(one)(*made) if hasattr(one, "_fields") else type(one)(made)
        if isinstance(one, Mapping):
            if one.keys() != whole.keys():
                raise _refusal(place, f"has the keys {list(one)} for one example and {list(whole)} for {total}")
            return rebuild(whole, {key: take(one[key], several[key], whole[key], f"{place}[{key!r}]") for key in whole})
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            fields = [f.name for f in dataclasses.fields(one) if f.init]
            parts = {n: take(getattr(one, n), getattr(several, n), getattr(whole, n), f"{place}.{n}") for n in fields}
            return dataclasses.replace(whole, **parts)
        if hasattr(one, "__getitem__") and hasattr(one, "__len__"):
            return sliced(len(one), len(several), len(whole), lambda: whole[low:high], place)
        return whole

    def sliced(first: int, second: int, length: int, cut: Callable[[], Any], place: str) -> Any:
        if (first, second) != (1, many):
            raise _refusal(place, f"has {first} rows for one example and {second} for {many}")
        if length != total:
            raise _refusal(place, f"has {length} rows for {total} examples")
        return cut()

    def take_array(one: Any, several: Any, whole: Any, place: str) -> Any:
        if one.ndim == 0 and several.ndim == 0 and whole.ndim == 0:
            made = count(one.item(), several.item(), whole.item(), place)
            return whole if made == whole.item() else whole * 0 + made
        grown = [d for d, (a, b) in enumerate(zip(one.shape, several.shape, strict=False)) if a != b]
        if one.ndim != several.ndim or one.ndim != whole.ndim or len(grown) > 1:
            shapes = f"{tuple(one.shape)} for one example and {tuple(several.shape)} for {many}"
            raise _refusal(place, f"is of shape {shapes}, where one dimension should be the examples")
        if not grown:
            return whole
        d = grown[0]
        at = (slice(None),) * d + (slice(low, high),)
        cut = (lambda: whole[at].clone()) if isinstance(whole, Tensor) else (lambda: whole[at].copy())
        return sliced(one.shape[d], several.shape[d], whole.shape[d], cut, place)

    def count(one: Any, several: Any, whole: Any, place: str) -> Any:
        if one == several or one != one or not one:
            return whole
        if one == 1 and several == many and whole == total:
            return type(whole)(high - low)
        if one * many == several:
            raise _refusal(place, f"is a number that grows with the examples ({one} for one, {several} for {many})")
        return whole

    return take(one, several, whole, "batch")


def _refusal(place: str, what: str) -> UsageError:
    return UsageError(
        f'run.loader(collate="global"): the batch that collate_fn makes cannot be cut by examples: {place} {what}. '
        "Let it give a row for each example of the list (what is packed or concatenated has none), and count in the "
        'loss function what the loss is a mean over; or leave collate="global" out.'
    )
