"""local_sgd: each replica trains on its shards, and the weights are averaged every few steps.

Phase 1, forward and backward: as on one device. The gradient is the mean over the replica's shard of the global batch;
  nothing is sent.
Phase 2, step: each replica updates its weights. An empty shard makes no update.
Phase 3, every `every` steps of an optimizer: its parameters, and the models' buffers, are replaced by their mean over
  the replicas, in one all-reduce. A replica's weight is its number of examples (or tokens) since the last averaging.
Phase 3 also runs before an evaluation and before a checkpoint (`state_dict`). Before a checkpoint it averages the
  optimizers' state too.

With `warmup=N` (post-local SGD), the first N steps of an optimizer average the gradients before the update, as ddp
does. Weights are averaged only after these steps.

Traffic: each of n replicas sends 2 (n - 1) / n of the bytes of parameters and buffers, every `every` steps. With
`average_state` the optimizer's state is sent too. Memory per replica: parameters, gradients and optimizer state once
each; while averaging, one more copy of the averaged tensors, in float32 or wider.

This changes the mathematics on purpose. `every=1` is exact for an optimizer that is linear in its gradients, if its
state is averaged too: SGD without momentum, or SGD with momentum and `average_state`.

Follows Stich 2018, "Local SGD Converges Fast and Communicates Little" (arXiv 1805.09767), and for the warm-up Lin et
al. 2018, "Don't Use Large Mini-Batches, Use Local SGD" (arXiv 1808.07217, post-local SGD). By default momentum stays
local, as in these papers, in DiLoCo and in torch's PostLocalSGDOptimizer, since averaging it doubles the traffic with
SGD and triples it with Adam. `average_state` averages momentum, as Yu et al. 2019 (arXiv 1905.03817) do.
"""

from __future__ import annotations

import torch

from paceline.config import StrategySpec
from paceline.strategies.kit.one_process import line
from paceline.strategies.periodic.periodic_averaging import PeriodicAveraging, check_whole
from paceline.world import World


def check(size: int | None, *, every: int, warmup: int) -> None:
    """Raises SettingError for invalid options. The number of processes does not matter."""
    check_whole("local_sgd", "every", every, 1)
    check_whole("local_sgd", "warmup", warmup, 0)


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return spec, line("local_sgd", "trains like 'single'")


class LocalSGD(PeriodicAveraging):
    """every: steps of an optimizer between averagings of its weights. warmup: initial steps that average gradients
    instead. average_state: average the optimizers' state (momentum) with the weights."""

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
            f"strategy local_sgd changes the mathematics on purpose:{first} every process trains separate weights on "
            f"its shards, batch norm included, and the weights are averaged every {self.every} steps. (With every=1 "
            "and plain SGD, without batch norm, the result is the same.)"
        )

    def steps_to_synchronization(self) -> int:
        local = self.steps[self.optimizers[0]] - self.warmup
        return 1 if local < 0 else self.every - local % self.every

    def finish(self) -> None:
        warm = [optimizer for optimizer in self.optimizers if self.steps[optimizer] < self.warmup]
        if warm:
            self.average_gradients(warm)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        local = self.steps[optimizer] - self.warmup  # number of steps since the warm-up, without this step
        fragments = self.update(optimizer, averaged=local < 0)
        if local < 0:
            self.average((), buffers=True)
        elif (local + 1) % self.every == 0:
            self.average(fragments, buffers=True, states=[optimizer] if self.average_state else [])
