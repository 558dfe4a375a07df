"""What data_parallel, mirrored and central_storage share: one process computes several replicas (replica_set.py).

Mirrored combines the replicas' gradients in another way. They differ in where an update is made (`step`).
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
from paceline.strategies.replicated.local_devices import check_shards, devices_of
from paceline.strategies.replicated.replica_set import ReplicaSet
from paceline.world import World


def alone(name: str, spec: StrategySpec, device: torch.device, devices: str) -> tuple[StrategySpec, str]:
    """The strategy of a run that has one device, as `strategies.alone` wants it."""
    return as_single(name, DEVICE) if len(devices_of(name, devices, device)) == 1 else (spec, "")


class ReplicaStrategy(ClosureStrategy):
    """One process, a replica on each device. Before gradients are combined each replica has its own, over all
    micro-batches."""

    name: str  # of the strategy
    keep_weights = False  # see ReplicaSet

    def __init__(self, world: World, device: torch.device, sums: TreeSums | None = None, *, devices: str = "") -> None:
        """Raises SettingError for devices that cannot be, or that are more than the shards of a reproducible run."""
        self.devices = devices_of(self.name, devices, device)
        check_shards(self.name, self.devices, None if sums is None else sums.shards)
        self.replicas = ReplicaSet(self.devices, keep_weights=self.keep_weights, sums=sums)
        self.device, self.plan = self.devices[0], self.replicas.plan
        self.mesh = Mesh(device, world.rank)
        self.store = GradientStore(replicas=self.replicas.copies, sums=sums)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        self.replicas.setup(models)

    def forward_backward(self, work: Work) -> list[list[Term]]:
        self.replicas.follow(work.call)
        return self.replicas.forward_backward(work, self.combine)

    def combine(self) -> None:
        """Makes the replicas' gradients one, where the update looks for it: on the first replica."""
        self.replicas.gather()

    def finish(self) -> None:
        self.replicas.average_statistics()

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        self.replicas.mark_stale()

    def close(self) -> None:
        self.replicas.close()
