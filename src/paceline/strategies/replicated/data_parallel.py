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

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh import Mesh
from paceline.comm.tree_sums import TreeSums
from paceline.config import StrategySpec
from paceline.strategies.base import ClosureStrategy, Term, Work
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import load_replicated, replicated_state
from paceline.strategies.kit.one_process import DEVICE, as_single
from paceline.strategies.replicated.local_devices import check_devices, check_shards, devices_of
from paceline.strategies.replicated.replica_set import ReplicaSet
from paceline.world import World


def check(size: int | None, *, devices: str, shards: int | None = None) -> None:
    """Raises SettingError for several processes, or for devices that cannot be. shards: of a reproducible run."""
    check_devices("data_parallel", size, devices, shards=shards)


def alone(spec: StrategySpec, device: torch.device, *, devices: str) -> tuple[StrategySpec, str]:
    return as_single("data_parallel", DEVICE) if len(devices_of("data_parallel", devices, device)) == 1 else (spec, "")


class DataParallel(ClosureStrategy):
    """devices: such as "cuda:0,cuda:1" or "cpu,cpu"; all accelerators of this machine if not given."""

    def __init__(self, world: World, device: torch.device, sums: TreeSums | None = None, *, devices: str = "") -> None:
        check(world.size, devices=devices)
        found = devices_of("data_parallel", devices, device)
        check_shards("data_parallel", found, None if sums is None else sums.shards)
        self._replicas = ReplicaSet(found, sums=sums)
        self.device, self.plan = device, self._replicas.plan
        self.mesh = Mesh(device, world.rank)
        self.store = GradientStore(replicas=self._replicas.copies, sums=sums)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self._replicas.setup(models)

    def forward_backward(self, work: Work) -> list[list[Term]]:
        self._replicas.follow(work.call)
        return self._replicas.forward_backward(work, self._replicas.gather)

    def finish(self) -> None:
        self._replicas.average_statistics()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._replicas.mark_stale(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        self._replicas.mark_stale()

    def close(self) -> None:
        self._replicas.close()
