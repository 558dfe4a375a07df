"""Zero-length batches, for a shard that has no examples.

A collate function is asked for a batch of one example and of the same example four times; whatever grows from the one
to the other is the batch dimension, and is cut to nothing. So (N, C), time-major (T, N), padded, concatenated (graphs,
boxes) and nested batches are all understood without being told. (Four and not two: where collate draws at random how
much it gives, two sizes are then unlikely to be equal by chance.) What is the same for one and for
four passes as it is.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import EmptyShardError
from paceline.strategies.placement import rebuild


def empty_batch(collate: Callable[[list[Any]], Any], example: Any) -> Any:
    """What `collate` would give for no examples. Raises EmptyShardError where that cannot be told."""
    return _shrink(collate([example]), collate([example] * _COPIES))


_COPIES = 4


def _shrink(one: Any, many: Any) -> Any:
    if isinstance(one, (Tensor, np.ndarray)):
        return _shrink_array(one, many)
    if isinstance(one, (str, bytes)):
        return one
    if isinstance(one, tuple) and hasattr(one, "_fields"):
        return type(one)(*(_shrink(a, b) for a, b in zip(one, many, strict=True)))
    if isinstance(one, (list, tuple)):
        if len(one) != len(many):
            return type(one)()
        return type(one)(_shrink(a, b) for a, b in zip(one, many, strict=True))
    if isinstance(one, Mapping):
        return rebuild(one, {key: _shrink(value, many[key]) for key, value in one.items()})
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        fields = {
            f.name: _shrink(getattr(one, f.name), getattr(many, f.name)) for f in dataclasses.fields(one) if f.init
        }
        return dataclasses.replace(one, **fields)
    if isinstance(one, int) and not isinstance(one, bool) and one * _COPIES == many:
        return 0  # a count of examples or of what is in them
    if one is None or isinstance(one, (bool, int, float, complex)) or _same(one, many):
        return one
    if hasattr(one, "__getitem__") and hasattr(one, "__len__"):
        return one[:0]
    raise EmptyShardError(
        f"a shard of this global batch is empty, and a zero-length {type(one).__name__}, which collate_fn gives, "
        "cannot be made. Give it `__len__` and slicing (batch[:0]), make it a dataclass or a dict, or see that no "
        "shard is empty: "
        "a larger global_batch, or drop_last=True."
    )


def _same(one: Any, many: Any) -> bool:
    """Whether a value of any type does not depend on the number of examples. What compares by identity and is made
    anew for each batch, such as a settings object, is compared by what it holds."""
    if type(one) is not type(many):
        return False
    try:
        return bool(one is many or one == many) or pickle.dumps(one) == pickle.dumps(many)
    except Exception:  # whatever a class of the user's says to these
        return False


def _shrink_array(one: Any, many: Any) -> Any:
    if one.ndim != many.ndim:
        raise EmptyShardError(
            f"a shard of this global batch is empty, and collate_fn gives {tuple(one.shape)} for one example but "
            f"{tuple(many.shape)} for {_COPIES}, so that no zero-length batch can be made of it. Keep the number of "
            "dimensions, or see that no shard is empty: a larger global_batch, or drop_last=True."
        )
    if one.ndim == 0:
        return one * 0 if bool(one * _COPIES == many) else one  # a count, as above
    return one[tuple(slice(0, 0) if a != b else slice(None) for a, b in zip(one.shape, many.shape, strict=True))]
