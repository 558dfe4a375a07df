"""local_sgd: each replica trains on its own shards, and every so often the weights are averaged.

Phase 1, forward and backward: as on one device. The gradient is the mean over the replica's own shard of the global
  batch; nothing travels.
Phase 2, step: each replica updates its own weights. An empty shard makes no update.
Phase 3, every `every` steps of an optimizer: its parameters, and the models' buffers, become their mean over the
  replicas, in one all-reduce. A replica's weight is its number of examples (or tokens) since the last one.
Phase 3 also comes before an evaluation, and before a checkpoint (`state_dict`), then with the optimizers' state.

With `warmup=N`, post-local SGD, the first N steps of an optimizer average gradients before the update instead, as ddp
does, and weights only afterwards.

Between replicas: parameters and buffers, 2 (n - 1) / n of their bytes sent by each of n replicas, every `every` steps;
with `average_state` the optimizer's state too. Memory per replica: parameters, gradients and optimizer state once each;
while averaging, what is sent once more, in float32 or wider.

This changes the mathematics on purpose. `every=1` is exact with an optimizer that is linear in its gradients and whose
state is averaged too: SGD without momentum; or with it, and average_state.

Follows Stich 2018, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), and for the warm-up Lin et
al. 2018, "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217, post-local SGD). Momentum stays local unless
`average_state` says otherwise, as it does there, in DiLoCo, and in torch's own PostLocalSGDOptimizer: to average it too
costs twice the bytes with SGD and three times with Adam. (Yu et al. 2019, arXiv 1905.03817, average it.)
"""

from __future__ import annotations

import torch

from paceline.config import StrategySpec
from paceline.strategies.kit.one_process import line
from paceline.strategies.periodic.periodic_averaging import PeriodicAveraging, check_whole
from paceline.world import World


def check(size: int | None, *, every: int, warmup: int) -> None:
    """Raises SettingError for what cannot work, on any number of processes."""
    check_whole("local_sgd", "every", every, 1)
    check_whole("local_sgd", "warmup", warmup, 0)


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return spec, line("local_sgd", "trains as 'single' does here")


class LocalSGD(PeriodicAveraging):
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
        super().__init__(world, device)
        self.every, self.warmup, self.average_state = every, warmup, average_state

    def announcement(self) -> str:
        if self.world.size == 1:
            return ""
        first = f" after {self.warmup} steps that average gradients" if self.warmup else ""
        return (
            f"strategy local_sgd changes the mathematics on purpose:{first} every process trains its own weights on "
            f"its own shards, batch norm included, and they are averaged every {self.every} steps. (With every=1 and "
            "plain SGD, without batch norm, it is the same.)"
        )

    def steps_to_meeting(self) -> int:
        local = self.steps[self.optimizers[0]] - self.warmup
        return 1 if local < 0 else self.every - local % self.every

    def finish(self) -> None:
        warm = [optimizer for optimizer in self.optimizers if self.steps[optimizer] < self.warmup]
        if warm:
            self.average_gradients(warm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        local = self.steps[optimizer] - self.warmup  # steps after the warm-up, before this one
        fragments = self.update(optimizer, averaged=local < 0)
        if local < 0:
            self.average((), buffers=True)
        elif (local + 1) % self.every == 0:
            self.average(fragments, buffers=True, states=[optimizer] if self.average_state else [])
