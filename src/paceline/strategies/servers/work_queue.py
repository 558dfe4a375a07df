"""The first server's record of chunks: which worker computes which chunk. No communication."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.data.batch_plan import Chunk


@dataclass
class PassQueue:
    """The chunks of one pass over the data, assigned to workers when they are free.

    A chunk is free, in flight (one worker computes it), or finished. A finished chunk stays finished. A returned chunk
    is free again, and is assigned before chunks that were never assigned.
    """

    first: int  # the first step of the pass
    steps: int  # the step after the last
    shards: int  # chunks of each global batch
    returned: deque[Chunk] = field(default_factory=deque)  # free chunks that were assigned before
    in_flight: dict[Chunk, int] = field(default_factory=dict)  # chunk -> worker
    finished: set[Chunk] = field(default_factory=set)
    _next: int = 0  # number of the next chunk that was never assigned

    @property
    def chunks(self) -> int:
        return max(0, self.steps - self.first) * self.shards

    @property
    def over(self) -> bool:
        return len(self.finished) == self.chunks

    def hand_out(self, worker: int) -> Chunk | None:
        """Assign a free chunk and return it; None if none is free."""
        if self.returned:
            chunk = self.returned.popleft()
        elif self._next < self.chunks:
            chunk = (self.first + self._next // self.shards, self._next % self.shards)
            self._next += 1
        else:
            return None
        self.in_flight[chunk] = worker
        return chunk

    def finish(self, worker: int, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if self.in_flight.get(chunk) == worker:
                del self.in_flight[chunk]
                self.finished.add(chunk)

    def give_back(self, worker: int, chunks: Iterable[Chunk] | None = None) -> None:
        """Make these chunks of the worker (None: all) free again."""
        theirs = sorted(chunk for chunk, who in self.in_flight.items() if who == worker)
        for chunk in reversed(theirs if chunks is None else [chunk for chunk in chunks if chunk in theirs]):
            del self.in_flight[chunk]
            self.returned.appendleft(chunk)
