"""Trees that a model returns: tensors in lists, tuples, dicts, dataclasses and other plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

DEPTH = 6  # a model's output is no deeper, and an object may refer to itself


def mapped(value: Any, kind: type[Any], function: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """The tree with the function's result in place of each leaf of this kind. A subtree without such leaves is returned
    itself; others are shallow copies, so that the model's own objects do not change."""
    if isinstance(value, kind):
        return function(value)
    if depth == 0 or isinstance(value, (Tensor, nn.Module, str, bytes, int, float, type(None), type)):
        return value

    def inner(item: Any) -> Any:
        return mapped(item, kind, function, depth - 1)

    if isinstance(value, (list, tuple)):
        items = [inner(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {key: new for key, old in value.items() if (new := inner(old)) is not old}
        if changed:
            value = copy.copy(value)
            for key, new in changed.items():  # one by one: a ModelOutput has its items as attributes too
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        changed = {name: new for name, old in vars(value).items() if (new := inner(old)) is not old}
        if changed:
            value = copy.copy(value)
            for name, new in changed.items():
                object.__setattr__(value, name, new)
    return value


def holds(value: Any, kinds: tuple[type[Any], ...], depth: int = DEPTH) -> bool:
    """Whether the tree has a leaf of these kinds. A bool is no number."""
    if isinstance(value, kinds):
        return not isinstance(value, bool)
    if depth == 0 or isinstance(value, (Tensor, nn.Module, str, bytes, type(None), type)):
        return False
    if isinstance(value, (list, tuple)):
        return any(holds(item, kinds, depth - 1) for item in value)
    if isinstance(value, MutableMapping):
        return any(holds(item, kinds, depth - 1) for item in value.values())
    return hasattr(value, "__dict__") and any(holds(item, kinds, depth - 1) for item in vars(value).values())
