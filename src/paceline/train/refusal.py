"""What to say when a value cannot go into a checkpoint: where it is, what it is, and what to save instead."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import pathlib
import types
from typing import Any

import torch


def spell(path: tuple[Any, ...]) -> str:
    """A place in a tree as one would write it in Python: " at decay.schedule[3]['a key']"; the root is ""."""
    text = ""
    for part in path:
        plain = isinstance(part, str) and part.isidentifier()
        text += f".{part}" if plain else f"[{_shorten(repr(part))}]"
    return f" at {text.removeprefix('.')}" if text else ""


def refusal(value: Any, *, hashed: bool = False) -> tuple[str, str]:
    """(what `value` is, the remedy), for an error message. `hashed`: it is a dict key or a member of a set."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        return _tensor_refusal(value, name, hashed)
    if isinstance(value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return "a function", "Save the numbers and names it is made from, and make it again in load_state_dict."
    if isinstance(value, type):
        return f"a class ({value.__qualname__})", "Save its name, and look the class up in load_state_dict."
    if isinstance(value, enum.Enum):
        return f"an enum member ({value})", "Save its .value."
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a namedtuple ({name})", "Save tuple(value) or value._asdict()."
    if isinstance(value, (pathlib.PurePath, datetime.date, datetime.time)):
        plain = "str(value)" if isinstance(value, pathlib.PurePath) else "value.isoformat()"
        return f"a {name}", f"Save {plain}."
    if isinstance(value, torch.Generator):
        return "a torch.Generator", "Save its get_state(), and set_state() it in load_state_dict."
    if dataclasses.is_dataclass(value):
        return f"a dataclass ({name})", "Save dataclasses.asdict(value)."
    if callable(getattr(value, "state_dict", None)):
        return f"a {name}", "It has a state of its own: save its state_dict(), and load that in load_state_dict."
    for base in (dict, list, tuple, set, str, int, float):
        if isinstance(value, base):
            return f"a {name}, a subclass of {base.__name__},", f"Save {base.__name__}(value)."
    return (
        f"a {name}",
        "Save what it is made of: None, bools, numbers, strings, bytes, tensors, numpy arrays, and lists, tuples, sets "
        "and dicts of these.",
    )


def _tensor_refusal(value: torch.Tensor, name: str, hashed: bool) -> tuple[str, str]:
    if hashed:
        return "a tensor as a dict key or set member", "Use its name, its index or its item() as the key."
    if type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter:
        if hasattr(value, "full_tensor"):
            return f"a {name}, one process's piece of a tensor,", "Save its full_tensor()."
        return f"a {name}, a subclass of Tensor,", "Save value.as_subclass(torch.Tensor), or the tensors inside it."
    if value.is_meta:
        return "a tensor on the meta device, which has no values,", "Give it values first (to_empty, then initialise)."
    if value.is_quantized:
        return "a quantized tensor", "Save its int_repr(), q_scale() and q_zero_point(), or its dequantize()."
    return (
        f"a tensor of layout {value.layout}",
        "Save its to_dense(), or its indices and values as tensors of their own.",
    )


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
