"""A worker's connections to the servers: requests, and chunks of the data to compute."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import wire
from paceline.comm.sockets import Line
from paceline.comm.waits import waits
from paceline.data.batch_plan import Chunk, Queue
from paceline.errors import WorldError

ANSWER_SECONDS = 1800.0
"""Timeout for an answer, the same as that of torch's process groups. A server may wait for other workers before it
answers."""

Request = tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]


@waits("ask")
class Links:
    """One connection to each server."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = list(lines)

    def ask(self, requests: Mapping[int, Request]) -> dict[int, tuple[dict[str, Any], dict[str, Tensor]]]:
        """Send requests to several servers at once, and return their answers. Raises WorldError if a server or another
        worker is lost."""
        for server, (header, tensors) in requests.items():
            self.lines[server].send(wire.pack(header, tensors))
        return {server: wire.unpack(self._answer(self.lines[server])) for server in requests}

    def ask_first(self, header: dict[str, Any]) -> dict[str, Any]:
        """Ask the first server."""
        return self.ask({0: (header, ())})[0][0]

    def send_all(self, header: dict[str, Any]) -> None:
        """Send all servers a message that has no answer."""
        for line in self.lines:
            line.send(wire.pack(header))

    def _answer(self, line: Line) -> list[Any]:
        frames = line.receive(ANSWER_SECONDS)
        if frames is None:
            raise WorldError(
                f"{line.name} has not answered for {ANSWER_SECONDS:g} s. Check that all workers make the same calls."
            )
        header = wire.header_of(frames)
        if "error" in header:
            raise WorldError(header["error"])
        return frames

    def close(self) -> None:
        for line in self.lines:
            line.close()


class Chunks(Queue):
    """The chunks that this worker computes, assigned by the first server.

    at_end(begins): called by all workers at the beginning and at the end of a pass. pull(): gets the newest weights.
    steps(optimizer): the number of the optimizer's steps that this worker knows of.
    """

    def __init__(
        self,
        links: Links,
        at_end: Callable[[bool], None],
        pull: Callable[[], None],
        steps: Callable[[torch.optim.Optimizer], int],
    ) -> None:
        self._links, self._at_end, self._pull, self._steps = links, at_end, pull, steps
        self.counted: dict[torch.optim.Optimizer, int] = {}  # steps that `completed` has returned so far
        self._pushes: dict[int, int] = {}  # optimizer -> number of gradients of the current chunk
        self._empty = 0  # number of chunks without examples since the last request
        # For each pass, chunks to report with the next request: computed chunks, and chunks to assign again.
        self._done: dict[tuple[str, int], list[Chunk]] = {}
        self._back: dict[tuple[str, int], list[Chunk]] = {}
        # loader, epoch, step, shard of the current chunk; None outside of passes
        self.current: tuple[str, int, int, int] | None = None
        self.refused = False  # whether a gradient of the current chunk was too old

    def begin(self, loader: str, epoch: int, first: int, steps: int) -> None:
        self._done[loader, epoch], self._back[loader, epoch] = [], []
        self._links.ask_first({"op": "begin", "pass": [loader, epoch], "first": first, "steps": steps})
        self._at_end(True)

    def next_chunk(self, loader: str, epoch: int, wait: bool) -> Chunk | None:
        answer = self._links.ask_first(self._request((loader, epoch), wait=wait))
        if "chunk" in answer:
            if wait:  # the weights may be outdated after a long wait
                self._pull()
            step, shard = answer["chunk"]
            return step, shard
        if wait:
            self.current = None
            self._at_end(False)
        return None

    def _request(self, key: tuple[str, int], *, wait: bool = False, leave: bool = False) -> dict[str, Any]:
        """A request for a chunk, with a report on earlier chunks."""
        header = {"op": "chunk", "pass": key, "done": self._done[key], "back": self._back[key], "empty": self._empty}
        self._done[key], self._back[key], self._empty = [], [], 0
        return {**header, "wait": wait, "leave": leave}

    def started(self, loader: str, epoch: int, chunk: Chunk) -> None:
        self.current, self.refused = (loader, epoch, *chunk), False
        self._pushes.clear()

    def completed(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of global-batch-sized steps that all workers together have made since the last call."""
        before = self.counted.get(optimizer, 0)
        self.counted[optimizer] = now = max(before, self._steps(optimizer))
        return now - before

    def pushes(self, optimizer: int) -> int:
        """Count a gradient of the current chunk for this optimizer. Returns the number of earlier gradients."""
        before = self._pushes.get(optimizer, 0)
        self._pushes[optimizer] = before + 1
        return before

    def finished(self, loader: str, epoch: int, chunk: Chunk, empty: bool = False) -> None:
        """Record a computed chunk, for the next request."""
        report = self._back if self.refused and not empty else self._done
        report[loader, epoch].append(chunk)
        if empty:
            self._empty += 1
        else:
            self.refused = False

    def leave(self, loader: str, epoch: int) -> None:
        """Report that the script has left the loop: this worker's remaining chunks are free."""
        self.current = None
        with contextlib.suppress(WorldError):  # a dead server may be why the script leaves the loop
            self._links.ask_first(self._request((loader, epoch), leave=True))

    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        answer = self._links.ask_first({"op": "pool", "sums": dict(sums), "take": take})
        return {key: (top, bottom) for key, (top, bottom) in answer["sums"].items()}
