"""data_parallel: one process, several devices; the first device acts as a parameter server.

Phase 1, scatter: the weights of the user's model on the first device are copied to the other devices when a global
  batch begins, and after an update within a global batch.
Phase 2, forward: each replica computes its shard and its loss, in a separate thread. Unlike in nn.DataParallel, outputs
  are not gathered on the first device.
Phase 3, backward: each replica accumulates its gradients over all micro-batches, in its thread (replica_set.py).
Phase 4, gather, in the last micro-batch: the other replicas' gradients are added to those of the first replica.
Phase 5, step: the optimizer updates the weights on the first device.

Traffic between n devices per step: weights out and gradients in, 2 (n - 1) times the bytes of the parameters, all
through the first device, in buckets of 25 MB (comm/devices.py). The host does not wait.
Memory: parameters and gradients once per device, optimizer state once; while a bucket is sent, the bucket on both
devices.
Follows torch.nn.DataParallel, but computes the loss on the replicas (as PyTorch-Encoding's DataParallelCriterion does),
and keeps the copies instead of making them in each forward.
"""

from __future__ import annotations

import torch

from paceline.comm.tree_sums import TreeSums
from paceline.config import StrategySpec
from paceline.strategies.replicated import replica_strategy
from paceline.strategies.replicated.local_devices import check_devices
from paceline.strategies.replicated.replica_strategy import ReplicaStrategy
from paceline.world import World


def check(size: int | None, *, devices: str, shards: int | None = None) -> None:
    """Raises SettingError for several processes, or for invalid devices. shards: number of shards of a reproducible run
    (None: not reproducible)."""
    check_devices("data_parallel", size, devices, shards=shards)


def alone(spec: StrategySpec, device: torch.device, *, devices: str) -> tuple[StrategySpec, str]:
    return replica_strategy.alone("data_parallel", spec, device, devices)


class DataParallel(ReplicaStrategy):
    """devices: such as "cuda:0,cuda:1" or "cpu,cpu"; default: all accelerators of this machine."""

    name = "data_parallel"

    def __init__(self, world: World, device: torch.device, sums: TreeSums | None = None, *, devices: str = "") -> None:
        check(world.size, devices=devices)
        super().__init__(world, device, sums, devices=devices)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.replicas.mark_stale(optimizer)
