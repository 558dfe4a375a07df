"""reproducible=V: the same bits on any number of processes from 1 to V. It replaces `single` and `ddp`; `data_parallel`
and `mirrored` do the same with the devices of one process (replica_set.py).

Phase 1, forward and backward: each global batch is cut into V shards. A process computes its shards in sequence, each
  with the random numbers of the shard; nothing travels.
  Batch norm over the global batch needs sums over all shards in the middle of forward and backward. The shards of a
  process are then replicas on one device (replica_set.py), which take turns from one batch norm to the next. Between
  processes a row for each shard travels there, in both directions.
Phase 2: the gradient of each shard is a leaf of a binary tree over the V shards. The tree determines the order of
  additions, wherever shards were computed (comm/tree_sums.py). After the last shard the processes complete it.
Phase 3, step: each replica makes the same update.

Between replicas: gradients, 2 (n - 1) / n of their bytes sent by each of n a step where n is a power of two or n = V,
else up to 2 log2(V / n) + 2 times as many in the first half; after the backward and not during it. With them a number
for each parameter says which have a gradient; reading that waits for the device, once a step.
Memory per replica: parameters and optimizer state once; gradients twice, before and after they travel, and once more
for each level of the tree that waits (about log2(V / n)); and a few messages of 32 MB. With batch norm over the global
batch the activations of all V / n shards, as of one large batch, and V / n gradients and copies of the buffers.

Computes what torch.nn.parallel.DistributedDataParallel does, in another order of additions: pairwise summation (Higham
1993, "The accuracy of floating point summation").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.replicas import crosses_replicas
from paceline.comm.tree_sums import TreeSums, ranges
from paceline.data.batch_plan import AllShards, ShardsInSequence, one_shard
from paceline.errors import SettingError
from paceline.strategies.base import Backward, ClosureStrategy, Term, Work, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.replicated.buffer_guard import refuse_changes
from paceline.strategies.replicated.ddp import DDP
from paceline.strategies.replicated.replica_set import ReplicaSet
from paceline.world import World


def check(size: int | None, *, shards: int) -> None:
    """Raises SettingError for more processes than shards."""
    if size is not None and size > shards:
        raise SettingError(
            f"reproducible={shards}: a global batch is cut into {shards} shards, which {size} processes cannot share. "
            f"Start at most {shards} processes, or set reproducible={size} or more (another number gives other bits)."
        )


class Reproducible(DDP, ClosureStrategy):
    """shards: V."""

    def __init__(self, world: World, device: torch.device, *, shards: int) -> None:
        check(world.size, shards=shards)
        super().__init__(world, device)
        owned = ranges(shards, world.size)
        self._sums = TreeSums(shards)
        most = max(stop - start for start, stop in owned)
        self.plan = one_shard(1, 0) if shards == 1 else ShardsInSequence(shards, self._sums.mine, most)
        self._replicas: ReplicaSet | None = None  # where this process's shards need sums in the middle of a forward
        self._copies: list[dict[Tensor, Tensor]] = []
        self.store = GradientStore(replicas=self._copies, sums=self._sums)
        self._hooks: list[Any] = []
        self._began = False

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().setup(models, optimizers)
        self._remove_hooks()
        if self.plan.shards == 1:
            return
        if self._replicas is None and not crosses_replicas(models):
            self._hooks = refuse_changes(models)
            return
        if self._replicas is None:
            self.plan = AllShards(self.plan.shards, self.plan.mine)
            self._replicas = ReplicaSet([self.device], sums=self._sums)
            self._replicas.copies = self._copies
        self._replicas.setup(models)

    def forward_backward(self, work: Work) -> list[list[Term]]:
        assert self._replicas is not None
        self._compare_once()
        self._replicas.follow(work.call)
        return self._replicas.forward_backward(work, lambda: None)

    def backward(self, work: Backward) -> None:
        if work.final:
            self._compare_once()
        backward_here(work)

    def step_by_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> bool:
        return False

    def _compare_once(self) -> None:
        if not self._began and self.world.size > 1:
            self._began = True
            self._check_at_start()

    def close(self) -> None:
        self._remove_hooks()
        if self._replicas is not None:
            self._replicas.close()
        super().close()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
