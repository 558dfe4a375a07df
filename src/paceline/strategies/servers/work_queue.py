"""The first server's books: which worker computes which chunk. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.data.batch_plan import Chunk


@dataclass
class PassQueue:
    """The chunks of one pass over the data, handed out as workers come free.

    A chunk is free, in flight (one worker computes it), or finished. It is finished once. One that a worker
    gives back is free again, and is handed out before those that no worker had yet.
    """

    first: int  # the step at which the pass begins
    steps: int  # where it ends
    shards: int  # chunks of each global batch
    returned: deque[Chunk] = field(default_factory=deque)  # free ones that a worker had
    in_flight: dict[Chunk, int] = field(default_factory=dict)  # -> worker
    finished: set[Chunk] = field(default_factory=set)
    _next: int = 0  # number of the next chunk that no worker had yet

    @property
    def chunks(self) -> int:
        return max(0, self.steps - self.first) * self.shards

    @property
    def over(self) -> bool:
        return len(self.finished) == self.chunks

    def hand_out(self, worker: int) -> Chunk | None:
        """A free chunk; None where there is none now."""
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
        """These chunks of the worker (None: all) are free again."""
        theirs = sorted(chunk for chunk, who in self.in_flight.items() if who == worker)
        for chunk in reversed(theirs if chunks is None else [chunk for chunk in chunks if chunk in theirs]):
            del self.in_flight[chunk]
            self.returned.appendleft(chunk)
