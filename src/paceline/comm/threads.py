"""Several replicas in one process: threads that compute one global batch together and meet at each sum.

A replica lays its tensor down and waits; the last to come adds all of them in the order of the replicas, and each takes
a copy. With `take_turns` only the replica that holds the baton runs:

    replica 0 runs to its first sum and hands the baton to 1, ... the last one adds, hands it to 0, which goes on

This is for replicas that share the CPU, whose default random generator belongs to the process and not to the thread:
with the baton, the state of the generators (and Python's and NumPy's) is put away for the one who stops and brought
back for the one who goes on, so each replica draws its own stream as if it were a process. Several replicas on one GPU
take turns for the same reason.
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

    On CUDA autograd has one thread a device, which would wait for itself where several replicas of a device meet in a
    backward: each then runs its own within `torch.autograd.set_multithreading_enabled(False)`.
    """

    everywhere = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    @property
    def size(self) -> int:
        return self._meeting.size

    @property
    def rank(self) -> int:
        return self._rank

    def sum(self, tensor: Tensor) -> Tensor:
        return self._meeting.meet(self._rank, tensor.detach(), _add)


def _add(tensors: Sequence[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor.to(total.device)
    return total


class _Nobody(Replicas):
    """Stands as the default while a team runs: a thread that is no replica's must not compute as if it were alone."""

    def _refuse(self) -> UsageError:
        return UsageError(
            "Batch norm, or another sum over replicas, ran in a thread that belongs to no replica, while several "
            "replicas compute on threads of this process. Such threads are started by nn.DataParallel, by the script, "
            "or by autograd when activation checkpointing recomputes a forward on CUDA. Use the ddp strategy "
            "(--strategy ddp), or batch_norm='shard'."
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

    A run begins with `begin`; each replica then calls `enter`, any number of `meet`s, and `leave` or `abandon`.
    """

    def __init__(self, size: int, take_turns: bool, devices: Sequence[torch.device | None]) -> None:
        self.size, self.take_turns, self._devices = size, take_turns and size > 1, devices
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.begin()

    def begin(self) -> None:
        self.error = None
        self._deposits: dict[int, Tensor] = {}  # of this round, by replica
        self._total: Tensor | None = None
        self._round = 0
        self._left = 0
        self._turn = 0
        begun = {device: generators.get_state(device) for device in set(self._devices)} if self.take_turns else {}
        self._generator_states = [begun.get(device, {}) for device in self._devices]

    def end(self) -> BaseException | None:
        """What failed first, if anything. The caller goes on with the generators as replica 0 left them."""
        if self.take_turns:
            generators.set_state(self._generator_states[0], self._devices[0])
        error, self.error = self.error, None
        self._deposits, self._total, self._generator_states = {}, None, []
        return error

    def enter(self, rank: int) -> None:
        with self._changed:
            self._wait(rank, self._round)

    def meet(self, rank: int, tensor: Tensor, combine: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
        """A copy of what `combine` makes of all replicas' tensors, in their order. The last to come calls it."""
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
            # The next round is complete only when all have come to it, with their copies of this one: it still stands.
            assert self._total is not None
            return self._total.to(tensor.device, copy=True)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left += 1
            if self._deposits:
                self._fail(self._out_of_step(f"replica {rank}", min(self._deposits)))
            self._pass_on(rank)

    def abandon(self, error: BaseException) -> None:
        """Let everyone who waits, or comes later, raise. The first error is kept."""
        with self._changed:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
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
        """Give up the baton. The round is complete or the next in order is due: either way that is rank + 1."""
        if self.take_turns:
            self._generator_states[rank] = generators.get_state(self._devices[rank])
            self._turn = (rank + 1) % self.size
        self._changed.notify_all()

    def _wait(self, rank: int, awaited: int) -> None:
        """Wait for the round and for the baton, and take it up."""

        def may_run() -> bool:
            return self._round >= awaited and (not self.take_turns or self._turn == rank)

        self._changed.wait_for(lambda: self.error is not None or may_run())
        if self.error is not None:
            raise _AbandonedError("This replica was stopped because another one failed.")
        if self.take_turns:
            generators.set_state(self._generator_states[rank], self._devices[rank])


@dataclass(frozen=True)
class _Surroundings:
    """The parts of a thread's state that a computation depends on and that a new thread would not have."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    threads: int

    @classmethod
    def here(cls) -> _Surroundings:
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
    def entered(self) -> Iterator[None]:
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
    """What a thread of a team does until it gets None. It holds no reference to the team."""
    while (task := tasks.get()) is not None:
        task()
        del task  # or the last batch would live until the next task


def _stop(queues: Sequence[queue.SimpleQueue[Task | None]]) -> None:
    for tasks in queues:
        tasks.put(None)


class ThreadTeam:
    """Threads that compute as replicas of one global batch. They are started once, and end with `close`.

    `replicas[i]` is what `replicas_here()` gives in thread i. `take_turns`: only one runs at any time (see the module's
    docstring); needed where replicas share a device, or what they draw on the host must be the same in every run. On
    several GPUs what is launched still overlaps, as long as nobody waits for a result. devices: of each replica, where
    it has a generator that is to be kept too. member: makes a replica for the thread of that number.
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
        """Call function i in thread i, where `replicas_here()` is replica i, and return what they return.

        The threads see the caller's grad mode, inference mode, autocast and context variables. When one raises, the
        others raise at their next sum, and the first error is raised here. With `take_turns` every replica begins with
        the states that the generators have here, and they are left as replica 0 leaves them.
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
        surroundings = _Surroundings.here()
        self._meeting.begin()
        with mesh.current().computing(_Nobody()):
            for rank, function in enumerate(functions):
                context = contextvars.copy_context()
                one = functools.partial(self._one, rank, function, surroundings, results, done)
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
        surroundings: _Surroundings,
        results: dict[int, T],
        done: queue.SimpleQueue[None],
    ) -> None:
        try:
            with surroundings.entered():
                self._meeting.enter(rank)
                results[rank] = function()
                self._meeting.leave(rank)
        except BaseException as error:
            self._meeting.abandon(error)
        finally:
            done.put(None)

    def _wait_for_all(self, done: queue.SimpleQueue[None]) -> BaseException | None:
        """None, or what interrupted the waiting (Ctrl-C): then the replicas have been stopped at their next sum."""
        left = self.size
        try:
            while left:
                done.get()
                left -= 1
        except BaseException as interruption:
            self._meeting.abandon(interruption)
            while left:
                done.get()
                left -= 1
            return interruption
        return None

    def close(self) -> None:
        """End the threads and wait for them. May be called again."""
        self._finalizer()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
