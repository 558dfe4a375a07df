"""A worker's connections to the servers: requests, exchanges with the other workers, chunks of the data to compute."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import wire
from paceline.comm.channel import Channel, Phase
from paceline.comm.sockets import Line
from paceline.comm.waits import waits
from paceline.errors import UsageError, WorldError
from paceline.strategies.batch_plan import Chunk, Queue
from paceline.world import JOINED, tell_launcher

ANSWER_SECONDS = 600.0
"""How long a server may take for what it does at once: a large update."""

MEET_SECONDS = 1800.0
"""How long a worker waits for the others, as torch's process groups do."""

JOIN_SECONDS = 14 * 24 * 3600.0
"""How long a worker that joins waits to be admitted: in async until an epoch ends. A server that dies ends the wait."""

Request = tuple[dict[str, Any], Iterable[tuple[str, Tensor]]]


@waits("ask", "wait_first")
class Links:
    """One connection to each server. Workers meet at the first server."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = list(lines)

    def ask(self, requests: Mapping[int, Request]) -> dict[int, tuple[dict[str, Any], dict[str, Tensor]]]:
        """Each server's answer to its request; all compute and send at the same time."""
        for server, (header, tensors) in requests.items():
            self.lines[server].send(wire.pack(header, tensors))
        return {server: wire.unpack(self._answer(server, ANSWER_SECONDS)) for server in requests}

    def ask_first(self, header: dict[str, Any]) -> dict[str, Any]:
        return self.ask({0: (header, ())})[0][0]

    def wait_first(
        self, header: dict[str, Any], frames: Iterable[Any] = (), seconds: float = MEET_SECONDS
    ) -> list[Any]:
        """The first server's answer to a request that waits for other workers."""
        self.lines[0].send([*wire.pack(header), *frames])
        return self._answer(0, seconds)

    def send_all(self, header: dict[str, Any]) -> None:
        """Sends all servers a message that has no answer."""
        for line in self.lines:
            line.send(wire.pack(header))

    def _answer(self, server: int, seconds: float) -> list[Any]:
        line = self.lines[server]
        frames = line.receive(seconds)
        if frames is None and seconds == MEET_SECONDS:
            line.send(wire.pack({"op": "missing"}))
            frames = line.receive(5.0)
        if frames is None:
            raise WorldError(f"{line.name} has not answered for {seconds:g} s.")
        header = wire.header_of(frames)
        if "error" in header:
            raise WorldError(f"{line.name} refuses: {header['error']}.")
        if "missing" in header:
            ranks = ", ".join(map(str, header["missing"])) or "unknown"
            raise WorldError(
                f"this worker has waited {seconds:g} s for the worker(s) of rank {ranks}, which run but did not come. "
                "Do all workers make the same calls?"
            )
        return frames

    def close(self) -> None:
        for line in self.lines:
            line.close()


