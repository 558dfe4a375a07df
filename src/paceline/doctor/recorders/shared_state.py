"""The state that doctor's recorders share."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

NUMBER = "_paceline_doctor"  # the attribute that holds a recorded object's number or name


@dataclass
class RecorderState:
    """`log.shared`. Each recorder registers itself here when it is installed."""

    directory: str  # the folder of the files
    rank: int
    steps: int | None  # end the script after this number of optimizer steps; None: it ends itself
    models: Any = None  # the ModelRecorder
    collectives: Any = None  # the CollectiveRecorder
    variables: Any = None  # the VariableRecorder
    draws: Any = None  # the DrawRecorder
    optimizers: Any = field(default_factory=weakref.WeakSet)  # the script's live optimizers
    backward_since_step: bool = False  # has a backward ended since the last optimizer step?
    clipped_gradients: set[int] = field(default_factory=set)  # id of each gradient that the last clipping made smaller


def number_of(thing: Any) -> Any:
    """The number or name that a recorder gave an object; None if it has none."""
    return getattr(thing, "__dict__", {}).get(NUMBER)


def set_number(thing: Any, number: Any) -> Any:
    """Give an object a number or name unless it has one. Returns its number or name."""
    return thing.__dict__.setdefault(NUMBER, number)
