"""Hyperparameters of optimizers and schedules in a restored run: the script's or the checkpoint's.

A checkpoint holds two of each: the value at hand, which a schedule may have changed, and the value with which training
began. Only the latter tells whether the script was changed since. Then either the checkpoint's goes on, and a line says
so; or the script's does, and its schedule is moved on by as many steps as the checkpoint's had made.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from paceline.errors import SettingError

Whose = Literal["checkpoint", "script"]
Values = dict[str, Any]  # name -> value
Begun = dict[str, Any]  # {"optimizers": [[values of each param group], ...], "schedulers": [values, ...]}


class Change(NamedTuple):
    """A hyperparameter of the script that is another than that with which the checkpoint's training began."""

    kind: str  # "optimizers" or "schedulers"
    number: int  # of the optimizer or scheduler
    group: int  # of its param groups
    name: str
    saved: Any
    own: Any


class Hyperparameters:
    """Of all prepared optimizers and schedulers. allow: calls a function that may step a scheduler (guards.py)."""

    def __init__(self, allow: Callable[[Callable[[], object]], object]) -> None:
        self._allow = allow
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[tuple[Any, dict[str, Any]]] = []  # with their states at `prepare`
        self._own: Begun = {"optimizers": [], "schedulers": []}  # as the script gave them
        self.begun: Begun = {"optimizers": [], "schedulers": []}  # with which training began

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        self._note("optimizers", [_values_of(group) for group in optimizer.param_groups])

    def add_scheduler(self, scheduler: Any) -> None:
        state = scheduler.state_dict()
        self._schedulers.append((scheduler, copy.deepcopy(state)))
        # Its rates and counters follow from the optimizer's, and are no settings of its own.
        names = [name for name in state if not name.startswith("_") and name not in ("last_epoch", "base_lrs")]
        self._note("schedulers", [_values_of({name: state[name] for name in names})])

    def _note(self, kind: str, groups: list[Values]) -> None:
        self._own[kind].append(groups)
        self.begun[kind].append(copy.deepcopy(groups))

    def restored(self, saved: Begun, whose: Whose) -> list[str]:
        """After a checkpoint was loaded, of which `saved` is `begun`. Returns what to print: a line for each change."""
        changes = [
            Change(kind, number, place, name, old[name], new[name])
            for kind, own in self._own.items()
            for number, (before, now) in enumerate(zip(saved.get(kind, ()), own, strict=False))
            for place, (old, new) in enumerate(zip(before, now, strict=False))
            for name in new
            if name in old and old[name] != new[name]
        ]
        self.begun = copy.deepcopy(self._own)
        if whose == "script":
            self._keep_own(changes)
        else:
            for one in changes:
                self.begun[one.kind][one.number][one.group][one.name] = one.saved
        return [self._line(alike, whose) for alike in _in_several_groups(changes)]

    def _keep_own(self, changes: Sequence[Change]) -> None:
        """The script's values, and schedules from their beginning to the step at hand."""
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
            own = self._own["optimizers"][self._optimizers.index(optimizer)]
            for group, given in zip(optimizer.param_groups, own, strict=False):  # where the schedule begins
                for name, value in given.items():
                    group[name] = _like(group[name], value)
            for scheduler, fresh in schedulers:
                steps = _steps(scheduler.state_dict())
                scheduler.load_state_dict(copy.deepcopy(fresh))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that no update comes before each: those were made long ago
                    for _ in range(steps):
                        self._allow(scheduler.step)

    def _line(self, alike: Sequence[Change], whose: Whose) -> str:
        one = alike[0]
        several = len(self._own[one.kind]) > 1
        of = f" of {one.kind[:-1]} {one.number}" if several or one.kind == "schedulers" else ""
        groups = [change.group for change in alike]
        if len(self._own[one.kind][one.number]) > 1:
            of += f" (param group{'s' * (len(groups) > 1)} {', '.join(map(str, groups))})"
        if whose == "script":
            return f"{one.name}={one.own}{of} is this script's, in place of {one.saved} in the checkpoint."
        return (
            f"{one.name}={one.saved}{of} is the checkpoint's, in place of {one.own} in this script. To go on with the "
            "script's: run.restore(directory, hyperparameters='script')."
        )


def check_whose(value: str) -> None:
    """Raises SettingError for what is neither."""
    if value not in ("checkpoint", "script"):
        raise SettingError(
            f"run.restore(hyperparameters={value!r}): 'checkpoint' (the default) goes on with the learning rate and "
            "the other options of optimizers that the checkpoint has, 'script' with those that this script gives."
        )


def _in_several_groups(changes: Iterable[Change]) -> list[list[Change]]:
    """The changes that differ in their param group alone, together."""
    found: dict[Any, list[Change]] = {}
    for one in changes:
        found.setdefault((one.kind, one.number, one.name, str(one.saved), str(one.own)), []).append(one)
    return list(found.values())


def _values_of(values: dict[str, Any]) -> Values:
    """What of a param group or a schedule is a number, a text or a few numbers."""
    found: Values = {}
    for name, value in values.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.item()
        elif isinstance(value, (tuple, list)) and all(isinstance(item, (int, float)) for item in value):
            found[name] = [float(item) for item in value]
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[name] = value
    return found


def _like(there: Any, value: Any) -> Any:
    """A plain value in the form of the one that is there."""
    if isinstance(there, Tensor):
        return torch.full_like(there, value)
    return tuple(value) if isinstance(value, list) else value


def _steps(state: dict[str, Any]) -> int:
    """How many steps a scheduler has made. A chain has no count, and lists the states of its members."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    members = (part for value in state.values() if isinstance(value, list) for part in value if isinstance(part, dict))
    return max(map(_steps, members), default=0)
