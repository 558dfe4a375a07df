"""The replicas that compute one global batch together.

    OneReplica        a single one (mesh.py)
    ProcessReplicas   one replica in each process of a group
    ThreadReplicas    several replicas in this process, each on a thread (threads.py)
    ShardReplicas     the same, where each computes a shard of a reproducible run, also over processes (tree_sums.py)

A layer asks `replicas_here()` and calls `sum`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.comm import collectives, neighbours, transport
from paceline.comm.mesh import Group, Mesh, Replicas
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
        if near is not None:
            return near.rows(row.detach())
        if _on_accelerator(self._group, row.device):  # where each operation less is a launch less
            return transport.all_gather(row.detach().reshape(-1), self._group).view(self.size, *row.shape)
        return super().rows(row)


def _on_accelerator(group: Group, device: torch.device) -> bool:
    """Whether a backend of accelerators, such as NCCL, carries the tensors of this device in the group."""
    return device.type != "cpu" and collectives.device_of(group, device) == device


class CrossesReplicas:
    """A layer that needs a sum over replicas in the middle of its forward, as batch norm over the global batch does."""


def crosses_replicas(models: Iterable[nn.Module]) -> bool:
    """Whether a model has such a layer."""
    return any(isinstance(module, CrossesReplicas) for model in models for module in model.modules())


def separate(mesh: Mesh, models: Iterable[nn.Module]) -> None:
    """Gives layers that cross replicas a process group of their own, where they would wait for gradients in that of the
    gradients: NCCL computes what is in one group one after the other, and in the backward buckets of gradients are
    there before a layer's small sum. Over sockets and gloo nothing queues up. Collective.

    mesh: its replicas are processes. models: all that are prepared, the same on all processes.
    """
    if _on_accelerator(mesh.gradient, mesh.device) and crosses_replicas(models):
        mesh.separate_layers()
        if isinstance(mesh.replicas, ProcessReplicas):  # not where a strategy has others outside of its step
            mesh.replicas = ProcessReplicas(mesh.layers)


def differentiable_sum(tensor: Tensor, replicas: Replicas) -> Tensor:
    """The sum of all replicas' tensors, differentiable any number of times: its backward is again this sum.

    A backward through it communicates: all replicas run it, or none.
    """
    if replicas.size == 1:
        return tensor.clone()
    total: Tensor = collectives.ReplicaSum.apply(tensor, replicas.sum)
    return total
