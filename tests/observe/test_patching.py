"""Functions that are watched, and put back."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import pytest

from paceline.observe.patching import Patches


class Base:
    def double(self, number: int) -> int:
        """Twice the number."""
        if number < 0:
            raise ValueError("negative")
        return 2 * number


class Derived(Base):
    pass


def watching(seen: list[Any]) -> Any:
    def watch(_: Any, number: int) -> Generator[None, Any, None]:
        if number == 7:
            return  # of no interest
        seen.append(number)
        try:
            seen.append((yield))
        except ValueError as error:
            seen.append(str(error))

    return watch


def test_a_watch_sees_arguments_results_and_errors_and_changes_nothing() -> None:
    seen: list[Any] = []
    patches = Patches()
    original = Base.double
    patches.around(Base, "double", watching(seen))
    assert [Base().double(3), Base().double(7)] == [6, 14]
    with pytest.raises(ValueError, match="negative") as raised:
        Base().double(-1)
    assert "watch" not in [entry.name for entry in raised.traceback]  # the observer's lines are no part of it
    assert seen == [3, 6, -1, "negative"]
    assert (Base.double.__doc__, inspect.signature(Base.double)) == (original.__doc__, inspect.signature(original))
    patches.undo()
    assert Base.double is original
    assert Base().double(3) == 6
    assert len(seen) == 4


def test_an_inherited_function_is_inherited_again_and_the_last_patch_goes_first() -> None:
    patches = Patches()
    seen: list[str] = []
    patches.before(Derived, "double", lambda *_: seen.append("inner"))
    patches.after(Derived, "double", lambda *_: seen.append("after"))
    assert Derived().double(1) == Base().double(1) == 2
    assert seen == ["inner", "after"]
    patches.undo()
    assert "double" not in vars(Derived)


def test_nothing_is_watched_while_nothing_is_active() -> None:
    seen: list[Any] = []
    patches = Patches(active=lambda: False)
    patches.around(Base, "double", watching(seen))
    assert Base().double(2) == 4
    patches.undo()
    assert seen == []
