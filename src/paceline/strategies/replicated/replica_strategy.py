"""The base class of data_parallel, mirrored and central_storage: one process computes several replicas
(replica_set.py).

The strategies differ in where an update is made (`step`). mirrored also combines gradients differently (`combine`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The `alone` function of these strategies (strategies/__init__.py): `single` for a run with one device."""
    return as_single(name, DEVICE) if len(devices_of(name, devices, device)) == 1 else (spec, "")


class ReplicaStrategy(ClosureStrategy):
    """One process with a replica on each device. Each replica accumulates its gradients over all micro-batches, until
    the gradients are combined."""

    name: str  # of the strategy
    keep_weights = False  # see ReplicaSet

    def __init__(self, world: World, device: torch.device, sums: TreeSums | None = None, *, devices: str = "") -> None:
        """Raises SettingError for invalid devices, or for more devices than a reproducible run has shards."""
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
        """Sum the replicas' gradients on the first replica, where the update reads them."""
        self.replicas.gather()

    def finish(self) -> None:
        self.replicas.average_statistics()

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        self.replicas.mark_stale()

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        write()
        self.replicas.mark_stale()

    def close(self) -> None:
        self.replicas.close()
