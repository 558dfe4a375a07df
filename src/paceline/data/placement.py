"""Moving batches to a device, and into pinned memory before, whatever they are made of."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`: through tuples, named tuples, lists, mappings, dataclasses, and
    objects that have `.to(device)` themselves. Tensors that are on the device already are not copied; other values pass
    unchanged. Copies from pinned memory to a device do not wait; copies to the host do, since the host reads them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, (str, bytes, int, float)) or batch is None:
        return batch
    if callable(getattr(type(batch), "to", None)):  # of the type: entries of a batch may be its attributes
        waits = device.type == "cpu" or not _takes_non_blocking(type(batch).to)
        return batch.to(device) if waits else batch.to(device, non_blocking=True)
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


@lru_cache(maxsize=64)
def _takes_non_blocking(to: Callable[..., Any]) -> bool:
    """Whether a class's method `to` has the argument `non_blocking`, or passes on what it is given."""
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # of a built-in function
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def pinned(batch: Any) -> Any:
    """The batch with every tensor of the CPU in pinned memory: through what torch's DataLoader looks into (tuples,
    named tuples, lists, mappings, objects that have `.pin_memory()` themselves). Tensors that are on a device already
    pass unchanged, where torch's raises."""
    if isinstance(batch, Tensor):
        return batch.pin_memory() if batch.device.type == "cpu" else batch
    if isinstance(batch, (str, bytes, int, float)) or batch is None:
        return batch
    if callable(getattr(type(batch), "pin_memory", None)):
        try:
            return batch.pin_memory()
        except RuntimeError as error:
            if "only dense CPU tensors can be pinned" in str(error):  # the object's tensors are on a device
                return batch
            raise
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pinned, batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map(pinned, batch))
    if isinstance(batch, Mapping):
        items = {key: pinned(value) for key, value in batch.items()}
        try:  # a copy first: it keeps what a mapping has beside its items
            return items if type(batch) is dict else _refilled(batch, items)
        except (TypeError, AttributeError):
            return rebuild(batch, items)
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
