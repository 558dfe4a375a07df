"""The replicas that compute one global batch together.

    OneReplica        a single one (mesh.py)
    ProcessReplicas   one replica in each process of a group
    ThreadReplicas    several replicas in this process, each on a thread (threads.py)
    ShardReplicas     the same, where each computes a shard of a reproducible run, also over processes (tree_sums.py)

A layer asks `replicas_here()` and calls `sum`.
"""

from __future__ import annotations

from torch import Tensor

from paceline.comm import collectives, neighbours
from paceline.comm.mesh import Group, Replicas
from paceline.comm.mesh import OneReplica as OneReplica
from paceline.comm.mesh import replicas_here as replicas_here


class ProcessReplicas(Replicas):
    """One replica in each process of a group."""

    def __init__(self, group: Group = None) -> None:
        self._group = group

    @property
    def size(self) -> int:
        return collectives.size_of(self._group)

    @property
    def rank(self) -> int:
        return collectives.rank_of(self._group)

    def sum(self, tensor: Tensor) -> Tensor:
        near = neighbours.here(self._group, tensor)
        if near is None:
            return collectives.all_reduce(tensor.detach().clone(), group=self._group)
        return near.rows(tensor.detach()).sum(0, dtype=tensor.dtype)

    def rows(self, row: Tensor) -> Tensor:
        near = neighbours.here(self._group, row)
        return super().rows(row) if near is None else near.rows(row.detach())


class CrossesReplicas:
    """A layer that needs a sum over replicas in the middle of its forward, as batch norm over the global batch does."""


def differentiable_sum(tensor: Tensor, replicas: Replicas) -> Tensor:
    """The sum of all replicas' tensors, differentiable any number of times: its backward is again this sum.

    A backward through it communicates: all replicas run it, or none.
    """
    if replicas.size == 1:
        return tensor.clone()
    total: Tensor = collectives.ReplicaSum.apply(tensor, replicas.sum)
    return total
