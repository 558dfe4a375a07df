"""local_sgd: each replica trains on its own shards, and every so often the weights are averaged.

Phase 1, forward and backward: as on one device. The gradient is the mean over the replica's own shard of the global
  batch; nothing travels.
Phase 2, step: each replica updates its own weights. An empty shard makes no update.
Phase 3, every `every` steps of an optimizer: its parameters, and the buffers of the models, become their mean over the
  replicas, in one all-reduce. A replica counts by the examples (or tokens) that it has seen since the last one.
Whenever the model is looked at, as by an evaluation loader, phase 3 is made before it; for a checkpoint (`state_dict`)
of the optimizers' state too.

With `warmup=N`, post-local SGD, the first N steps of an optimizer average gradients before the update instead, as ddp
does, and weights only afterwards.

Between replicas: parameters and buffers, 2 (n - 1) / n of their bytes sent by each of n replicas, every `every` steps;
with `average_state` the optimizer's state too. Memory per replica: parameters, gradients and optimizer state once each;
while averaging, what is sent once more, in float32 or wider.

This changes the mathematics on purpose. What stays exact is `every=1` with an optimizer that is linear in its gradients
and whose state is averaged too: SGD without momentum; or with it, and average_state.

Follows Stich 2018, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), and for the warm-up Lin et
al. 2018, "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217, post-local SGD). Momentum stays local unless
`average_state` says otherwise, as it does there, in DiLoCo, and in torch's own PostLocalSGDOptimizer: to average it too
costs twice the bytes with SGD and three times with Adam. (Yu et al. 2019, arXiv 1905.03817, average it.)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.comm.mesh import Mesh
from paceline.errors import SettingError
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.batch_plan import one_shard
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.periodic_averaging import PeriodicAveraging
from paceline.strategies.replicated import load_replicated, replicated_state
from paceline.world import World


def check(size: int | None, *, every: int, warmup: int) -> None:
    """Raises SettingError for what cannot work, on any number of processes."""
    check_whole("local_sgd", "every", every, 1)
    check_whole("local_sgd", "warmup", warmup, 0)


class LocalSGD(LoopStrategy):
    """every: steps of an optimizer from one averaging of its weights to the next. warmup: steps that average gradients
    first. average_state: average the optimizers' state (momentum) with the weights."""

    def __init__(
        self,
        world: World,
        device: torch.device,
        *,
        every: int = 8,
        warmup: int = 0,
        average_state: bool = False,
    ) -> None:
        check(world.size, every=every, warmup=warmup)
        self.world, self.device = world, device
        self.mesh = Mesh(device, world.rank, {"replicate": world.size}, independent=True)
        self.plan = one_shard(world.size, world.rank, independent=True)
        self.every, self.warmup, self.average_state = every, warmup, average_state
        self.store = GradientStore()
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._apart = PeriodicAveraging(device)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not self.models and self.world.size > 1:
            first = f" after {self.warmup} steps that average gradients" if self.warmup else ""
            say(
                self.world,
                f"strategy local_sgd changes the mathematics on purpose:{first} every process trains its own weights "
                f"on its own shards, batch norm included, and they are averaged every {self.every} steps. (With "
                "every=1 and plain SGD, without batch norm, it is the same.)",
            )
        self.models, self.optimizers = list(models), list(optimizers)
        self._apart.setup(models, optimizers)

    def backward(self, work: Backward) -> None:
        backward_here(work)

    def finish(self) -> None:
        warm = [optimizer for optimizer in self.optimizers if self._apart.steps[optimizer] < self.warmup]
        if warm:
            self._apart.average_gradients(warm, self.store.samples)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        local = self._apart.steps[optimizer] - self.warmup  # before this one
        parts = self._apart.update(optimizer, self.store.samples, together=local < 0)
        if local < 0:
            self._apart.average((), buffers=True)
        elif (local + 1) % self.every == 0:
            self._apart.average(parts, buffers=True, states=[optimizer] if self.average_state else [])

    def synchronize(self) -> None:
        self._apart.synchronize()

    def synchronized(self) -> bool:
        return not self._apart.differ()

    def state_dict(self) -> dict[str, Any]:
        """{"apart": {"steps": of each optimizer}} beside what every strategy has. The replicas go on from it."""
        self._apart.average(
            [part for parts in self._apart.parts.values() for part in parts], buffers=True, states=self.optimizers
        )
        apart = {"steps": [self._apart.steps[optimizer] for optimizer in self.optimizers]}
        return {**replicated_state(self.models, self.optimizers), "apart": apart}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)
        load_steps(self._apart, self.optimizers, state)


def load_steps(apart: PeriodicAveraging, optimizers: Sequence[torch.optim.Optimizer], state: dict[str, Any]) -> None:
    """Where in its round each optimizer is; at the beginning, where the checkpoint is of another strategy."""
    steps = [*state.get("apart", {}).get("steps", []), *[0] * len(optimizers)]
    apart.steps = dict(zip(optimizers, map(int, steps), strict=False))
    apart.forget()


def check_whole(strategy: str, option: str, value: object, least: int) -> None:
    """Raises SettingError where an option is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"strategy {strategy}: {option}={value!r}: a whole number from {least} on is needed.")


def say(world: World, text: str) -> None:
    """Says it once, on rank 0."""
    if world.rank == 0:
        print(f"paceline: {text}", file=sys.stderr)
