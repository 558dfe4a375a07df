"""The loop of a server. It handles one request after the other, in one thread.

`serve` returns False when all workers have ended. It returns True when all running workers have reached another
`prepare`: then the server runs the script up to this `prepare` too.
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
    """One server. workers: the ranks of the workers; a global batch has one chunk for each worker."""

    def __init__(self, listening: Listening, parameters: ServedParameters, workers: Sequence[int]) -> None:
        self.parameters = parameters
        self._listening, self._workers = listening, tuple(workers)
        self._running = set(workers)  # workers that have not ended
        self._again: set[int] = set()  # workers that have reached another `prepare`
        self._pushed: dict[int, dict[str, Tensor]] = {}  # worker -> its gradients, for the next sum
        self._final: dict[int, dict[str, Tensor]] = {}  # worker -> its share of the gradients for the next update
        self._applied: dict[str, set[str]] = {}  # loader -> gradients that were applied in its latest epoch
        self._epochs: dict[str, int] = {}  # loader -> its latest epoch
        self._versions: dict[int, int] = {}  # optimizer -> number of updates that were applied or admitted
        self._empty = 0  # chunks without examples, which make no update
        self._passes: dict[tuple[str, int], PassQueue] = {}  # (loader, epoch) -> its chunks
        self._waiting: dict[int, tuple[str, int]] = {}  # worker -> the pass from which it awaits a chunk
        self._pool: dict[str, list[float]] = {}  # sums that workers share

    def serve(self) -> bool:
        """Handle requests. Returns whether another `prepare` follows. Raises WorldError if a worker is lost."""
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
        """Send the other workers an error as their next answer, and raise it."""
        why = (
            f"the worker of rank {worker} is lost or stopped: its connection ended, or it sent nothing for "
            f"{SILENCE_SECONDS:g} s. See the output of that process, and start the run again: a script that calls "
            "run.restore continues from its last checkpoint."
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
        # Send copies, since another worker's gradient may change the weights before they are sent.
        weights = [(name, self.parameters.by_name[name].clone()) for name in header["names"]]
        self._answer(worker, {"versions": self._versions, "empty": self._empty}, weights)

    def _on_state(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        plain, tensors = self.parameters.state(header["optimizer"])
        self._answer(worker, {"plain": plain}, tensors)

    # sync: workers in lockstep

    def _on_push(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        """After all workers' gradients have arrived, add them in rank order."""
        self._pushed[worker] = wire.unpack(frames)[1]
        if len(self._pushed) < len(self._workers):
            return
        total: dict[str, Tensor] = {}
        for each in self._workers:
            for name, gradient in self._pushed.pop(each).items():
                total[name] = total[name] + gradient if name in total else gradient
        self._answer_all(list(total.items()))

    def _on_update(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        """After all workers' shares have arrived, make the update."""
        self._final[worker] = wire.unpack(frames)[1]
        if len(self._final) < len(self._workers):
            return
        gradients = {name: gradient for share in self._final.values() for name, gradient in share.items()}
        self._final.clear()
        self.parameters.update(header["optimizer"], header["setting"], header["seed"], gradients)
        # Send copies, since a worker that is ahead may set weights before the others have received them.
        self._answer_all([(name, weight.clone()) for name, weight in self.parameters.of(header["optimizer"])])

    # async: workers not in lockstep

    def _on_apply(self, worker: int, header: dict[str, Any], frames: list[Any]) -> None:
        number, (loader, epoch, *_) = header["optimizer"], header["chunk"]
        if self._epochs.get(loader, -1) < epoch:
            self._epochs[loader], self._applied[loader] = epoch, set()
        gradient = f"{number} {header['chunk']} {header['call']}"
        if gradient not in self._applied[loader]:  # a chunk is repeated if a later gradient was too old
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
        if queue is None:  # all other workers have begun the next pass
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
        for other, key in list(self._waiting.items()):  # this request may have freed a chunk, or finished the last
            if (answer := self._chunk(other, key)) is not None:
                del self._waiting[other]
                self._answer(other, answer)

    def _chunk(self, worker: int, key: tuple[str, int]) -> dict[str, Any] | None:
        """The answer to a request for a chunk; None if no chunk is free."""
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
