"""Batch norm over the whole global batch, or over each shard, by the setting `batch_norm`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from paceline.comm.means import PendingMeans, greatest_
from paceline.comm.mesh import world_group
from paceline.comm.tree_sums import Tree, TreeSums
from paceline.data.batch_plan import Request
from paceline.data.loader import Loader
from paceline.errors import ModelError, UsageError
from paceline.norm import batchnorm, biases
from paceline.step.messages import FETCHED_AHEAD_IN_TURNS, batch_norm_split
from paceline.strategies.base import Strategy
from paceline.torch_private.core import BatchNormBase


class Normalisation:
    """Converts the batch norms of prepared models, and keeps their running statistics the same on all replicas.

    choice: "global" or "shard"; always "shard" for independent replicas. quiet: do not report biases that have no
    effect.
    """

    def __init__(self, choice: str, strategy: Strategy, quiet: bool = False) -> None:
        self._strategy = strategy
        # Statistics are over the global batch or over each shard. Independent replicas have separate statistics.
        self.choice = "shard" if strategy.mesh.independent else choice
        self._found: list[nn.Module] = []  # batch norms of prepared models
        self._reported = quiet  # have biases without effect been reported?
        self._in_sequence = _InSequence(strategy.plan.shards, strategy.store.sums)

    @property
    def active(self) -> bool:
        """Whether a prepared model has batch norm."""
        return bool(self._found)

    def convert(self, model: nn.Module) -> None:
        """Convert a model's batch norms. With "global", they then compute statistics over all replicas, which run at
        the same time. With "shard", they stay unchanged, except that they skip an empty shard."""
        known = set(self._found)  # from an earlier `prepare`
        present = [module for module in model.modules() if isinstance(module, BatchNormBase) and module not in known]
        if present and self.choice == "global" and self._strategy.plan.shards > 1:
            batchnorm.convert(model)
        elif self._strategy.plan.shards > 1:
            for module in present:
                module.register_forward_pre_hook(_skip_empty)
                module.register_forward_hook(_after_empty, always_call=True)
        self._found += present
        biases.convert(model)

    def on_yield(self, loader: Loader) -> None:
        """Handle a training loader's yield. Raises ModelError if statistics would not cover the whole global batch.
        The result does not depend on the number of processes, so a run can always continue with fewer processes. The
        check waits for the first yield, since a script may put batch norms into evaluation mode until then."""
        request, plan = loader.current, self._strategy.plan
        if request is None or not any(module.training for module in self._found):
            return
        if self.choice != "global":
            if plan.sequential:
                self._in_sequence.begin_yield(loader, request, self._found)
            return
        if plan.sequential:
            raise ModelError(
                f"this process computes {plan.shards} shards in sequence, but the model has batch norm over the global "
                "batch, which needs all shards at once. Use a normalisation within the example (GroupNorm, "
                "LayerNorm); or batch_norm='shard', which changes the model; or --strategy "
                "data_parallel:devices=cpu,cpu (one device per shard)."
            )
        if (cut := loader.split_alone) is not None:
            raise ModelError(batch_norm_split(loader.name, *cut))

    def average_statistics(self, models: Sequence[nn.Module], fetched_ahead: Callable[[], bool]) -> None:
        """After an update with "shard", replace running statistics by their mean over the shards, so that all replicas
        evaluate the same model. (Independent replicas average them with their weights.) fetched_ahead: returns whether
        the script already has a batch of the next global batch."""
        if self._in_sequence.begun:
            if fetched_ahead():
                raise UsageError(FETCHED_AHEAD_IN_TURNS)
            self._in_sequence.complete()
        if not self._reported and self._found:
            self._reported = True
            names = biases.without_effect(models)
            if names and world_group().rank == 0:
                print(f"paceline: {biases.note(names)}", file=sys.stderr)
        mesh, group = self._strategy.mesh, self._strategy.mesh.data
        if not self._found or self.choice != "shard" or mesh.independent or self._strategy.plan.sequential:
            return
        if group.size == 1:
            return
        buffers = [
            buffer
            for model in models
            for module in model.modules()
            if isinstance(module, BatchNormBase)
            for buffer in (module.running_mean, module.running_var)
            if isinstance(buffer, Tensor)
        ]
        if buffers:
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            mean = group.all_reduce(flat) / group.size
            for buffer, part in zip(buffers, mean.split([buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def average_computed(self, norms: Iterable[BatchNormBase]) -> None:
        """Replace recomputed running statistics by their means over the shards of all replicas. Call it after each
        replica has recomputed them as plain means over its batches. A replica's weight is its number of non-empty
        shards. Does nothing if batch norm is over the global batch. Collective."""
        group = self._strategy.mesh.data
        if self.choice != "shard" or group.size == 1:
            return
        tensors, weights, counters = list[Tensor](), list[Tensor](), list[Tensor]()
        for norm in norms:
            counter = norm.num_batches_tracked
            if isinstance(counter, Tensor):
                found = [b for b in (norm.running_mean, norm.running_var) if isinstance(b, Tensor)]
                tensors, weights, counters = tensors + found, weights + [counter] * len(found), [*counters, counter]
        for tensor, mean in zip(tensors, PendingMeans(tensors, weights, group).wait(), strict=True):
            tensor.copy_(mean)
        greatest_(counters)


class _InSequence:
    """Running statistics of shards that are computed in sequence. Each shard starts from the statistics before the
    global batch, as on a separate process. Afterwards the statistics are the mean over all shards.

    sums: adds up the shards of all processes in a fixed order. None: this process computes all shards.
    """

    def __init__(self, shards: int, sums: TreeSums | None) -> None:
        self._shards, self._sums = shards, sums
        self._leader: Loader | None = None  # the loader that began the global batch; other loaders do not count
        self._tensors: list[Tensor] = []  # running means and variances
        self._counters: list[Tensor] = []  # num_batches_tracked of each module
        self._start: list[Tensor] = []  # copies of both lists, from before the global batch
        self._most: list[Tensor] = []  # for each counter, its largest value after any shard
        self._tree = Tree(shards)  # sums the statistics after each shard
        self._shard = shards  # the current shard; `shards` means none

    def begin_yield(self, loader: Loader, request: Request, modules: Sequence[nn.Module]) -> None:
        """Handle a yield: the script is about to compute a micro-batch of a shard."""
        if self._leader is not loader and self._leader is not None and self._leader.current is not None:
            return
        if request.micro == 0:
            self._restore()  # the script may have left the last global batch early
            self._begin(loader, modules)
        shard = request.parts[0].shard
        if shard != self._shard:
            self._end_shard()
            self._restore()
            self._shard = shard

    def _begin(self, loader: Loader, modules: Sequence[nn.Module]) -> None:
        norms = [module for module in modules if isinstance(module, BatchNormBase)]
        buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
        self._tensors = [buffer for buffer in buffers if isinstance(buffer, Tensor)]
        self._counters = [n.num_batches_tracked for n in norms if isinstance(n.num_batches_tracked, Tensor)]
        self._start = [buffer.clone() for buffer in (*self._tensors, *self._counters)]
        self._most = [counter.clone() for counter in self._counters]
        self._leader, self._tree, self._shard = loader, Tree(self._shards), self._shards

    def _restore(self) -> None:
        for buffer, start in zip((*self._tensors, *self._counters), self._start, strict=False):
            buffer.copy_(start)

    def _end_shard(self) -> None:
        """Record the statistics after the current shard."""
        if self._shard < self._shards:
            self._tree.put(self._shard, [buffer.clone() for buffer in self._tensors])
            self._most = [torch.maximum(a, b) for a, b in zip(self._most, self._counters, strict=True)]

    @property
    def begun(self) -> bool:
        """Whether a global batch has begun and is not complete."""
        return self._leader is not None

    def complete(self) -> None:
        """Average the statistics when all shards of the global batch have been computed."""
        self._end_shard()
        if self._sums is None:
            ((_, sums),) = self._tree.partial
        else:
            sums = self._sums.gradients(self._tree, self._tensors, "running statistics")
        for buffer, total in zip(self._tensors, sums, strict=True):
            assert total is not None
            buffer.copy_(total / self._shards)
        if self._most:
            most = world_group().all_reduce(torch.stack(self._most), op="max")
            for counter, count in zip(self._counters, most.unbind(), strict=True):
                counter.copy_(count)
        self._leader, self._start = None, []


_SKIPPED: Final = "_paceline_passed_over"


def _skip_empty(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Switch to evaluation mode for an empty input in training, which would make the running statistics NaN."""
    if module.training and inputs[0].numel() == 0:
        module.training = False
        setattr(module, _SKIPPED, True)


def _after_empty(module: nn.Module, *_: object) -> None:
    if getattr(module, _SKIPPED, False):
        module.training = True
        delattr(module, _SKIPPED)


def batch_norms(model: nn.Module) -> list[BatchNormBase]:
    """The batch norms of a model that keep running statistics."""
    return [m for m in model.modules() if isinstance(m, BatchNormBase) and m.running_mean is not None]
