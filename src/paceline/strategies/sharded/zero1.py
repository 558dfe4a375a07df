"""Stage 1 of fsdp (ZeRO-1): as ddp, but the optimizer updates shards.

Phase 1, forward and backward: as in ddp. Gradients are views of the reducer's buckets.
Phase 2, step: each rank updates its shard of each parameter with the same shard of the gradient. It has optimizer state
  for this shard only.
Phase 3, step: all-gathers of some 25 MB each write the other ranks' shards into the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh
from paceline.strategies.kit.named_parameters import check_dense, replicated_state
from paceline.strategies.kit.pickling import PickleGuard
from paceline.strategies.kit.sharded_state import Masters, full_state, load_full_state
from paceline.strategies.replicated.ddp import DDP
from paceline.strategies.replicated.ddp_hook import NATIVE
from paceline.strategies.sharded.fsdp_wrapping import Sharding, recompute
from paceline.world import World


class ZeRO1(DDP):
    """One replica. It updates one shard of each parameter."""

    def __init__(self, world: World, device: torch.device, mesh: Mesh, sharding: Sharding) -> None:
        super().__init__(world, device, find_unused=sharding.find_unused, gradient_as_bucket_view=True, reducer=NATIVE)
        self.mesh, self._sharding = mesh, sharding
        self._pickle_guard = PickleGuard("fsdp")
        self._masters = Masters(mesh)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_dense(models)
        added = [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        new = [model for model in models if model not in self.models]
        for model in new if self._sharding.checkpointing else ():
            recompute(self._sharding.layers(model))
        super().setup(models, optimizers)
        for parameter in self._names:
            self._masters.add(parameter)
        if any(optimizer.state for optimizer in added):
            self._check_alike("in `prepare`", "Optimizer state was loaded on some")
        for optimizer in added:
            self._masters.register(optimizer)
        self._pickle_guard.install()

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        return False

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        dtensor.gather_rows(self._masters.update(optimizer), self.mesh.group("shard"))

    def state_dict(self) -> dict[str, Any]:
        self._check_at_checkpoint()
        return full_state(self.models, self.optimizers, self._masters.of)

    def local_state(self) -> None:
        return None

    def held_state(self) -> dict[str, Any]:
        self._check_at_checkpoint()
        return replicated_state(self.models, self.optimizers, self._masters.of)

    def reads_stored(self) -> bool:
        return True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_full_state(self.models, self.optimizers, self._masters.of, state)

    def close(self) -> None:
        super().close()
        self._pickle_guard.close()
        self._masters.close()
