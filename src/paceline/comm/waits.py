"""The functions that block on other processes, so that a tool can separate waiting from computing.

Register such a function where it is defined. This costs nothing until a tool calls `watch`, which wraps the listed
functions. Only `trace` and `balance` do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=type)
Watcher = Callable[[bool], None]
"""Called with True before a wait, and with False after it, in the waiting thread."""

WAITS: list[tuple[Any, str]] = []
"""(class, method name), in the order in which the modules were loaded."""

_watchers: list[Watcher] = []
_wrapped = contextlib.ExitStack()
_waiting: set[int] = set()  # the threads that are in a wait


def waits(*names: str) -> Callable[[C], C]:
    """Class decorator: adds these methods to the list."""

    def note(cls: C) -> C:
        WAITS.extend((cls, name) for name in names)
        return cls

    return note


def watch(watcher: Watcher) -> Callable[[], None]:
    """Call `watcher` around each wait, and return a function that ends that. A wait within a wait is not reported."""
    if not _watchers:
        for owner, name in WAITS:
            _wrap(owner, name)
    _watchers.append(watcher)

    def end() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
            if not _watchers:
                _wrapped.close()

    return end


def _wrap(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    own = name in vars(owner)

    @functools.wraps(original)
    def watched(*args: Any, **options: Any) -> Any:
        thread = threading.get_ident()
        if thread in _waiting:
            return original(*args, **options)
        _waiting.add(thread)
        try:
            for watcher in _watchers:
                watcher(True)
            return original(*args, **options)
        finally:
            _waiting.discard(thread)
            for watcher in _watchers:
                watcher(False)

    setattr(owner, name, watched)
    if own:
        _wrapped.callback(setattr, owner, name, original)
    else:
        _wrapped.callback(delattr, owner, name)
