"""Functions on the trees that models return: tensors in lists, tuples, dicts, dataclasses and other plain objects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

from torch import Tensor, nn

DEPTH = 6  # the limit of depth: models' outputs are not deeper, and an object may refer to itself


def mapped(value: Any, kind: type[Any], function: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """Replace each leaf of this kind by the function's result.

    A subtree with such leaves is copied (a shallow copy), so that the model's objects do not change. All other subtrees
    are returned as they are.
    """
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
            for key, new in changed.items():  # one by one: a ModelOutput also has its items as attributes
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
    """Whether the tree has a leaf of these kinds. A bool does not count as a number."""
    if isinstance(value, kinds):
        return not isinstance(value, bool)
    if depth == 0 or isinstance(value, (Tensor, nn.Module, str, bytes, type(None), type)):
        return False
    if isinstance(value, (list, tuple)):
        return any(holds(item, kinds, depth - 1) for item in value)
    if isinstance(value, MutableMapping):
        return any(holds(item, kinds, depth - 1) for item in value.values())
    return hasattr(value, "__dict__") and any(holds(item, kinds, depth - 1) for item in vars(value).values())
