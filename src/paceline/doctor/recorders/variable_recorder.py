"""The numbers in the script's variables (hits, sums, counts) at the end of a loop over a DataLoader, at a small
collective, and when something is logged.

The numbers show how a metric is computed. For example, a rule can conclude that a rank divided its local 57 hits by the
128 examples of all ranks. The recorded calls and the source do not show that.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch

from paceline.observe.event_log import EventLog
from paceline.observe.script_stack import Owner

_MAX_CAPTURES = 400  # per run
_MAX_NUMBERS = 96  # per capture
_MAX_FRAMES, _MAX_NAMES = 4, 300  # frames of the script; variables per frame
_MAX_ELEMENTS, _MAX_ITEMS, _MAX_ATTRIBUTES = 6, 16, 40  # of a tensor, of a dictionary, of an object
_MAX_DEPTH = 2  # levels of dictionaries and objects, such as a meter in an attribute of `self`


class VariableRecorder:
    """Reads variables while no model is trained: between the end of a pass and the next backward."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.pass_ended = False  # has a pass over a loader ended since the last backward?

    def numbers(self) -> dict[str, float] | None:
        """name -> value of each number in the script's frames, innermost first, and in the attributes of the trained
        models. None if no pass has ended since the last backward, or after _MAX_CAPTURES calls."""
        if not self.pass_ended or not self.log.few("captures", _MAX_CAPTURES):
            return None
        found: dict[str, float] = {}
        with self.log.overhead():
            for name, value in self._named():
                for path, number in _numbers_in(name, value, _MAX_DEPTH, self._is_own):
                    found.setdefault(path, number)
                if len(found) >= _MAX_NUMBERS:
                    break
        return found

    def _is_own(self, cls: type) -> bool:
        """Does the script define the class?"""
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        return file is not None and self.log.stack.owns(file)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for frame in islice(self.log.stack.frames(Owner.SCRIPT), _MAX_FRAMES):
            top = frame.f_code.co_name == "<module>"
            for name, value in islice(list(frame.f_locals.items()), _MAX_NAMES):
                if not (top and name.startswith("__")):
                    yield name, value
        for model in self.log.shared.models.roots() if self.log.shared.models is not None else ():
            yield "self", model


def _numbers_in(name: str, value: Any, depth: int, own: Callable[[type], bool]) -> Iterator[tuple[str, float]]:
    """(path, number) for each number in a value: a number, a small tensor, a dictionary or an object.

    own: does the script define a class?
    """
    number = _as_number(value)
    if number is not None:
        yield name, number
    elif type(value) in (torch.Tensor, torch.nn.Parameter):
        if 0 < value.numel() <= _MAX_ELEMENTS and value.dim() == 1 and _readable(value):
            yield from ((f"{name}[{place}]", float(v)) for place, v in enumerate(value.detach().tolist()))
    elif depth and isinstance(value, Mapping):
        if len(value) <= _MAX_ITEMS and type(value).__module__ in ("builtins", "collections"):
            for key, item in list(value.items()):
                if isinstance(key, str):
                    yield from _numbers_in(f"{name}.{key}", item, depth - 1, own)
    elif depth and own(type(value)):
        held = getattr(value, "__dict__", None)
        for key, item in islice(list(held.items()) if type(held) is dict else (), _MAX_ATTRIBUTES):
            if not key.startswith("_"):
                yield from _numbers_in(f"{name}.{key}", item, depth - 1, own)


def _as_number(value: Any) -> float | None:
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.dim() or not _readable(value):
            return None
        value = value.detach().item()
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a very large integer
        return None
    return number if math.isfinite(number) else None


def _readable(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and tensor.layout is torch.strided and not tensor.is_complex()


def install(log: EventLog) -> None:
    log.shared.variables = VariableRecorder(log)
