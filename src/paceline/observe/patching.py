"""Replace functions, and restore them later. Importing this module does not import torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

Function = Callable[..., Any]
Watch = Callable[..., Generator[None, Any, None]]


class Patches:
    """Replaces functions, and restores them.

    Args:
        active: returns whether calls are observed now. If not, `around`, `before` and `after` only make the call.
        guard: a context for the observer's code, for example to measure its time and catch its errors.
    """

    def __init__(
        self,
        active: Callable[[], bool] = lambda: True,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._active, self._guard = active, guard
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Set `owner.name` to this function."""
        own = name in vars(owner)  # otherwise it is inherited
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)) if own else partial(delattr, owner, name))
        setattr(owner, name, function)

    def wrap(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Set `owner.name` to `make(original)`, with the name, docstring and signature of the original."""
        original = getattr(owner, name)
        made = make(original)
        vars(made).update({k: v for k, v in getattr(original, "__dict__", {}).items() if k not in vars(made)})
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(original, attribute):
                setattr(made, attribute, getattr(original, attribute))
        made.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature reads it
        self.replace(owner, name, made)

    def around(self, owner: Any, name: str, watch: Watch) -> None:
        """Observe the calls of `owner.name`.

        `watch` is a generator function that takes the arguments of a call. Its code before the `yield` runs before the
        call. The `yield` returns the result of the call, or raises its error, and the code after the `yield` runs after
        the call. A generator that ends before its `yield` ignores the call.
        """
        from torch import compiler  # the script has imported torch by now

        def make(original: Function) -> Function:
            def function(*args: Any, **options: Any) -> Any:
                if compiler.is_compiling() or not self._active():
                    return original(*args, **options)
                call: Generator[None, Any, None] | None = None
                with self._guard():
                    begun = watch(*args, **options)
                    call = begun if next(begun, self) is not self else None
                if call is None:  # the generator ignores this call
                    return original(*args, **options)
                try:
                    result = original(*args, **options)
                except BaseException as error:
                    own = error.__traceback__  # without the observer's lines, which `throw` adds
                    with self._guard(), contextlib.suppress(type(error), StopIteration):
                        call.throw(error)
                    error.__traceback__ = own
                    raise
                with self._guard(), contextlib.suppress(StopIteration):
                    call.send(result)
                return result

            return function

        self.wrap(owner, name, make)

    def before(self, owner: Any, name: str, record: Callable[..., None]) -> None:
        """Before each call of `owner.name`, call `record` with the same arguments."""

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            record(*args, **options)
            yield from ()  # nothing to do after the call

        self.around(owner, name, watch)

    def after(self, owner: Any, name: str, record: Callable[..., None]) -> None:
        """After each successful call of `owner.name`, call `record` with the same arguments."""

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            yield
            record(*args, **options)

        self.around(owner, name, watch)

    def undo(self) -> None:
        """Restore all originals."""
        while self._undo:
            self._undo.pop()()
