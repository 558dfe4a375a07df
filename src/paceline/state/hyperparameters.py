"""Hyperparameters of optimizers and schedules in a restored run: from the script or from the checkpoint.

A checkpoint holds two values of each hyperparameter: the current value, which a schedule may have changed, and the
value at the start of training. If the value at the start differs from the script's value, the script was changed. The
run then prints a line, and either keeps the checkpoint's value, or takes the script's value and advances the script's
schedule to the checkpoint's number of steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.errors import SettingError

HyperparameterSource = Literal["checkpoint", "script"]
Values = dict[str, Any]  # name -> value
Begun = dict[str, Any]  # {"optimizers": [[values of each param group], ...], "schedulers": [values, ...]}


class Change(NamedTuple):
    """A hyperparameter whose value in the script differs from its value when the checkpoint's training began."""

    kind: str  # "optimizers" or "schedulers"
    number: int  # the number of the optimizer or scheduler
    group: int  # the number of its param group
    name: str
    saved: Any
    own: Any  # the script's value


class Hyperparameters:
    """The hyperparameters of all prepared optimizers and schedulers.

    allow: calls a function, and allows it to step schedulers (guards.py).
    """

    def __init__(self, allow: Callable[[Callable[[], object]], object]) -> None:
        self._allow = allow
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[tuple[Any, dict[str, Any]]] = []  # (scheduler, its state at `prepare`)
        self._script: Begun = {"optimizers": [], "schedulers": []}  # the script's values
        self.begun: Begun = {"optimizers": [], "schedulers": []}  # the values at the start of training

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        self._note("optimizers", [_values_of(group) for group in optimizer.param_groups])

    def add_scheduler(self, scheduler: Any) -> None:
        state = scheduler.state_dict()
        self._schedulers.append((scheduler, copy.deepcopy(state)))
        # The scheduler's rates and counters follow from the optimizer; they are not settings of the scheduler.
        names = [name for name in state if not name.startswith("_") and name not in ("last_epoch", "base_lrs")]
        self._note("schedulers", [_values_of({name: state[name] for name in names})])

    def _note(self, kind: str, groups: list[Values]) -> None:
        self._script[kind].append(groups)
        self.begun[kind].append(copy.deepcopy(groups))

    def restored(self, saved: Begun, source: HyperparameterSource) -> list[str]:
        """Apply the chosen values after a checkpoint was loaded. Returns the lines to print, one per change.

        saved: the checkpoint's `begun`.
        """
        changes = [
            Change(kind, number, group, name, old[name], new[name])
            for kind, given in self._script.items()
            for number, (before, now) in enumerate(zip(saved.get(kind, ()), given, strict=False))
            for group, (old, new) in enumerate(zip(before, now, strict=False))
            for name in new
            if name in old and old[name] != new[name]
        ]
        self.begun = copy.deepcopy(self._script)
        if source == "script":
            self._use_script(changes)
        else:
            for one in changes:
                self.begun[one.kind][one.number][one.group][one.name] = one.saved
        return [self._line(alike, source) for alike in _in_several_groups(changes)]

    def _use_script(self, changes: Sequence[Change]) -> None:
        """Set the script's values, and advance the script's schedules from their start to the current step."""
        for one in changes:
            if one.kind == "optimizers":
                group = self._optimizers[one.number].param_groups[one.group]
                group[one.name] = _like(group[one.name], one.own)
        changed = {self._optimizers[one.number] for one in changes if one.kind == "optimizers"}
        changed |= {self._schedulers[one.number][0].optimizer for one in changes if one.kind == "schedulers"}
        for optimizer in changed:
            schedulers = [(one, fresh) for one, fresh in self._schedulers if one.optimizer is optimizer]
            if not schedulers:
                continue
            initial = self._script["optimizers"][self._optimizers.index(optimizer)]
            for group, given in zip(optimizer.param_groups, initial, strict=False):  # the schedule's initial values
                for name, value in given.items():
                    group[name] = _like(group[name], value)
            for scheduler, fresh in schedulers:
                steps = _steps(scheduler.state_dict())
                scheduler.load_state_dict(copy.deepcopy(fresh))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch would warn that no optimizer step came first
                    for _ in range(steps):
                        self._allow(scheduler.step)

    def _line(self, alike: Sequence[Change], source: HyperparameterSource) -> str:
        one = alike[0]
        several = len(self._script[one.kind]) > 1
        of = f" of {one.kind[:-1]} {one.number}" if several or one.kind == "schedulers" else ""
        groups = [change.group for change in alike]
        if len(self._script[one.kind][one.number]) > 1:
            of += f" (param group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))})"
        if source == "script":
            return f"using {one.name}={one.own}{of} from this script (the checkpoint has {one.saved})."
        return (
            f"using {one.name}={one.saved}{of} from the checkpoint (this script has {one.own}). To use the script's "
            "value: run.restore(directory, hyperparameters='script')."
        )


def check_source(value: str) -> None:
    """Raises SettingError unless the value is "checkpoint" or "script"."""
    if value not in ("checkpoint", "script"):
        raise SettingError(
            f"run.restore(hyperparameters={value!r}): write 'checkpoint' (the default) to continue with the "
            "checkpoint's learning rate and other optimizer options, or 'script' to use this script's."
        )


def _in_several_groups(changes: Iterable[Change]) -> list[list[Change]]:
    """Group the changes that differ only in their param group."""
    found: dict[Any, list[Change]] = {}
    for one in changes:
        found.setdefault((one.kind, one.number, one.name, str(one.saved), str(one.own)), []).append(one)
    return list(found.values())


def _values_of(values: dict[str, Any]) -> Values:
    """The entries of a param group or a schedule that are numbers, strings or lists of numbers."""
    found: Values = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.item()
        elif isinstance(value, (tuple, list)) and all(isinstance(item, (int, float)) for item in value):
            found[name] = [float(item) for item in value]
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
    return found


def _like(current: Any, value: Any) -> Any:
    """Convert a plain value to the type of the current value: a tensor or a tuple."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(value, list) else value


def _steps(state: dict[str, Any]) -> int:
    """The number of steps in a scheduler's state. A chain has no count, but lists the states of its members."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    members = (part for value in state.values() if isinstance(value, list) for part in value if isinstance(part, dict))
    return max(map(_steps, members), default=0)
