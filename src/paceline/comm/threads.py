"""Several replicas in one process: threads that compute one global batch together and wait for each other at each sum.

At a sum each replica deposits its tensor and waits. The last one adds all tensors in replica order, and each replica
gets a copy. With `take_turns` only the replica that holds the baton runs:

    replica 0 runs to its first sum and passes the baton to replica 1
    ...
    the last replica runs to its first sum, adds all tensors, and passes the baton to replica 0, which continues

Replicas that draw random numbers need turns, since the default generators (torch's on the CPU, Python's, NumPy's)
belong to the process, not to the thread. When the baton is passed, the generators' state is saved for the replica that
stops and restored for the replica that continues. So each replica draws its own random numbers, as a process would, and
the same numbers in every run.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm import generators, mesh
from paceline.comm.group import Replicas
from paceline.comm.mesh import ReplicaThread
from paceline.errors import ModelError, SettingError, UsageError

T = TypeVar("T")


class ThreadReplicas(Replicas):
    """One replica of a `ThreadTeam`. The team makes these objects.

    On CUDA autograd has one thread per device. If several replicas on a device sum in a backward, that thread would
    wait for itself. So each replica must run its backward within `torch.autograd.set_multithreading_enabled(False)`.
    """

    on_all_members = False
    size = rank = 0  # set for each object

    def __init__(self, collectives: ThreadCollectives, thread: int) -> None:
        self._collectives, self._thread = collectives, thread
        self.size, self.rank = collectives.size, thread

    def sum(self, tensor: Tensor) -> Tensor:
        return self._collectives.exchange(self._thread, tensor.detach(), _add)


def _add(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    return total


class _NoReplica(Replicas):
    """The replicas of threads that belong to no replica, while a team runs. Every use raises UsageError."""

    def _refuse(self) -> UsageError:
        return UsageError(
            "Batch norm, or another sum over replicas, ran in a thread that belongs to no replica, while this process "
            "computes several replicas in threads. nn.DataParallel or the script started that thread. "
            "Use the ddp strategy (--strategy ddp), or batch_norm='shard'."
        )

    @property
    def size(self) -> int:  # type: ignore[override]  # reading it is the error
        raise self._refuse()

    @property
    def rank(self) -> int:  # type: ignore[override]
        raise self._refuse()

    def sum(self, tensor: Tensor) -> Tensor:
        raise self._refuse()


class _AbandonedError(RuntimeError):
    """Ends a replica's thread because another replica failed. The caller gets the other replica's error."""


class ThreadCollectives:
    """The rendezvous of a team's threads, and the baton. One condition guards all state.

    A run starts with `begin`; each replica then calls `start`, `meet` any number of times, and `leave` or `abandon`.
    """

    def __init__(self, size: int, take_turns: bool, devices: Sequence[torch.device | None]) -> None:
        self.size, self.take_turns, self._devices = size, take_turns and size > 1, devices
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.begin()

    def begin(self) -> None:
        self.error = None
        self._deposits: dict[int, Tensor] = {}  # tensors of this round, by replica
        self._total: Tensor | None = None  # of the last complete round
        self._round = 0  # complete rounds
        self._left = 0  # replicas that have finished
        self._turn = 0  # the replica that holds the baton
        begun = {device: generators.get_state(device) for device in set(self._devices)} if self.take_turns else {}
        self._generator_states = [begun.get(device, {}) for device in self._devices]

    def end(self) -> BaseException | None:
        """End a run, and return its first error, if any. With turns, restore the generators of replica 0."""
        if self.take_turns:
            generators.set_state(self._generator_states[0], self._devices[0])
        error, self.error = self.error, None
        self._deposits, self._total, self._generator_states = {}, None, []
        return error

    def start(self, rank: int) -> None:
        with self._changed:
            self._wait(rank, self._round)

    def exchange(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """Return a copy of `combine(all replicas' tensors in order)`. The last replica to arrive calls `combine`."""
        with self._changed:
            self._check(rank)
            awaited = self._round + 1
            self._deposits[rank] = tensor
            if len(self._deposits) == self.size:
                self._total = combine(self._collected())
                self._deposits = {}
                self._round = awaited
            self._pass_on(rank)
            self._wait(rank, awaited)
            # The next round completes only after all replicas have copied this round's total.
            assert self._total is not None
            return self._total.to(tensor.device, copy=True)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left += 1
            if self._deposits:
                self.abandon(self._out_of_step(f"replica {rank}", min(self._deposits)))
            self._pass_on(rank)

    def abandon(self, error: BaseException) -> None:
        """Make every waiting replica and every later call raise. Only the first error is kept."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def _check(self, rank: int) -> None:
        if self.error is not None:
            raise _AbandonedError("This replica was stopped because another replica failed.")
        if self._left:
            raise self._out_of_step("another replica", rank)

    def _out_of_step(self, finished: str, waiting: int) -> ModelError:
        return ModelError(
            f"The replicas are out of step: {finished} has finished, but replica {waiting} still waits for a sum over "
            f"all {self.size}. The model calls batch norm (or another sum over replicas) more often for one shard of "
            f"the batch than for another. Make the same number of calls for every shard, or use batch_norm='shard'."
        )

    def _collected(self) -> list[Tensor]:
        by_rank = [self._deposits[rank] for rank in range(self.size)]
        if any(tensor.shape != by_rank[0].shape for tensor in by_rank):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in by_rank)
            raise ModelError(
                f"The replicas are out of step: the tensors of one sum over replicas have the shapes {shapes}. "
                f"The model takes different paths for different shards of the batch. Make it take the same path."
            )
        return by_rank

    def _pass_on(self, rank: int) -> None:
        """Pass the baton to rank + 1, whether or not this round is complete."""
        if self.take_turns:
            self._generator_states[rank] = generators.get_state(self._devices[rank])
            self._turn = (rank + 1) % self.size
        self._changed.notify_all()

    def _wait(self, rank: int, awaited: int) -> None:
        """Wait until round `awaited` is complete and, with turns, until `rank` has the baton."""

        def may_run() -> bool:
            return self._round >= awaited and (not self.take_turns or self._turn == rank)

        self._changed.wait_for(lambda: self.error is not None or may_run())
        if self.error is not None:
            raise _AbandonedError("This replica was stopped because another replica failed.")
        if self.take_turns:
            generators.set_state(self._generator_states[rank], self._devices[rank])


