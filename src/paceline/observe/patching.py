"""Functions in the place of others, until they are put back. Imports no torch by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

Function = Callable[..., Any]
Watch = Callable[..., Generator[None, Any, None]]


class Patches:
    """Replaced functions.

    Args:
        active: Is something observed now? Otherwise `around`, `before` and `after` do nothing.
        guard: A context for the code of the observer, such as one that measures its time and keeps its errors.
    """

    def __init__(
        self,
        active: Callable[[], bool] = lambda: True,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._active, self._guard = active, guard
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, function: Any) -> None:
        """Put `function` at `owner.name`, as it is."""
        own = name in vars(owner)  # or else it is inherited
        self._undo.append(partial(setattr, owner, name, getattr(owner, name)) if own else partial(delattr, owner, name))
        setattr(owner, name, function)

    def wrap(self, owner: Any, name: str, make: Callable[[Function], Function]) -> None:
        """Put `make(the original)` at `owner.name`, with the original's name, documentation and signature."""
        original = getattr(owner, name)
        made = make(original)
        vars(made).update({k: v for k, v in getattr(original, "__dict__", {}).items() if k not in vars(made)})
        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            if hasattr(original, attribute):
                setattr(made, attribute, getattr(original, attribute))
        made.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature reads it
        self.replace(owner, name, made)

    def around(self, owner: Any, name: str, watch: Watch) -> None:
        """Watch the calls of `owner.name`.

        `watch` is a generator function that takes the arguments of a call. Its code before the `yield` runs before the
        call. `yield` gives the result, or raises the error of the call, and the rest runs after the call. A generator
        that ends before its `yield` takes no interest in this call.
        """
        from torch import compiler  # the script has imported torch by now

        def make(original: Function) -> Function:
            def function(*args: Any, **options: Any) -> Any:
                if compiler.is_compiling() or not self._active():
                    return original(*args, **options)
                call, interested = watch(*args, **options), False
                with self._guard():
                    interested = next(call, self) is not self
                if not interested:
                    return original(*args, **options)
                try:
                    result = original(*args, **options)
                except BaseException as error:
                    own = error.__traceback__  # without the lines of the observer, which `throw` adds
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
        """Call `record` with the arguments of each call of `owner.name`, before it."""

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            record(*args, **options)
            yield from ()  # after the call there is nothing to do

        self.around(owner, name, watch)

    def after(self, owner: Any, name: str, record: Callable[..., None]) -> None:
        """Call `record` with the arguments of each call of `owner.name` that raises nothing, after it."""

        def watch(*args: Any, **options: Any) -> Generator[None, Any, None]:
            yield
            record(*args, **options)

        self.around(owner, name, watch)

    def undo(self) -> None:
        """Put all originals back."""
        while self._undo:
            self._undo.pop()()
