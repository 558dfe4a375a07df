"""Functions in which a process waits for other processes: a list, by which a trace tells waiting from computing.

Who writes such a function says so beside it. To stand in the list costs a run nothing: only a trace (timeline/worker)
replaces what is listed, for as long as its run is open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)

WAITS: list[tuple[Any, str]] = []
"""(class, name of the method), in the order in which the modules were loaded."""


def waits(*names: str) -> Callable[[C], C]:
    """Puts these methods of a class into the list."""

    def note(cls: C) -> C:
        WAITS.extend((cls, name) for name in names)
        return cls

    return note
