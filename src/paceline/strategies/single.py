"""single: one process, one device. Read this first: every other strategy extends it.

Phase 1, forward and backward: autograd adds the gradient of the weighted loss to `.grad`.
Phase 2, step: the optimizer updates the weights.

With shards=N the loader splits each global batch into N shards, as it does for N processes.

Communication: none, since there is one replica. Memory: parameters, gradients and optimizer state once each.
Follows plain PyTorch: a training loop with `loss.backward()` and `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh import Mesh
from paceline.data.batch_plan import ShardsInSequence, one_shard
from paceline.errors import SettingError
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.kit.named_parameters import load_replicated, replicated_state
from paceline.world import World


def check(size: int | None, *, shards: int) -> None:
    """Raises SettingError if the run has several processes, or if `shards` is below 1."""
    if size not in (1, None):
        raise SettingError(
            f"strategy='single' is for one process, but this run has {size}: they would train {size} separate models. "
            "Use strategy='ddp', or start one process."
        )
    if shards < 1:
        raise SettingError(f"strategy single: shards={shards}: use a whole number of at least 1.")


class Single(LoopStrategy):
    """One process on one device. shards: number of shards per global batch."""

    def __init__(self, world: World, device: torch.device, *, shards: int = 1) -> None:
        check(world.size, shards=shards)
        self.device = device
        self.mesh = Mesh(device, world.rank)
        self.plan = (
            one_shard(1, 0) if shards == 1 else ShardsInSequence(shards, tuple(range(shards)), sequential=shards)
        )
        self.store = GradientStore()

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        for model in models:
            model.to(self.device)

    def backward(self, work: Backward) -> None:
        backward_here(work)

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        if self.plan.shards > 1:
            return False
        optimizer.step(closure)
        return True

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