@dataclass(frozen=True)
class _ThreadState:
    """The state of a thread that affects computations, but is not inherited by a new thread."""

    grad: bool  # gradients are enabled
    inference: bool  # inference mode
    autocast: tuple[tuple[str, torch.dtype], ...]  # (device type, dtype) where autocast is enabled
    autocast_cache: bool
    threads: int  # number of threads in torch's CPU operations

    @classmethod
    def here(cls) -> _ThreadState:
        return cls(
            threads=torch.get_num_threads(),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(
                (kind, torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda", "xpu", "mps")
                if torch.is_autocast_enabled(kind)
            ),
            autocast_cache=torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if torch.get_num_threads() != self.threads:  # a thread keeps the number from its first computation
                torch.set_num_threads(self.threads)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


Task = Callable[[], None]


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    """Run tasks until the queue returns None. Holds no reference to the team."""
    while (task := tasks.get()) is not None:
        task()
        del task  # otherwise the last batch would live until the next task


def _stop(queues: Sequence[queue.SimpleQueue[Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)


class ThreadTeam:
    """Threads that compute as replicas of one global batch. They start once, and end with `close`.

    In thread i `replicas_here()` is `replicas[i]`.

    take_turns: run one replica at a time (see the module's docstring). Required if replicas share a device, or if their
    draws on the host must be the same in every run. On several GPUs launched work still overlaps until a replica waits
    for a result. devices: the replicas' devices; their generators are then saved and restored too. member: makes the
    replica of a thread.
    """

    def __init__(
        self,
        size: int,
        *,
        take_turns: bool = False,
        devices: Sequence[torch.device] | None = None,
        member: Callable[[ThreadCollectives, int], ThreadReplicas] = ThreadReplicas,
    ) -> None:
        if size < 1:
            raise SettingError(f"ThreadTeam(size={size}): size must be at least 1.")
        self.size = size
        self._collectives = ThreadCollectives(size, take_turns, [None] * size if devices is None else devices)
        self.replicas = [member(self._collectives, rank) for rank in range(size)]
        self._busy = threading.Lock()
        self._queues: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(size)]
        self._threads = [
            ReplicaThread(target=_work, args=(tasks,), name=f"paceline-replica-{rank}", daemon=True)
            for rank, tasks in enumerate(self._queues)
        ]
        for thread, replicas in zip(self._threads, self.replicas, strict=True):
            thread.replicas = replicas
            thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._queues)

    def run(self, functions: Sequence[Callable[[], T]]) -> list[T]:
        """Call function i in thread i, where `replicas_here()` is replica i. Returns the functions' results.

        The threads get the caller's grad mode, inference mode, autocast and context variables. If a function raises,
        the others raise at their next sum, and the first error is raised here. With `take_turns` every replica begins
        with the caller's generator states, and the caller continues with those of replica 0.
        """
        if len(functions) != self.size:
            raise UsageError(
                f"ThreadTeam.run got {len(functions)} functions for {self.size} replicas. Pass one per replica."
            )
        if not self._finalizer.alive:
            raise UsageError("ThreadTeam.run was called after close(). Make a new team.")
        if not self._busy.acquire(blocking=False):
            raise UsageError("ThreadTeam.run was called while the team is running, perhaps by one of its replicas.")
        results: dict[int, T] = {}
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        state = _ThreadState.here()
        self._collectives.begin()
        with mesh.current().computing(_NoReplica()):
            for rank, function in enumerate(functions):
                context = contextvars.copy_context()
                one = functools.partial(self._one, rank, function, state, results, done)
                self._queues[rank].put(functools.partial(context.run, one))
            interruption = self._wait_for_all(done)
        failure = self._collectives.end()
        error = failure if interruption is None else interruption
        self._busy.release()  # not reached if a second Ctrl-C interrupted the wait: threads still run then
        if error is not None:
            try:
                raise error
            finally:
                del error, failure, interruption  # their traceback references this frame, and so the batch
        return [results[rank] for rank in range(self.size)]

    def _one(
        self,
        rank: int,
        function: Callable[[], T],
        state: _ThreadState,
        results: dict[int, T],
        done: queue.SimpleQueue[None],
    ) -> None:
        try:
            with state.applied():
                self._collectives.start(rank)
                results[rank] = function()
                self._collectives.leave(rank)
        except BaseException as error:
            self._collectives.abandon(error)
        finally:
            done.put(None)

    def _wait_for_all(self, done: queue.SimpleQueue[None]) -> BaseException | None:
        """Wait for all threads. Returns None, or the interruption (Ctrl-C); replicas then stop at their next sum."""
        left, interruption = self.size, None
        while left:
            try:
                done.get()
                left -= 1
            except BaseException as error:
                if interruption is not None:
                    raise
                interruption = error
                self._collectives.abandon(error)
        return interruption

    def close(self) -> None:
        """End the threads and wait for them. May be called again."""
        self._finalizer()
        for thread in self._threads:
            thread.join()
