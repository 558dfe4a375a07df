"""Copies batches of any structure into pinned memory, and moves them to a device."""

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
    """The batch with every tensor on `device`. Searches tuples, named tuples, lists, mappings and dataclasses, and
    calls `.to(device)` of objects that have it. Other values stay unchanged. Tensors that are already on the device are
    not copied. Copies from pinned memory to a device are asynchronous; copies to the host wait for the data."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, (str, bytes, int, float)) or batch is None:
        return batch
    if callable(getattr(type(batch), "to", None)):  # look at the type: entries of a batch may be its attributes
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
    """Whether a class's method `to` has the argument `non_blocking`, or accepts any keyword."""
    try:
        parameters = inspect.signature(to).parameters
    except (TypeError, ValueError):  # a built-in function
        return False
    return "non_blocking" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def pinned(batch: Any) -> Any:
    """The batch with every CPU tensor in pinned memory. Searches the same structures as torch's DataLoader: tuples,
    named tuples, lists, mappings, objects that have `.pin_memory()`. Tensors that are already on a device stay
    unchanged. (torch's DataLoader raises for such tensors.)"""
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
        try:  # try a copy first: it keeps attributes that a mapping has besides its items
            return items if type(batch) is dict else _refilled(batch, items)
        except (TypeError, AttributeError):
            return rebuild(batch, items)
    return batch


def rebuild(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the original's class with these items. If the class cannot be constructed from the items (a
    defaultdict), the original is copied and updated. If that fails too, the result is a dict."""
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
