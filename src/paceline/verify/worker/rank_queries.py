"""The script's queries of its rank and of the world size, and the answers to them."""

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

# Files that may be on the stack between the script's line and the function or variable that it queries.
_BETWEEN = ("os.py", "_collections_abc.py", "distributed_c10d.py", os.path.basename(__file__))
_ENVIRONMENT_OF_ONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
_WORLD_OF_ONE: dict[str, Any] = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "node": 0, "nodes": 1}


def _script_call_site() -> Place | None:
    """The line of the user's script that makes the query; None if a library makes it."""
    files = ((f.f_code.co_filename, f.f_lineno) for f in anywhere.frames(*Owner))
    asks = (at for at in files if not at[0].startswith("<") and os.path.basename(at[0]) not in _BETWEEN)
    at = next(asks, None)
    return at if at is not None and anywhere.owns(at[0]) else None


class RankQueries:
    """Records each query of the script for its rank or the world size.

    rank_0_of_1: report rank 0 of 1 to the script. Paceline still uses the real values.
    """

    def __init__(self, run: Run, rank_0_of_1: bool, note: Callable[[Place], None], patches: Patches) -> None:
        self._rank_0_of_1, self._note = rank_0_of_1, note
        real = run.world
        run.world = _WatchedWorld(replace(real, **_WORLD_OF_ONE) if rank_0_of_1 else real, self._note_query)  # type: ignore
        run.__class__ = self._watched_class(run.__class__)
        for name, answer in (("get_rank", 0), ("get_world_size", 1)):
            patches.replace(torch.distributed, name, self._watched_function(getattr(torch.distributed, name), answer))
        environ = os.environ.__class__
        get = environ.__getitem__

        def read(own: Any, key: str) -> str:
            if key in _ENVIRONMENT_OF_ONE and (at := _script_call_site()) is not None:
                note(at)
                if rank_0_of_1:
                    return _ENVIRONMENT_OF_ONE[key]
            return get(own, key)

        patches.replace(environ, "__getitem__", read)

    def _note_query(self) -> None:
        if (at := _script_call_site()) is not None:
            self._note(at)

    def _watched_class(self, kind: Any) -> Any:
        """Make a subclass of the run's class with properties that record queries."""
        asked = self

        def main(self: Any) -> bool:
            at = _script_call_site()
            if at is not None:
                asked._note(at)
            return (asked._rank_0_of_1 and at is not None) or bool(kind.main.fget(self))

        def number(name: str, answer: int) -> property:
            def get(self: Any) -> int:
                at = _script_call_site()
                if at is not None:
                    asked._note(at)
                return answer if asked._rank_0_of_1 and at is not None else int(getattr(kind, name).fget(self))

            return property(get)

        numbers = {"rank": 0, "local_rank": 0, "world_size": 1}
        properties = {name: number(name, answer) for name, answer in numbers.items()}
        return type(kind.__name__, (kind,), {"main": property(main), **properties})

    def _watched_function(self, function: Callable[..., int], answer: int) -> Callable[..., int]:
        """Make a replacement for a function of torch.distributed that records queries."""

        def asked(*args: Any, **options: Any) -> int:
            if (at := _script_call_site()) is None:
                return function(*args, **options)
            self._note(at)
            return answer if self._rank_0_of_1 else function(*args, **options)

        return asked


class _WatchedWorld:
    """A World that reports when the script reads it."""

    def __init__(self, world: World, ask: Callable[[], None]) -> None:
        self._world, self._note_query = world, ask

    def __getattr__(self, name: str) -> Any:
        if name in _WORLD_OF_ONE:
            self._note_query()
        return getattr(self._world, name)
