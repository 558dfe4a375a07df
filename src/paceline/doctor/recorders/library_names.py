"""The names by which a library chooses what it sends: short strings in its frames, such as a metric's key.

A library that is given several values under names (Lightning's self.log, a dict to Accelerate's reduce) sends them from
one line of the script and one of its own; only the names tell the calls apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import FrameType
from typing import Any

_MAX_LENGTH, _MAX_NAMES = 60, 24  # of a name; names of one call


def names_in(frames: list[FrameType]) -> dict[str, str]:
    """variable, attribute or field, and its function or class -> its value. frames: the library's, innermost first."""
    found: dict[str, str] = {}
    for frame in frames:
        for where, value in _strings(frame):
            if len(found) < _MAX_NAMES:
                found.setdefault(where, value)
    return found


def _strings(frame: FrameType) -> Iterator[tuple[str, str]]:
    """The local strings of a frame, the string attributes of its `self`, and the string fields of its dataclasses."""
    function, values = frame.f_code.co_name, frame.f_locals
    yield from ((f"{name} in {function}", value) for name, value in values.items() if _is_name(value))
    owner = values.get("self")
    kind = type(owner).__name__
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if _is_name(value):
            yield f"{name} of {kind}", value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = ((field.name, getattr(value, field.name, "")) for field in dataclasses.fields(value))
            yield from ((f"{name}.{field} of {kind}", str(one)) for field, one in fields if _is_name(one))


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= _MAX_LENGTH
