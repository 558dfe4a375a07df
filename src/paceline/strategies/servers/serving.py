"""The loop of a server: it handles one request after the other, in one thread.

`serve` returns False when all workers have ended. It returns True when they have come to another `prepare` of the
script: then the server runs on to it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from paceline.comm import wire
from paceline.comm.sockets import SILENCE_SECONDS, Gone, Listening
from paceline.errors import WorldError
from paceline.strategies.servers.served_parameters import ServedParameters
from paceline.strategies.servers.work_queue import PassQueue


class Serving:
    """One server. workers: the ranks that are to connect; a global batch is cut into as many chunks."""

    def __init__(self, listening: Listening, parameters: ServedParameters, workers: Sequence[int]) -> None:
        self.parameters = parameters
        self._listening, self._workers = listening, tuple(workers)
        self._running = set(workers)  # those that have not ended
        self._again: set[int] = set()  # those that have come to another `prepare`
        self._pushed: dict[int, dict[str, Tensor]] = {}  # worker -> its gradients, for the next sum
        self._final: dict[int, dict[str, Tensor]] = {}  # worker -> its share of those for the next update
        self._applied: dict[str, set[str]] = {}  # loader -> gradients of its epoch that were applied
        self._epochs: dict[str, int] = {}  # loader -> that epoch
        self._versions: dict[int, int] = {}  # optimizer -> updates that were applied or admitted
        self._empty = 0  # chunks without examples, which make no update
        self._passes: dict[tuple[str, int], PassQueue] = {}  # (loader, epoch) -> its chunks
        self._waiting: dict[int, tuple[str, int]] = {}  # worker -> the pass of which it waits for a chunk
        self._pool: dict[str, list[float]] = {}  # sums that workers share

    def serve(self) -> bool:
        """Raises WorldError where a worker is lost."""
        for worker in sorted(self._again):
            self._answer(worker, {})
        self._again.clear()
        while self._running:
            if self._again >= self._running:
                return True
            found = self._listening.receive(1.0)
            if isinstance(found, Gone):
                if found.peer in self._running:
                    self._lose(found.peer)
            elif found is not None:
                worker, frames = found
                header = wire.header_of(frames)
                handler: Callable[[int, dict[str, Any], list[Any]], None] = getattr(self, f"_on_{header['op']}")
                handler(worker, header, frames)
        return False

    def _lose(self, worker: int) -> None:
        """Tells the others, whose next answer it is."""
        why = (
            f"the worker of rank {worker} has gone or is stopped: its connection ended, or nothing was heard of it for "
            f"{SILENCE_SECONDS:g} s. See what that process said, and start the run again: a script that calls "
            "run.restore goes on from its last checkpoint."
        )
        for other in sorted(self._running - {worker}):
            self._answer(other, {"error": why})
        raise WorldError(why)

    def _answer(self, worker: int, header: dict[str, Any], tensors: Sequence[tuple[str, Tensor]] = ()) -> None:
        self._listening.send(worker, wire.pack(header, tensors))

    def _answer_all(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for worker in self._workers:
            self._answer(worker, {}, tensors)

    # --- requests

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
        """With the gradients of the last worker to come, adds all, in rank order."""
        self._pushed[worker] = wire.unpack(frames)[1]
        if len(self._pushed) < len(self._workers):
            return
        total: dict[str, Tensor] = {}
        for each in self._workers:
            for name, gradient in self._pushed.pop(each).items():
                total[name] = total[name] + gradient if name in total else gradient
        self._answer_all(list(total.items()))

    def _on_update(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        """With the share of the last worker to come, makes the update."""
        self._final[worker] = wire.unpack(frames)[1]
        if len(self._final) < len(self._workers):
            return
        gradients = {name: gradient for share in self._final.values() for name, gradient in share.items()}
        self._final.clear()
        self.parameters.update(header["optimizer"], header["setting"], header["seed"], gradients)
        # Copies: a worker that is ahead may set weights before they are sent to the others.
        self._answer_all([(name, weight.clone()) for name, weight in self.parameters.of(header["optimizer"])])

    # async: workers not in step

    def _on_apply(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number, (loader, epoch, *_) = header["optimizer"], header["chunk"]
        if self._epochs.get(loader, -1) < epoch:
            self._epochs[loader], self._applied[loader] = epoch, set()
        gradient = f"{number} {header['chunk']} {header['call']}"
        if gradient not in self._applied[loader]:  # else its chunk was handed out again after a later one was too old
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
        self._passes.setdefault((loader, epoch), PassQueue(header["first"], header["steps"], len(self._workers)))
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
        for other, key in list(self._waiting.items()):  # this may have freed a chunk, or finished the last
            if (answer := self._chunk(other, key)) is not None:
                del self._waiting[other]
                self._answer(other, answer)

    def _chunk(self, worker: int, key: tuple[str, int]) -> dict[str, Any] | None:
        """The answer to a request for a chunk; None where there is none now."""
        queue = self._passes.get(key)
        if queue is None or queue.over:
            return {"over": True}
        chunk = queue.hand_out(worker)
        return None if chunk is None else {"chunk": chunk}

    def _on_pool(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        for key, (top, bottom) in header["sums"].items():
            pair = self._pool.setdefault(key, [0.0, 0.0])
            pair[0] += top
            pair[1] += bottom
        taken: dict[str, list[float]] = {}
        if header["take"]:
            taken, self._pool = self._pool, {}
        self._answer(worker, {"sums": taken})

    # both

    def _on_again(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._again.add(worker)

    def _on_bye(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        self._running.discard(worker)
