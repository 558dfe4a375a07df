"""The loop of a server: it handles one request after the other, in one thread.

`serve` returns False when no worker is left. It returns True when all workers have come to another `prepare` of the
script: then the server runs on to it too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.comm import wire
from paceline.comm.sockets import SILENCE_SECONDS, Gone, Listening
from paceline.errors import WorldError
from paceline.strategies.servers.served_parameters import ServedParameters
from paceline.strategies.servers.work_queue import Exchanges, PassQueue

START_SECONDS = 120.0
"""How long a worker may take from the servers' start to its first request."""


class Serving:
    """One server. workers: the ranks that are to connect. shards: into how many chunks a global batch is cut."""

    def __init__(self, listening: Listening, parameters: ServedParameters, workers: Sequence[int], shards: int) -> None:
        self.parameters = parameters
        self._listening, self._shards = listening, shards
        self._alive = set(workers)
        self._awaited = set(workers)  # those that have sent nothing yet
        self._ended: set[int] = set()  # those that have said goodbye
        self._again: set[int] = set()  # those that have come to another `prepare`
        self._pushed: dict[int, dict[int, dict[str, Tensor]]] = {}  # reduction -> worker -> gradients
        self._summed: dict[int, dict[str, Tensor]] = {}  # reduction -> sums
        self._final: dict[str, Tensor] = {}  # gradients for the next update
        self._made: dict[int, int] = {}  # optimizer -> number of its last update
        self._applied: dict[str, set[str]] = {}  # loader -> gradients of its epoch that were applied
        self._epochs: dict[str, int] = {}  # loader -> that epoch
        self._versions: dict[int, int] = {}  # optimizer -> updates that were applied or admitted
        self._empty = 0  # chunks without examples, which make no update
        self._passes: dict[tuple[str, int], PassQueue] = {}  # (loader, epoch) -> its chunks
        self._waiting: dict[int, tuple[str, int]] = {}  # worker -> the pass of which it waits for a chunk
        self._exchanges = Exchanges()
        self._joining: set[int] = set()  # workers that wait to be admitted
        self._admitting: set[int] = set()  # exchanges at which they may be admitted
        self._pool: dict[str, list[float]] = {}  # sums that workers share

    def serve(self) -> bool:
        for worker in sorted(self._again):
            self._answer(worker, {})
        self._again.clear()
        began = time.monotonic()
        while self._alive:
            if self._again and self._again >= self._alive:
                return True
            found = self._listening.receive(1.0)
            if isinstance(found, Gone):
                self._lose(found.peer)
            elif found is not None:
                self._handle(*found)
            if self._awaited and time.monotonic() - began > START_SECONDS:
                for worker in sorted(self._awaited):
                    self._lose(worker)
        for worker in sorted(self._joining):
            self._answer(worker, {"over": True})
        if not self._ended:
            raise WorldError("all workers of this run have died: there is nobody left to serve.")
        return False

    # --- membership

    def _lose(self, worker: int) -> None:
        self._joining.discard(worker)
        if worker not in self._alive:
            return
        self._alive.discard(worker)
        self._awaited.discard(worker)
        self._again.discard(worker)
        self._waiting.pop(worker, None)
        for queue in self._passes.values():
            queue.give_back(worker)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answers those who wait for an exchange that is now complete, or for a chunk that is now free."""
        for number, came in self._exchanges.complete(self._alive):
            joined = sorted(self._joining) if number in self._admitting else []
            self._admitting.discard(number)
            self._joining.difference_update(joined)
            self._alive.update(joined)
            members = sorted({*came, *joined})
            lengths = {str(worker): [len(frame.buffer) for frame in frames] for worker, frames in sorted(came.items())}
            whole = [frame for _, frames in sorted(came.items()) for frame in frames]
            header = {"lengths": lengths, "joined": joined, "number": number, "members": members}
            for worker in members:
                if worker in self._alive:
                    self._listening.send(worker, [*wire.pack(header), *(whole if worker not in joined else ())])
        for worker, key in list(self._waiting.items()):
            answer = self._chunk(worker, key)
            if answer is not None:
                del self._waiting[worker]
                self._answer(worker, answer)

    # --- requests

    def _handle(self, worker: int, frames: list[Any]) -> None:
        if worker not in self._alive and wire.header_of(frames)["op"] != "join":
            self._answer(worker, {"error": f"this worker was silent for {SILENCE_SECONDS:g} s, and others go on"})
            return
        self._awaited.discard(worker)
        header = wire.header_of(frames)
        handler: Callable[[int, dict[str, Any], list[Any]], None] = getattr(self, f"_on_{header['op']}")
        handler(worker, header, frames)

    def _answer(self, worker: int, header: dict[str, Any], tensors: Sequence[tuple[str, Tensor]] = ()) -> None:
        self._listening.send(worker, wire.pack(header, tensors))

    def _on_set(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        _, tensors = wire.unpack(frames)
        if header.get("optimizer") is None:
            self.parameters.set(tensors)
        else:
            self.parameters.set_state(header["optimizer"], header["plain"], tensors)
        self._answer(worker, {})

    def _on_pull(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        # Copies: another worker's gradient may come before they are sent.
        weights = [(name, self.parameters.by_name[name].clone()) for name in header["names"]]
        self._answer(worker, {"versions": self._versions, "empty": self._empty}, weights)

    def _on_state(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        plain, tensors = self.parameters.state(header["optimizer"])
        self._answer(worker, {"plain": plain}, tensors)

    # sync: workers in step

    def _on_push(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number = header["number"]
        for old in [key for key in self._pushed if key < number - 1]:
            del self._pushed[old]
            self._summed.pop(old, None)
        self._pushed.setdefault(number, {})[worker] = wire.unpack(frames)[1]
        self._answer(worker, {})

    def _on_sum(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number = header["number"]
        if number not in self._summed:
            self._summed[number] = total = dict[str, Tensor]()
            for member in header["members"]:
                for name, gradient in self._pushed[number].pop(member).items():
                    total[name] = total[name] + gradient if name in total else gradient
        self._answer(worker, {}, list(self._summed[number].items()))

    def _on_final(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._final |= wire.unpack(frames)[1]
        self._answer(worker, {})

    def _on_update(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number = header["optimizer"]
        if self._made.get(number, -1) < header["number"]:
            self._made[number] = header["number"]
            gradients = {name: self._final[name] for name in header["names"]}
            self._final.clear()
            self.parameters.update(number, header["setting"], header["seed"], gradients)
        self._answer(worker, {}, self.parameters.of(number))

    # async: workers not in step

    def _on_apply(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number, (loader, epoch, *_) = header["optimizer"], header["chunk"]
        if self._epochs.get(loader, -1) < epoch:
            self._epochs[loader], self._applied[loader] = epoch, set()
        gradient = f"{number} {header['chunk']} {header['call']}"
        if gradient not in self._applied[loader]:  # else a worker died after its push, before it said "done"
            self._applied[loader].add(gradient)
            _, gradients = wire.unpack(frames)
            self.parameters.update(number, header["setting"], header["seed"], gradients)
            if not header["admitted"]:
                self._versions[number] = self._versions.get(number, 0) + 1
        weights = [(name, parameter.clone()) for name, parameter in self.parameters.of(number)]
        self._answer(worker, {"versions": self._versions, "empty": self._empty}, weights)

    def _on_admit(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number = header["optimizer"]
        version = self._versions.get(number, 0)
        allowed = version - header["version"] <= header["staleness"]
        if allowed:
            self._versions[number] = version + 1
        self._answer(worker, {"allowed": allowed})

    def _on_begin(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        loader, epoch = header["pass"]
        for old in [key for key in self._passes if key[0] == loader and key[1] < epoch]:
            del self._passes[old]
        self._passes.setdefault((loader, epoch), PassQueue(header["first"], header["steps"], self._shards))
        self._answer(worker, {})

    def _on_chunk(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        loader, epoch = header["pass"]
        queue = self._passes.get((loader, epoch))
        if queue is None:  # all others have begun the next one
            self._answer(worker, {"over": True})
            return
        queue.finish(worker, [tuple(chunk) for chunk in header["done"]])
        queue.give_back(worker, [tuple(chunk) for chunk in header["back"]])
        self._empty += header["empty"]
        if header["leave"]:
            queue.give_back(worker)
            self._answer(worker, {})
        elif (answer := self._chunk(worker, (loader, epoch))) is not None:
            self._answer(worker, answer)
        elif header["wait"]:
            self._waiting[worker] = (loader, epoch)
        else:
            self._answer(worker, {})
        self._answer_waiting()

    def _chunk(self, worker: int, key: tuple[str, int]) -> dict[str, Any] | None:
        """The answer to a request for a chunk; None where there is none now."""
        queue = self._passes.get(key)
        if queue is None or queue.over:
            return {"over": True}
        chunk = queue.hand_out(worker)
        return None if chunk is None else {"chunk": chunk}

    # all workers

    def _on_exchange(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._exchanges.add(header["number"], worker, frames[1:])
        if header["admit"]:
            self._admitting.add(header["number"])
        self._answer_waiting()

    def _on_join(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        """A process comes in the place of a killed worker. At the first server it waits until the other workers admit
        it. Then it tells the other servers that it was admitted."""
        self._listening.reconnected(worker, worker in self._alive)
        self._lose(worker)
        if header["admitted"]:
            self._alive.add(worker)
            self._answer(worker, {})
        else:
            self._joining.add(worker)

    def _on_missing(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        """A worker has waited for too long, in an exchange or for a chunk."""
        waiting = {who for came in self._exchanges.under_way.values() for who in came} | self._waiting.keys()
        self._answer(worker, {"missing": sorted(self._alive - waiting)})

    def _on_pool(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        for key, (top, bottom) in header["sums"].items():
            pair = self._pool.setdefault(key, [0.0, 0.0])
            pair[0] += top
            pair[1] += bottom
        taken: dict[str, list[float]] = {}
        if header["take"]:
            taken, self._pool = self._pool, {}
        self._answer(worker, {"sums": taken})

    def _on_again(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._again.add(worker)

    def _on_bye(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._ended.add(worker)
        self._lose(worker)
