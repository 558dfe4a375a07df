"""Updates: from complete gradients to new weights, once per optimizer and global batch.

`step` runs when the script calls run.step. It acts when every participating loader is at the last micro-batch of its
global batch: it checks the gradients, clips them, updates, steps the schedules and clears the gradients.

Independent replicas do the same, each for its shard, and make equal numbers of updates and schedule steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.mesh import ALONE, world_group
from paceline.data.loader import Loader
from paceline.data.randomness import seed_torch, tag
from paceline.errors import UsageError
from paceline.step.accounts import Accounts
from paceline.step.finite import FiniteWatch
from paceline.step.guards import Guards
from paceline.step.messages import (
    CLOSURE_OF_AN_OPTIMIZER,
    NOT_IN_EVERY_MICRO_BATCH,
    not_reached,
    unprepared,
    which_optimizer,
    without_backward,
)
from paceline.step.observer import StepObserver
from paceline.step.ownership import Ownership
from paceline.step.precision import Precision
from paceline.step.preparable import needs_closure
from paceline.step.warm_up import WarmUp
from paceline.step.yields import Yield
from paceline.strategies.base import Strategy, Weight
from paceline.strategies.gradient_store import any_gradient
from paceline.strategies.kit.named_parameters import check_known

_UPDATE = tag("update")


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The current parameters of the optimizer, from all its groups."""
    return list(itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups]))


