"""Replacing functions: at once, or when the script imports their module, which is not imported earlier for that."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.doctor.recorders.event_log import EventLog


def patch(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `owner.name` by `make(the original)`, which gets the original's name, documentation and signature."""
    original = getattr(owner, name)
    made = make(original)
    vars(made).update({k: v for k, v in getattr(original, "__dict__", {}).items() if k not in vars(made)})
    for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
        if hasattr(original, attribute):
            setattr(made, attribute, getattr(original, attribute))
    made.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature reads it
    setattr(owner, name, made)


def call_before(log: EventLog, owner: Any, name: str, record: Callable[..., None]) -> None:
    """Patch `owner.name`: before each call, `record` is called with its arguments."""
    _call_around(log, owner, name, record, lambda *_, **__: None)


def call_after(log: EventLog, owner: Any, name: str, record: Callable[..., None]) -> None:
    """Patch `owner.name`: after each call that raises nothing, `record` is called with its arguments."""
    _call_around(log, owner, name, lambda *_, **__: None, record)


def _call_around(log: EventLog, owner: Any, name: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    from torch import compiler  # the script has imported torch by now

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **options: Any) -> Any:
            if compiler.is_compiling() or not log.active:
                return original(*args, **options)
            with log.overhead():
                before(*args, **options)
            result = original(*args, **options)
            with log.overhead():
                after(*args, **options)
            return result

        return function

    patch(owner, name, make)


class AfterImport(importlib.abc.MetaPathFinder):
    """A finder of one module, which finds it as Python does and calls `then(module)` when it has been executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute, then = spec.loader.exec_module, self._then

        def exec_module(module: ModuleType) -> None:
            execute(module)
            then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one spec
        return spec


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` as soon as the script has imported it; at once if it has."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, AfterImport(name, then))
