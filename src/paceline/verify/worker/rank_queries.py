"""What a script asks for its rank and the number of processes, and what it is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.observe.patching import Patches
from paceline.observe.script_stack import Owner, Place, anywhere
from paceline.run import Run
from paceline.world import World

# Files that stand between a script and what it asks for.
_BETWEEN = ("os.py", "_collections_abc.py", "distributed_c10d.py", os.path.basename(__file__))
_ENVIRONMENT_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_WORLD_OF_ONE: dict[str, Any] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1}


def _script_call_site() -> Place | None:
    """The line of the user's script that asks. None where a library asks for itself."""
    files = ((f.f_code.co_filename, f.f_lineno) for f in anywhere.frames(*Owner))
    asks = (at for at in files if not at[0].startswith("<") and os.path.basename(at[0]) not in _BETWEEN)
    at = next(asks, None)
    return at if at is not None and anywhere.owns(at[0]) else None


class RankQueries:
    """Notes each time that a script asks for its rank or for the number of processes.

    told_alone: the script gets the answers of a process that is alone, while Paceline goes on with the real ones.
    """

    def __init__(self, run: Run, told_alone: bool, note: Callable[[Place], None], patches: Patches) -> None:
        self._told_alone, self._note = told_alone, note
        real = run.world
        run.world = _WatchedWorld(replace(real, **_WORLD_OF_ONE) if told_alone else real, self._note_query)  # type: ignore
        run.__class__ = self._watched_class(run.__class__)
        for name, answer in (("get_rank", 0), ("get_world_size", 1)):
            patches.replace(torch.distributed, name, self._watched_function(getattr(torch.distributed, name), answer))
        environ = os.environ.__class__
        get = environ.__getitem__

        def read(own: Any, key: str) -> str:
            if key in _ENVIRONMENT_OF_ONE and (at := _script_call_site()) is not None:
                note(at)
                if told_alone:
                    return _ENVIRONMENT_OF_ONE[key]
            return get(own, key)

        patches.replace(environ, "__getitem__", read)

    def _note_query(self) -> None:
        if (at := _script_call_site()) is not None:
            self._note(at)

    def _watched_class(self, kind: Any) -> Any:
        """A subclass of the class of the run, with watched properties."""
        asked = self

        def main(self: Any) -> bool:
            at = _script_call_site()
            if at is not None:
                asked._note(at)
            return (asked._told_alone and at is not None) or bool(kind.main.fget(self))

        def number(name: str, answer: int) -> property:
            def get(self: Any) -> int:
                at = _script_call_site()
                if at is not None:
                    asked._note(at)
                return answer if asked._told_alone and at is not None else int(getattr(kind, name).fget(self))

            return property(get)

        numbers = {"rank": 0, "local_rank": 0, "world_size": 1}
        properties = {name: number(name, answer) for name, answer in numbers.items()}
        return type(kind.__name__, (kind,), {"main": property(main), **properties})

    def _watched_function(self, function: Callable[..., int], answer: int) -> Callable[..., int]:
        """In the place of a function of torch.distributed."""

        def asked(*args: Any, **options: Any) -> int:
            if (at := _script_call_site()) is None:
                return function(*args, **options)
            self._note(at)
            return answer if self._told_alone else function(*args, **options)

        return asked


class _WatchedWorld:
    """A World that notes when the script reads it."""

    def __init__(self, world: World, ask: Callable[[], None]) -> None:
        self._world, self._note_query = world, ask

    def __getattr__(self, name: str) -> Any:
        if name in _WORLD_OF_ONE:
            self._note_query()
        return getattr(self._world, name)
