"""data_parallel: one process, several devices, parameter-server style: the first device serves.

Phase 1, scatter: the weights of the first device, where the user's own model is, are copied to the others: when a
  global batch begins, and after an update within one.
Phase 2, forward: each replica computes its own shard and its own loss, in a thread of its own. Unlike nn.DataParallel,
  the first device gathers no outputs.
Phase 3, backward: each replica's, in its thread, into its own gradients, over all micro-batches (replica_set.py).
Phase 4, gather, in the last micro-batch: the replicas' gradients are added to the first device's.
Phase 5, step: the update, on the first device.

Between devices, a step: weights out and gradients in, 2 (n - 1) times their bytes, all through the first device, in
buckets of 25 MB (comm/devices.py). Nothing waits on the host.
Memory: parameters and gradients once per device, optimizer state once; a bucket on each side.
Follows torch.nn.DataParallel, with the loss on the replicas (as PyTorch-Encoding's DataParallelCriterion has it), and
with copies that are kept instead of made for each forward.
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
    """Raises SettingError for several processes, or for devices that cannot be. shards: of a reproducible run."""
    check_devices("data_parallel", size, devices, shards=shards)


def alone(spec: StrategySpec, device: torch.device, *, devices: str) -> tuple[StrategySpec, str]:
    return replica_strategy.alone("data_parallel", spec, device, devices)


class DataParallel(ReplicaStrategy):
    """devices: such as "cuda:0,cuda:1" or "cpu,cpu"; all accelerators of this machine if not given."""

    name = "data_parallel"

    def __init__(self, world: World, device: torch.device, sums: TreeSums | None = None, *, devices: str = "") -> None:
        check(world.size, devices=devices)
        super().__init__(world, device, sums, devices=devices)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self.replicas.mark_stale(optimizer)
