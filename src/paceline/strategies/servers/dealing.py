"""What the first server keeps of the workers: who takes part in an exchange, and who computes which part. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Part = tuple[int, int]
"""(step in the epoch, shard of its global batch)."""


@dataclass
class Deals:
    """One pass over the data in parts, handed out as workers come free.

    A part is free, in flight (with one worker), or done. It is done once. That of a worker that is lost is free again,
    and comes before those that nobody had yet.
    """

    first: int
    steps: int
    shards: int
    free: deque[Part] = field(default_factory=deque)  # given back
    flight: dict[Part, int] = field(default_factory=dict)  # -> worker
    finished: set[Part] = field(default_factory=set)
    _next: int = 0  # of those that nobody had yet

    @property
    def parts(self) -> int:
        return max(0, self.steps - self.first) * self.shards

    @property
    def over(self) -> bool:
        return len(self.finished) == self.parts

    def take(self, worker: int) -> Part | None:
        """A part that is free now; None where there is none."""
        if self.free:
            part = self.free.popleft()
        elif self._next < self.parts:
            part = (self.first + self._next // self.shards, self._next % self.shards)
            self._next += 1
        else:
            return None
        self.flight[part] = worker
        return part

    def done(self, worker: int, parts: Iterable[Part]) -> None:
        for part in parts:
            if self.flight.get(part) == worker:
                del self.flight[part]
                self.finished.add(part)

    def give_back(self, worker: int, parts: Iterable[Part] | None = None) -> None:
        """These parts, or all that the worker has, are free again."""
        theirs = sorted(part for part, who in self.flight.items() if who == worker)
        for part in reversed(theirs if parts is None else [part for part in parts if part in theirs]):
            del self.flight[part]
            self.free.appendleft(part)


@dataclass
class Exchanges:
    """Exchanges under way: number -> worker -> its bytes. One is complete when every living worker has come."""

    under_way: dict[int, dict[int, list[Any]]] = field(default_factory=dict)

    def came(self, number: int, worker: int, frames: list[Any]) -> None:
        self.under_way.setdefault(number, {})[worker] = frames

    def complete(self, alive: set[int]) -> list[tuple[int, dict[int, list[Any]]]]:
        """Those that are complete now, which are then forgotten. A worker that has come and died since is in it."""
        ready = [(number, came) for number, came in sorted(self.under_way.items()) if alive <= came.keys()]
        for number, _ in ready:
            del self.under_way[number]
        return ready
