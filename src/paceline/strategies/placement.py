"""Moving batches to a device, whatever they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`: through tuples, named tuples, lists, mappings, dataclasses, and
    objects that have `.to(device)` themselves. What is there already is not copied; anything else passes unchanged.
    Copies from pinned memory do not wait."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, (str, bytes, int, float)) or batch is None:
        return batch
    if hasattr(batch, "to") and callable(batch.to):
        return batch.to(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(item, device) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(move(item, device) for item in batch)
    if isinstance(batch, Mapping):
        moved = {key: move(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else _rebuild(batch, moved)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {f.name: move(getattr(batch, f.name), device) for f in dataclasses.fields(batch) if f.init}
        return dataclasses.replace(batch, **fields)
    return batch


def _rebuild(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:  # a mapping that cannot be made from a dict, such as a defaultdict: keep its kind of access
        return items