class Updates:
    """The updates of a run.

    Attributes:
        counts: for each prepared optimizer, the number of updates so far.
        skipped: the number of updates that every replica skipped.
        skipped_alone: the number of updates that this replica skipped while other replicas made them.
        names: the name of each prepared parameter. The tensor that holds the gradient has the same name.
        samples: the number of examples, or counted items, in this process's gradient.
        finite: checks the gradients of each global batch.
        skip: whether to skip an update with a gradient that is not finite; otherwise it is an error.
        observers: called at each update.
        warm_up: checks of the first global batches; None when they are done.
    """

    def __init__(
        self,
        strategy: Strategy,
        ownership: Ownership,
        accounts: Accounts,
        precision: Precision,
        guards: Guards,
        warm_up: WarmUp,
        *,
        device: torch.device,
        skip: bool,
        nonfinite_every: int,
    ) -> None:
        self.strategy, self._store = strategy, strategy.store
        self._ownership, self._accounts, self._precision, self._guards = ownership, accounts, precision, guards
        self.device, self.skip = device, skip
        self.counts: dict[torch.optim.Optimizer, int] = {}
        self.skipped = self.skipped_alone = 0
        self.names: dict[Tensor, str] = {}
        self.samples: Weight = 0.0
        self.finite = FiniteWatch(strategy.store, strategy.mesh, device, nonfinite_every)
        self.warm_up: WarmUp | None = warm_up
        self.observers: Sequence[StepObserver] = ()
        self._parameter_counts: dict[torch.optim.Optimizer, int] = {}  # the number of parameters at the last check

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Add a prepared optimizer."""
        self.counts[optimizer] = 0
        self._ownership.optimizers = len(self.counts)
        if len(self.counts) > 1 and self._accounts.reached is None:
            self._accounts.reached = set()
        self._guards.watch_optimizer(optimizer, self.keeps_gradients)

    def follow(self, names: Mapping[Tensor, str]) -> None:
        """Set the names of all prepared parameters."""
        self.names.clear()
        self.names.update(self._store.follow(names))

    @property
    def made(self) -> int:
        """The number of updates of all optimizers."""
        return sum(self.counts.values())

    @property
    def left_out(self) -> int:
        """The number of updates that this replica has skipped."""
        return self.skipped + self.skipped_alone

    # --- an update

    def step(
        self, optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any], max_grad_norm: float | None
    ) -> bool:
        """Make the update if the global batch is complete. Returns whether it is complete."""
        if optimizer not in self.counts:
            optimizer = self.prepared(optimizer)
        holders = self._store.of(parameters_of(optimizer))
        if len(holders) != self._parameter_counts.get(optimizer):
            self._check_optimizer(optimizer, len(holders))
        ownership = self._ownership
        opened = ownership.opened()
        if not opened or (ownership.calls == 0 and not all(one.stepped for one in opened)):
            if ownership.step_for_previous(opened):
                return False
            raise UsageError(without_backward(holders))
        for one in opened:
            one.step_called = True
            if not one.request.final:
                return False
        if len(ownership.loaders) > 1:
            ownership.several.check_update(opened)
        self._store.samples = self.samples
        self.strategy.finish()
        if self._accounts.unfinished and self._accounts.unreduced(holders):
            raise UsageError(NOT_IN_EVERY_MICRO_BATCH)
        self._check_gradients(holders)
        if self.warm_up is not None:
            self.warm_up.before_update(optimizer, holders, self.names)
            self.warm_up = None if self.warm_up.over else self.warm_up
        # Every replica must draw the same random numbers in the update (SGLD's noise, stochastic rounding), and in the
        # script until the next yield.
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        used = holders
        for observer in self.observers:
            used = observer.before_update(optimizer, used)
        if self._update(optimizer, used, max_grad_norm):
            self._advance(optimizer, schedulers)
        else:
            self.skipped += 1
        self._finish_global_batch(holders, opened)
        return True

    def _check_gradients(self, holders: Sequence[Tensor]) -> None:
        """Raises UsageError unless backward calls of this global batch made the gradients."""
        if self._guards.foreign_gradients:
            self._guards.refuse_foreign(holders)
        if self._store.model_parallel is not ALONE:  # other processes may have the gradients
            return
        reached = self._accounts.reached
        if reached is not None and reached.isdisjoint(holders):
            raise UsageError(not_reached(any_gradient(holders)))
        if not any_gradient(holders):  # fast: nearly always the first tensor has a gradient
            raise UsageError(without_backward(holders))

    def _update(self, optimizer: torch.optim.Optimizer, holders: list[Tensor], max_grad_norm: float | None) -> bool:
        """Make the update, and return True. If a gradient is not finite, all ranks may skip it and return False."""
        norm = None if max_grad_norm is None else self._store.norm(holders, self.device)
        scaler = self._precision.scaler
        if scaler is not None or self.skip:
            finite = self.finite.all_finite(holders) if norm is None else math.isfinite(norm.item())
            if scaler is not None:
                scaler.record(not finite)
            if not finite and not self.strategy.mesh.independent:
                return False
            if not finite:  # the other replicas do update, and need this replica at the next averaging
                self.skipped_alone, self._store.samples, norm = self.skipped_alone + 1, 0.0, None
                self._store.clear(holders)
        else:
            self.finite.check(holders, norm, self.counts, self.names)
        if norm is not None and max_grad_norm is not None:
            self._store.clip(holders, max_grad_norm, norm)
        self._guards.allow(self.strategy.step, optimizer)
        return True

    def _advance(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], updated: bool = True) -> None:
        """Count the completed steps that the strategy reports, and step the schedules once for each of these steps.

        Usually the strategy reports one step per update. If processes do not run in step, it reports the number of
        steps that all workers together completed since the last call.
        """
        steps = self.strategy.completed(optimizer, updated)
        self.counts[optimizer] += steps
        for scheduler in [*schedulers] * steps:
            self._guards.allow(scheduler.step)

    def catch_up(self, schedulers: Sequence[Any]) -> None:
        """If processes do not run in step, count the steps of other workers. Called at the end of a pass."""
        if not self.strategy.plan.in_step:
            for optimizer in self.counts:
                self._advance(optimizer, [s for s in schedulers if s.optimizer is optimizer], updated=False)

    def _finish_global_batch(self, holders: Sequence[Tensor], opened: Sequence[Yield]) -> None:
        """Clear the gradients of a global batch after its update was made or skipped."""
        self._store.clear(holders)
        if self._accounts.reached is not None:
            self._accounts.reached.difference_update(holders)
        for one in opened:
            one.stepped = True
            one.loader.mark_stepped(one.request)
            if self._ownership.deferred and self._ownership.fetched_ahead(one.loader):
                self._reseed(one.loader)

    def _reseed(self, loader: Loader) -> None:
        """Seed the generators again, as at the yield, for the batch that the script fetched before this update."""
        self._ownership.prefetched = True
        if loader.current is not None:
            part = loader.current.parts[0]
            seed_torch(loader.streams.torch_key(loader.current, part.shard, part.micro), self.device)

    # --- an optimizer that evaluates the loss itself (objective.py)

    def check_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError or NonFiniteError unless the last evaluation left finite gradients."""
        parameters = parameters_of(optimizer)
        self._check_gradients(parameters)
        self.finite.check(parameters, None, self.counts, self.names)
        for observer in self.observers:
            observer.after_evaluation(optimizer)

    def finish_closure_update(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
        """Count an update that the optimizer has made with a closure, and end the global batch."""
        opened = [one for one in self._ownership.open.values() if one.loader.current is not None]
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        self._advance(optimizer, schedulers)
        self._finish_global_batch(parameters_of(optimizer), opened)

    # --- which optimizer

    def prepared(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """This optimizer; for None, the only prepared optimizer.

        Raises UsageError if this optimizer is not prepared, or if it is None and not exactly one is prepared.
        """
        if optimizer in self.counts:
            return optimizer
        if optimizer is not None:
            raise UsageError(unprepared(type(optimizer).__name__))
        if len(self.counts) != 1:
            raise UsageError(which_optimizer(len(self.counts)))
        return next(iter(self.counts))

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, count: int) -> None:
        """Raises UsageError if the optimizer has parameters that no prepared model has, or needs a closure."""
        if needs_closure(optimizer):
            raise UsageError(CLOSURE_OF_AN_OPTIMIZER.format(type(optimizer).__name__))
        check_known(optimizer, self.names)
        self._parameter_counts[optimizer] = count

    def keeps_gradients(self, parameters: list[Tensor]) -> bool:
        """Whether zero_grad must do nothing, since these parameters have gradients of earlier micro-batches.

        Called by the zero_grad of an optimizer, with its parameters.
        """
        if self._accounts.unreduced(parameters):
            return True
        if self.warm_up is not None:
            self.warm_up.cleared(parameters)
        return False

    # --- before the model is evaluated, saved or exported

    def drain(self) -> None:
        """Read the remaining finite flags, since accelerators read them late. Raises NonFiniteError."""
        self.finite.drain(self.made)

    def prepare_save(self) -> None:
        """Read the remaining finite flags, and broadcast rank 0's loss scale. Collective."""
        self.drain()
        scaler = self._precision.scaler
        if scaler is not None:
            scaler.load_state_dict(world_group().broadcast(scaler.state_dict()))

    def synchronize(self) -> None:
        """Read the remaining finite flags, and average independent replicas into one model. Collective.

        Called before an evaluation and at the end of training. Raises NonFiniteError.
        """
        self.drain()
        self.strategy.synchronize()
