"""A list of functions that block on other processes, so that a trace can separate waiting from computing.

Register such a function where it is defined. This costs nothing in a run without a trace: only a trace
(timeline/worker) wraps the listed functions, while its run is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

WAITS: list[tuple[Any, str]] = []
"""(class, method name), in the order in which the modules were loaded."""


def waits(*names: str) -> Callable[[C], C]:
    """Class decorator: adds these methods to the list."""

    def note(cls: C) -> C:
        WAITS.extend((cls, name) for name in names)
        return cls

    return note
