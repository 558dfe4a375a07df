"""Which lines are the user's script; and what a script is told of its rank and of the number of processes."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch

from paceline.run import Run
from paceline.trial.plain import Patches
from paceline.world import World

_PACELINE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(
    {os.path.realpath(sysconfig.get_paths()[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(torch.__file__))) + os.sep}
)
_TRIAL = {"recorder.py", "kept.py", "watched.py", "collated.py"}  # what they compute is not the script's
_TOLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_STAND: dict[str, Any] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1}

Place = tuple[str, int]
"""(file, line), from 1."""


@lru_cache(maxsize=4096)
def kind_of(file: str) -> str:
    """ "own": the user's; "paceline"; or "library"."""
    path = os.path.realpath(file)
    if file.startswith("<") or path.startswith(_LIBRARIES) or "site-packages" in path:
        return "library"
    return "paceline" if path.startswith(_PACELINE) else "own"


def place(recorded: bool = False) -> tuple[Place | None, bool]:
    """(the innermost line of the user's that is being run; whether Paceline was called by it, and runs). Of what the
    recorder computes for itself there is none; recorded: it is it that asks, for the line that has called it."""
    inside = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = kind_of(frame.f_code.co_filename)
        if kind == "own":
            return (frame.f_code.co_filename, frame.f_lineno), inside
        if kind == "paceline":
            name = os.path.basename(frame.f_code.co_filename)
            if f"{os.sep}trial{os.sep}" not in frame.f_code.co_filename:
                inside = True
            elif not inside and not recorded and name in _TRIAL:
                return None, True
        frame = frame.f_back
    return None, inside


def _asks() -> Place | None:
    """Where the user's script asks, if it is it that asks, and no library for itself."""
    frame: FrameType | None = sys._getframe(2)
    own = (os.__file__, __file__)
    while frame is not None and (
        frame.f_code.co_filename in own
        or frame.f_code.co_filename.startswith("<")
        or os.path.basename(frame.f_code.co_filename) in ("_collections_abc.py", "distributed_c10d.py")
    ):
        frame = frame.f_back
    if frame is None or kind_of(frame.f_code.co_filename) != "own":
        return None
    return frame.f_code.co_filename, frame.f_lineno


class Asked:
    """What a script asks for its rank and the number of processes: each time is noted. told: it gets the answers of a
    process that is alone, while Paceline goes on with its own."""

    def __init__(self, run: Run, told: bool, note: Callable[[Place], None], patches: Patches) -> None:
        self._told, self._note = told, note
        real = run.world
        run.world = _Noted(replace(real, **_STAND) if told else real, self._ask)  # type: ignore
        run.__class__ = self._class(run.__class__)
        for name, answer in (("get_rank", 0), ("get_world_size", 1)):
            patches.put(torch.distributed, name, self._instead(getattr(torch.distributed, name), answer))
        environ = os.environ.__class__
        get = environ.__getitem__

        def read(own: Any, key: str) -> str:
            if key in _TOLD and (at := _asks()) is not None:
                note(at)
                if told:
                    return _TOLD[key]
            return get(own, key)

        patches.put(environ, "__getitem__", read)

    def _ask(self) -> None:
        if (at := _asks()) is not None:
            self._note(at)

    def _class(self, kind: Any) -> Any:
        asked = self

        def main(self: Any) -> bool:
            at = _asks()
            if at is not None:
                asked._note(at)
            return (asked._told and at is not None) or bool(kind.main.fget(self))

        def number(name: str, answer: int) -> property:
            def get(self: Any) -> int:
                at = _asks()
                if at is not None:
                    asked._note(at)
                return answer if asked._told and at is not None else int(getattr(kind, name).fget(self))

            return property(get)

        numbers = {"rank": 0, "local_rank": 0, "world_size": 1}
        properties = {name: number(name, answer) for name, answer in numbers.items()}
        return type(kind.__name__, (kind,), {"main": property(main), **properties})

    def _instead(self, function: Callable[..., int], answer: int) -> Callable[..., int]:
        def asked(*args: Any, **options: Any) -> int:
            if (at := _asks()) is None:
                return function(*args, **options)
            self._note(at)
            return answer if self._told else function(*args, **options)

        return asked


class _Noted:
    """A World whose reader is noted."""

    def __init__(self, world: World, ask: Callable[[], None]) -> None:
        self._world, self._ask = world, ask

    def __getattr__(self, name: str) -> Any:
        if name in _STAND:
            self._ask()
        return getattr(self._world, name)
