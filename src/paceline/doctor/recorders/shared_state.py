"""What doctor's recorders know of each other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

NUMBER = "_paceline_doctor"  # the attribute by which a recorded object knows its number, or its name


@dataclass
class RecorderState:
    """`log.shared`. The recorders put themselves here when they are installed."""

    directory: str  # where the files go
    rank: int
    steps: int | None  # the script is ended after so many optimizer steps; None: it ends itself
    models: Any = None  # the ModelRecorder
    collectives: Any = None  # the CollectiveRecorder
    variables: Any = None  # the VariableRecorder
    draws: Any = None  # the DrawRecorder
    optimizers: Any = field(default_factory=weakref.WeakSet)  # the script's optimizers that are alive
    backward_since_step: bool = False  # has a backward ended since the last optimizer step?
    clipped_gradients: set[int] = field(default_factory=set)  # id of each gradient that the last clipping made smaller


def number_of(thing: Any) -> Any:
    """The number, or the name, that a recorder gave an object; None: it gave none."""
    return getattr(thing, "__dict__", {}).get(NUMBER)


def set_number(thing: Any, number: Any) -> Any:
    """Give an object its number, or its name, if it has none. Returns the one that it has."""
    return thing.__dict__.setdefault(NUMBER, number)
