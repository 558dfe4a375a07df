"""Several replicas in one process: threads that compute one global batch together and meet at each sum.

At a sum each replica deposits its tensor and waits. The last one adds all tensors in the order of the replicas, and
each replica gets a copy. With `take_turns` only the replica that holds the baton runs:

    replica 0 runs to its first sum and hands the baton to 1, ... the last one adds, hands it to 0, which goes on

This is for replicas that draw, since the default generators (torch's on the CPU, Python's, NumPy's) belong to the
process and not to the thread. With the baton the generators' state is saved for the replica that stops, and restored
for the one that goes on. So each replica draws its own random numbers, as if it were a process, and the same in every
run.
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
from paceline.comm.mesh import Replicas, ReplicaThread
from paceline.errors import ModelError, SettingError, UsageError

T = TypeVar("T")


class ThreadReplicas(Replicas):
    """One replica of a `ThreadTeam`, which makes these.

    On CUDA autograd has one thread for each device. Where several replicas of a device meet in a backward, that thread
    would wait for itself: each must run its backward within `torch.autograd.set_multithreading_enabled(False)`.
    """

    everywhere = False
    size = rank = 0  # of each object its own

    def __init__(self, meeting: Meeting, thread: int) -> None:
        self._meeting, self._thread = meeting, thread
        self.size, self.rank = meeting.size, thread

    def sum(self, tensor: Tensor) -> Tensor:
        return self._meeting.meet(self._thread, tensor.detach(), _add)


def _add(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    return total


class _Nobody(Replicas):
    """The default while a team runs: a thread that belongs to no replica must not compute as if it were alone."""

    def _refuse(self) -> UsageError:
        return UsageError(
            "Batch norm, or another sum over replicas, ran in a thread that belongs to no replica, while several "
            "replicas compute on threads of this process. Such threads are started by nn.DataParallel, or by the "
            "script. Use the ddp strategy (--strategy ddp), or batch_norm='shard'."
        )

    @property
    def size(self) -> int:
        raise self._refuse()

    @property
    def rank(self) -> int:
        raise self._refuse()

    def sum(self, tensor: Tensor) -> Tensor:
        raise self._refuse()


class _AbandonedError(RuntimeError):
    """Ends a replica's thread because another one failed; the other's error is what the caller gets."""


class Meeting:
    """Where the threads of a team meet, and the baton. All state is guarded by one condition.

    A run begins with `begin`; each replica then calls `start`, any number of `meet`s, and `leave` or `abandon`.
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
        """Returns the first error, if any. The caller goes on with the generators as replica 0 left them."""
        if self.take_turns:
            generators.set_state(self._generator_states[0], self._devices[0])
        error, self.error = self.error, None
        self._deposits, self._total, self._generator_states = {}, None, []
        return error

    def start(self, rank: int) -> None:
        with self._changed:
            self._wait(rank, self._round)

    def meet(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """A copy of `combine(all replicas' tensors, in their order)`, which the last replica to come calls."""
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
            # The next round completes only when all replicas have copied this round's total.
            assert self._total is not None
            return self._total.to(tensor.device, copy=True)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left += 1
            if self._deposits:
                self.abandon(self._out_of_step(f"replica {rank}", min(self._deposits)))
            self._pass_on(rank)

    def abandon(self, error: BaseException) -> None:
        """Lets every replica that waits, or comes later, raise. Keeps the first error."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()

    def _check(self, rank: int) -> None:
        if self.error is not None:
            raise _AbandonedError("This replica was stopped because another one failed.")
        if self._left:
            raise self._out_of_step("another replica", rank)

    def _out_of_step(self, finished: str, waiting: int) -> ModelError:
        return ModelError(
            f"The replicas are out of step: {finished} has finished, and replica {waiting} still waits for a sum over "
            f"all {self.size}. The model calls batch norm (or another sum over replicas) more often for one shard of "
            f"the batch than for another. Call it equally often for every shard, or use batch_norm='shard'."
        )

    def _collected(self) -> list[Tensor]:
        by_rank = [self._deposits[rank] for rank in range(self.size)]
        if any(tensor.shape != by_rank[0].shape for tensor in by_rank):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in by_rank)
            raise ModelError(
                f"The replicas are out of step: the tensors of one sum over replicas have the shapes {shapes}. "
                f"The model takes another path for one shard of the batch than for another; make it take the same."
            )
        return by_rank

    def _pass_on(self, rank: int) -> None:
        """Hands the baton to rank + 1, whether this round is complete or not."""
        if self.take_turns:
            self._generator_states[rank] = generators.get_state(self._devices[rank])
            self._turn = (rank + 1) % self.size
        self._changed.notify_all()

    def _wait(self, rank: int, awaited: int) -> None:
        """Waits for the round and for the baton."""

        def may_run() -> bool:
            return self._round >= awaited and (not self.take_turns or self._turn == rank)

        self._changed.wait_for(lambda: self.error is not None or may_run())
        if self.error is not None:
            raise _AbandonedError("This replica was stopped because another one failed.")
        if self.take_turns:
            generators.set_state(self._generator_states[rank], self._devices[rank])


@dataclass(frozen=True)
class _ThreadState:
    """The state of a thread that a computation depends on and that a new thread does not have."""

    grad: bool  # gradients are enabled
    inference: bool  # inference mode
    autocast: tuple[tuple[str, torch.dtype], ...]  # (device type, dtype) of those that are enabled
    autocast_cache: bool
    threads: int  # of torch's operations on the CPU

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
            if torch.get_num_threads() != self.threads:  # a thread keeps what was set when it computed first
                torch.set_num_threads(self.threads)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache))
            yield


Task = Callable[[], None]


def _work(tasks: queue.SimpleQueue[Task | None]) -> None:
    """Runs tasks until it gets None. Holds no reference to the team."""
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last batch would live until the next task


def _stop(queues: Sequence[queue.SimpleQueue[Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)


class ThreadTeam:
    """Threads that compute as replicas of one global batch. They are started once, and end with `close`.

    `replicas_here()` is `replicas[i]` in thread i. take_turns: one replica runs at a time (see the module's docstring).
    This is needed where replicas share a device, or where their draws on the host must be the same in every run. On
    several GPUs launched work still overlaps, as long as nobody waits for a result. devices: of the replicas, where
    their generators are saved and restored too. member: makes the replica of a thread.
    """

    def __init__(
        self,
        size: int,
        *,
        take_turns: bool = False,
        devices: Sequence[torch.device] | None = None,
        member: Callable[[Meeting, int], ThreadReplicas] = ThreadReplicas,
    ) -> None:
        if size < 1:
            raise SettingError(f"ThreadTeam(size={size}): a team has at least one replica.")
        self.size = size
        self._meeting = Meeting(size, take_turns, [None] * size if devices is None else devices)
        self.replicas = [member(self._meeting, rank) for rank in range(size)]
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
        """Calls function i in thread i, where `replicas_here()` is replica i. Returns what they return.

        The threads have the caller's grad mode, inference mode, autocast and context variables. When one raises, the
        others raise at their next sum, and the first error is raised here. With `take_turns` every replica begins with
        the caller's generator states, and the caller goes on with those of replica 0.
        """
        if len(functions) != self.size:
            raise UsageError(
                f"ThreadTeam.run got {len(functions)} functions for {self.size} replicas: give one for each."
            )
        if not self._finalizer.alive:
            raise UsageError("ThreadTeam.run was called after close(): make a new team.")
        if not self._busy.acquire(blocking=False):
            raise UsageError("ThreadTeam.run was called while the team is running, perhaps by one of its replicas.")
        results: dict[int, T] = {}
        done: queue.SimpleQueue[None] = queue.SimpleQueue()
        state = _ThreadState.here()
        self._meeting.begin()
        with mesh.current().computing(_Nobody()):
            for rank, function in enumerate(functions):
                context = contextvars.copy_context()
                one = functools.partial(self._one, rank, function, state, results, done)
                self._queues[rank].put(functools.partial(context.run, one))
            interruption = self._wait_for_all(done)
        failure = self._meeting.end()
        error = failure if interruption is None else interruption
        self._busy.release()  # not where a second Ctrl-C broke off the waiting: threads still run then
        if error is not None:
            try:
                raise error
            finally:
                del error, failure, interruption  # whose traceback holds this frame, and the batch
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
                self._meeting.start(rank)
                results[rank] = function()
                self._meeting.leave(rank)
        except BaseException as error:
            self._meeting.abandon(error)
        finally:
            done.put(None)

    def _wait_for_all(self, done: queue.SimpleQueue[None]) -> BaseException | None:
        """None, or what interrupted the wait (Ctrl-C): the replicas then stop at their next sum."""
        left, interruption = self.size, None
        while left:
            try:
                done.get()
                left -= 1
            except BaseException as error:
                if interruption is not None:
                    raise
                interruption = error
                self._meeting.abandon(error)
        return interruption

    def close(self) -> None:
        """Ends the threads and waits for them. May be called again."""
        self._finalizer()
        for thread in self._threads:
            thread.join()
