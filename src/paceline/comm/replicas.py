"""The replicas that compute one global batch together, for whatever needs a sum over them in the middle of a forward.

    Alone             one replica: nothing to add
    ProcessReplicas   one replica in each process of a process group
    ThreadReplicas    several replicas in this process, each on a thread (`threads.py`)
    ShardReplicas     likewise, which are shards of a reproducible run beside those of other processes (`canonical.py`)

A layer asks `current()` and calls `sum`. All replicas call it equally often and in the same order: in lock-step.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives


class Replicas(ABC):
    """The replicas that compute one global batch together, seen from one of them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Which one this is, from 0."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum of all replicas' tensors (of one shape and dtype), the same bits on each.

        Not differentiable; for that see `differentiable_sum`.
        """

    def rows(self, row: Tensor) -> Tensor:
        """(size, ...): all replicas' tensors (of one shape and dtype), in their order, the same on each."""
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return self.sum(table)


class Alone(Replicas):
    """One replica."""

    size = 1
    rank = 0

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()


class ProcessReplicas(Replicas):
    """One replica in each process of a group (None: the world).

    A group of one's own keeps these sums from queueing behind the gradients' in the same group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return collectives.size_of(self._group)

    @property
    def rank(self) -> int:
        return collectives.rank_of(self._group)

    def sum(self, tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor.detach().clone(), group=self._group)


class _Local(threading.local):
    replicas: Replicas | None = None


_local = _Local()
_default: Replicas = Alone()


def current() -> Replicas:
    """The replicas of this thread's computation: what `use` set in this thread, else the process's default."""
    return _default if _local.replicas is None else _local.replicas


def set_default(replicas: Replicas) -> Replicas:
    """Set what `current()` is in every thread where `use` set nothing, and return what it was. At first `Alone()`."""
    global _default
    previous, _default = _default, replicas
    return previous


@contextlib.contextmanager
def use(replicas: Replicas) -> Iterator[None]:
    """In this thread, within the block, `current()` is `replicas`."""
    previous, _local.replicas = _local.replicas, replicas
    try:
        yield
    finally:
        _local.replicas = previous


def differentiable_sum(tensor: Tensor, replicas: Replicas) -> Tensor:
    """The sum of all replicas' tensors, differentiable any number of times: its backward is again this sum.

    A backward through it communicates: all replicas run it, or none.
    """
    return tensor.clone() if replicas.size == 1 else collectives.differentiable(replicas.sum, tensor)
