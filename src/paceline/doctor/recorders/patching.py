"""Replacing functions: at once, or when the script imports their module, which is not imported earlier for that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.launcher.import_hook import after_import as after_import  # for the recorders, beside the other two

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
