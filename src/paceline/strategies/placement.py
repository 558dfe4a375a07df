"""Moving batches to a device, whatever they are made of."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`: through tuples, named tuples, lists, mappings, dataclasses, and
    objects that have `.to(device)` themselves. Tensors that are on the device already are not copied; other values pass
    unchanged. Copies from pinned memory do not wait."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (str, bytes, int, float)) or batch is None:
        return batch
    if callable(getattr(type(batch), "to", None)):  # of the type: entries of a batch may be its attributes
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(item, device) for item in batch)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return rebuild(batch, moved)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: move(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def rebuild(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the original's class with these items: constructed from them, or else an updated copy (a
    defaultdict); a dict where neither works."""
    if type(original) is dict:
        return items
    kind: Callable[[dict[Any, Any]], Mapping[Any, Any]] = type(original)
    for make in (kind, lambda items: _refilled(original, items)):
        try:
            made = make(items)
            if made.keys() == items.keys():
                return made
        except (TypeError, AttributeError):
            continue
    return items


def _refilled(original: Any, items: dict[Any, Any]) -> Any:
    copied = copy.copy(original)
    copied.update(items)
    return copied