class Meetings(Channel):
    """The channel of the workers, through the first server.

    When a member dies its part of an exchange is lost. In training its shard is computed anew. Elsewhere, as in an
    evaluation, nobody can compute it: WorldError.

    welcome(): called at the beginning of a pass at which members were admitted. join(): admits this worker, which comes
    while the others are under way (rejoining.py); None in all other workers.
    """

    def __init__(
        self,
        links: Links,
        rank: int,
        members: Iterable[int],
        in_step: bool,
        *,
        welcome: Callable[[], None],
        join: Callable[[], None] | None = None,
    ) -> None:
        self._links, self._own, self.in_step = links, rank, in_step
        self.members = tuple(sorted(members))  # their ranks, ascending
        self.joined: tuple[int, ...] = ()  # those that were admitted at the last meeting
        self.updated = False  # whether an update was made since the last yield of a training loader
        self.number = 0  # of the last meeting
        self.open_loaders: list[str] = []  # the training loaders whose passes are under way
        self.to_open: list[str] = []  # in a worker that was admitted: the others' open loaders that it has yet to open
        self._welcome, self._join = welcome, join
        self._phase: Phase = "between"

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def rank(self) -> int:
        return self.members.index(self._own)

    def exchange(self, parts: Iterable[Any] = ()) -> list[memoryview]:
        self._check_arrived("a number over all processes was asked for (run.mean, run.sum, run.gather, run.save, ...)")
        if not self.in_step and self._phase == "training":
            raise UsageError(
                "a number over all processes was asked for in a training batch (run.mean, run.sum, run.gather, "
                "run.save, an evaluation, ...), but with parameter_server:mode=async the workers are not in step "
                "there. Ask for it after the loop over the loader; for values in it there is run.log."
            )
        return self.meet(parts, tolerant=self._phase == "training")

    def meet(self, parts: Iterable[Any] = (), tolerant: bool = True, admit: bool = False) -> list[memoryview]:
        """`exchange`, in any phase. tolerant: members that have died are left out without an error. admit: workers
        that wait to join are admitted; what is returned has nothing of theirs."""
        self.number += 1
        frames = self._links.wait_first({"op": "exchange", "number": self.number, "admit": admit}, parts)
        header = wire.header_of(frames)
        lengths: dict[str, list[int]] = header["lengths"]
        came, at = [], 1
        for count in map(len, lengths.values()):
            came.append(_joined(frames[at : at + count]))
            at += count
        lost = set(self.members) - set(map(int, lengths))
        self.members, self.joined = tuple(header["members"]), tuple(header["joined"])
        if lost and not tolerant:
            ranks = ", ".join(map(str, sorted(lost)))
            raise WorldError(
                f"the worker of rank {ranks} has died or is stopped outside of a training batch, so that what it was "
                "to give (its part of an evaluation or of a checkpoint) is lost, and nobody can take it over. Restore "
                "the last checkpoint."
            )
        return came

    def enter_phase(self, phase: Phase, meet: bool = False, loader: str | None = None) -> bool:
        if phase == "between":
            if loader in self.open_loaders:
                self.open_loaders.remove(str(loader))
        elif loader is not None and self.to_open:  # the others are in their passes, and do not meet
            if loader not in self.to_open:
                return False
            self.to_open.remove(loader)
            meet = False
            if not self.to_open:
                tell_launcher(os.environ, JOINED)
        elif phase == "evaluating" or loader is not None:
            self._check_arrived(f"a loader is iterated ({phase})")
        if phase == "evaluating" and self._phase == "training" and not self.in_step:
            raise UsageError(
                "an evaluation loader is iterated in a training batch, but with parameter_server:mode=async the "
                "workers are not in step there. Evaluate after the loop over the training loader."
            )
        if phase == "training":
            self.updated = False
            if loader is not None:
                self.open_loaders.append(loader)
        if meet:
            self.meet(admit=loader is not None and not self.in_step)
            if self.joined:
                self._welcome()
        self._phase = phase
        return True

    def arrive(self) -> None:
        if self._join is not None:
            join, self._join = self._join, None
            join()

    @property
    def arriving(self) -> bool:
        return self._join is not None

    def _check_arrived(self, what: str) -> None:
        """Raises UsageError in a worker that joins and has not come to where the others are."""
        if self.arriving or self.to_open:
            raise UsageError(
                f"this worker joins a run under way, and before it has come to where the others are {what}. They are "
                "in the loop over a training loader, and cannot take part. A worker that joins runs the script up to "
                "run.epochs, which is needed for it, and goes from there into the loop over the loader: put nothing "
                "that all workers do together before or between these."
            )

    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        answer = self._links.ask_first({"op": "pool", "sums": dict(sums), "take": take})
        return {key: (top, bottom) for key, (top, bottom) in answer["sums"].items()}


