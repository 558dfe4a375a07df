"""Sums over the replicas of a global batch in the middle of a forward, as batch norm over the global batch needs.

A layer gets its replicas from `mesh.replicas_here()`. It calls their `sum`, or `differentiable_sum` if autograd must
record the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Replicas
from paceline.comm.mesh import Mesh


class ReplicaSum(torch.autograd.Function):
    """y = Σ over replicas of x. Every replica's loss depends on y, so dL/dx is the sum of all replicas' dL_r/dy_r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.total = total
        return total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ReplicaSum.apply(gradients[0], ctx.total), None


class CrossesReplicas:
    """A layer that needs a sum over replicas in the middle of its forward, such as batch norm over the global batch."""


def crosses_replicas(models: Iterable[nn.Module]) -> bool:
    """Whether any of the models has a `CrossesReplicas` layer."""
    return any(isinstance(module, CrossesReplicas) for model in models for module in model.modules())


def separate(mesh: Mesh, models: Iterable[nn.Module]) -> None:
    """Give layers that cross replicas a separate process group if they would otherwise wait for gradients. Collective.

    NCCL runs the operations of one group one after the other, and in the backward the gradient buckets come before a
    layer's small sum. Sockets and gloo do not queue.

    mesh: a mesh with one replica per process. models: all prepared models, the same on all processes.
    """
    if mesh.gradient.on_accelerator(mesh.device) and crosses_replicas(models):
        before = mesh.layers
        mesh.separate_layers()
        if mesh.replicas is before:  # false if a strategy uses other replicas outside of its step
            mesh.replicas = mesh.layers


def differentiable_sum(tensor: Tensor, replicas: Replicas) -> Tensor:
    """The sum of all replicas' tensors, differentiable any number of times: its backward is again this sum.

    A backward through it communicates, so all replicas must run it, or none.
    """
    if replicas.size == 1:
        return tensor.clone()
    total: Tensor = ReplicaSum.apply(tensor, replicas.sum)
    return total
