"""reproducible=V: training gives the same bits on any number of processes from 1 to V.

This strategy replaces `single` and `ddp`. `data_parallel` and `mirrored` do the same with the devices of one process
(replica_set.py).

Phase 1, forward and backward: each global batch is split into V shards. A process computes its shards in sequence, each
  shard with its random numbers; nothing is sent.
  Batch norm over the global batch needs sums over all shards in the middle of forward and backward. Then a
process runs each shard as a replica on one device (replica_set.py). One replica runs at a time, up to its next batch
norm; then the next one runs. Each batch
  norm exchanges one row per shard between processes, in the forward and in the backward.
Phase 2: the gradient of each shard is a leaf of a binary tree over the V shards. The tree fixes the order of additions,
  whichever process computes a shard (comm/tree_sums.py). After the last shard the processes complete the tree.
Phase 3, step: each replica makes the same update.

Traffic per step: each of n replicas sends 2 (n - 1) / n of the gradients' bytes if n is a power of two or n = V.
Otherwise the first of the two exchanges is up to 2 log2(V / n) + 2 times as large. Gradients are sent after the
backward, not during it. They are sent with flags that show which parameters have a gradient. Reading the flags waits
for the device, once a step.
Memory per replica: parameters and optimizer state once. Gradients twice, before and after they are sent, plus once for
each waiting level of the tree (about log2(V / n) levels), plus a few messages of 32 MB. With batch norm over the global
batch: the activations of all V / n shards at once, and V / n copies of the gradients and of the buffers.

Computes the same as torch.nn.parallel.DistributedDataParallel, with a different order of additions: pairwise summation
(Higham 1993, "The accuracy of floating point summation").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.replicas import crosses_replicas
from paceline.comm.tree_sums import TreeSums, ranges
from paceline.data.batch_plan import AllShards, DealtShards, one_shard
from paceline.data.shard_sizes import ShardSizes
from paceline.errors import SettingError
from paceline.strategies.base import Backward, ClosureStrategy, Term, Work, backward_here
from paceline.strategies.gradient_store import GradientStore
from paceline.strategies.replicated.buffer_guard import refuse_changes
from paceline.strategies.replicated.ddp import DDP
from paceline.strategies.replicated.replica_set import ReplicaSet
from paceline.world import World


def check(size: int | None, *, shards: int) -> None:
    """Raises SettingError if there are more processes than shards."""
    if size is not None and size > shards:
        raise SettingError(
            f"reproducible={shards}: a global batch has {shards} shards, fewer than the {size} processes. Start at "
            f"most {shards} processes, or set reproducible={size} or more (a different number gives different bits)."
        )


class Reproducible(DDP, ClosureStrategy):
    """shards: V, the number of shards per global batch."""

    def __init__(self, world: World, device: torch.device, *, shards: int) -> None:
        check(world.size, shards=shards)
        super().__init__(world, device)
        owned = ranges(shards, world.size)
        self._sums = TreeSums(shards)
        most = max(stop - start for start, stop in owned)
        if shards > 1:
            self.plan = DealtShards(shards, self._sums.mine, most, process=world.rank)
        else:
            self.plan = one_shard(1, 0)
        self._replicas: ReplicaSet | None = None  # if this process's shards need sums in the middle of a forward
        self._copies: list[dict[Tensor, Tensor]] = []
        self.store = GradientStore(replicas=self._copies, sums=self._sums)
        self._hooks: list[Any] = []
        self._began = False

    def split_by(self, sizes: ShardSizes) -> bool:
        """Shards stay of equal size, on which the bits depend. Faster processes compute more of them."""
        self.plan = self.plan.balanced(sizes)
        return isinstance(self.plan, DealtShards)

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().setup(models, optimizers)
        self._remove_hooks()
        if self.plan.shards == 1:
            return
        if self._replicas is None and not crosses_replicas(models):
            self._hooks = refuse_changes(models)
            return
        if self.plan.shard_sizes is not None:
            raise SettingError(
                f"balance=True with reproducible={self.plan.shards}: the model has batch norm over the global batch, "
                "so a process computes all its shards together, and their number cannot change. Leave out balance, or "
                "set batch_norm='shard'."
            )
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