class Refusing(Channel):
    """The channel of a server between two `prepare`s, where it can take part in nothing."""

    size, rank, in_step = 2, 1, False

    def _refuse(self) -> Any:
        raise UsageError(
            "strategy parameter_server: a server runs the script from one run.prepare to the next, and here it is "
            "asked to train, evaluate, save or restore in between. Prepare all models and optimizers before the first "
            "training loop, and restore after the last run.prepare."
        )

    def exchange(self, parts: Iterable[Any] = ()) -> list[memoryview]:
        return self._refuse()

    def enter_phase(self, phase: Phase, meet: bool = False, loader: str | None = None) -> bool:
        return bool(self._refuse())

    def pool(self, sums: Mapping[str, tuple[float, float]], take: bool) -> dict[str, tuple[float, float]]:
        return self._refuse()


class Chunks(Queue):
    """The chunks that this worker computes; the first server hands them out.

    at_end(begins): called at both ends of a pass, where all workers are. pull(): gets the newest weights. steps: how
    many an optimizer has made, as far as this worker knows.
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
        self._pushes: dict[int, int] = {}  # optimizer -> gradients of the current chunk
        self._empty = 0  # chunks without examples, since the last request
        # For each pass, chunks to report with the next request: computed ones, and ones to hand out again.
        self._done: dict[tuple[str, int], list[Chunk]] = {}
        self._back: dict[tuple[str, int], list[Chunk]] = {}
        self.current: tuple[str, int, int, int] | None = None  # loader, epoch, step, shard of the chunk under way
        self.refused = False  # whether its gradient was too old

    def begin(self, loader: str, epoch: int, first: int, steps: int) -> None:
        self._done[loader, epoch], self._back[loader, epoch] = [], []
        self._links.ask_first({"op": "begin", "pass": [loader, epoch], "first": first, "steps": steps})
        self._at_end(True)

    def next_chunk(self, loader: str, epoch: int, wait: bool) -> Chunk | None:
        answer = wire.header_of(self._links.wait_first(self._request((loader, epoch), wait=wait)))
        if "chunk" in answer:
            if wait:  # it may have waited for long
                self._pull()
            step, shard = answer["chunk"]
            return step, shard
        if wait:
            self.current = None
            self._at_end(False)
        return None

    def _request(self, key: tuple[str, int], *, wait: bool = False, leave: bool = False) -> dict[str, Any]:
        """A request for a chunk, with the report on earlier ones."""
        header = {"op": "chunk", "pass": key, "done": self._done[key], "back": self._back[key], "empty": self._empty}
        self._done[key], self._back[key], self._empty = [], [], 0
        return {**header, "wait": wait, "leave": leave}

    def started(self, loader: str, epoch: int, chunk: Chunk) -> None:
        self.current, self.refused = (loader, epoch, *chunk), False
        self._pushes.clear()

    def completed(self, optimizer: torch.optim.Optimizer) -> int:
        """How many steps, as large as a global batch, all workers together have made since the last call."""
        before = self.counted.get(optimizer, 0)
        self.counted[optimizer] = now = max(before, self._steps(optimizer))
        return now - before

    def pushes(self, optimizer: int) -> int:
        """How many gradients of the current chunk this optimizer has had before."""
        before = self._pushes.get(optimizer, 0)
        self._pushes[optimizer] = before + 1
        return before

    def finished(self, loader: str, epoch: int, chunk: Chunk, empty: bool = False) -> None:
        """Reported with the next request."""
        report = self._back if self.refused and not empty else self._done
        report[loader, epoch].append(chunk)
        if empty:
            self._empty += 1
        else:
            self.refused = False

    def leave(self, loader: str, epoch: int) -> None:
        """The script has left the loop: the chunks that this worker still has are free."""
        with contextlib.suppress(WorldError):  # a dead server may be why the script leaves the loop
            self._links.ask_first(self._request((loader, epoch), leave=True))


def _joined(frames: Sequence[Any]) -> memoryview:
    views = [memoryview(frame.buffer) for frame in frames]
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
