"""Updates: from complete gradients to new weights, once for each optimizer and global batch.

`step` runs when the script calls run.step. Once every loader that took part has come to the last micro-batch of its
global batch, it checks the gradients, clips them, updates, moves the schedules and clears the gradients.

Independent replicas do the same, each for its own shard, and count updates and schedules alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import ALONE
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
    """The parameters that the optimizer has now, of all its groups."""
    return list(itertools.chain.from_iterable([group["params"] for group in optimizer.param_groups]))


class Updates:
    """The updates of a run.

    Attributes:
        counts: how many updates each prepared optimizer has made.
        skipped: updates that every replica left out. skipped_alone: that this one left out while others made theirs.
        names: the name of each prepared parameter, and of each place of its gradient.
        samples: how many examples, or counted things, this process's gradient is a mean over.
        finite: checks the gradients of each global batch.
        skip: whether an update by a gradient that is not finite is left out; else it is an error.
        observers: are told of each update.
        warm_up: checks of the first global batches; None when they are over.
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
        self._parameter_counts: dict[torch.optim.Optimizer, int] = {}  # how many parameters the last check saw

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Take a prepared optimizer."""
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
        """Updates of all optimizers."""
        return sum(self.counts.values())

    @property
    def left_out(self) -> int:
        """Updates that this replica has left out."""
        return self.skipped + self.skipped_alone

    # --- an update

    def step(
        self, optimizer: torch.optim.Optimizer | None, schedulers: Sequence[Any], max_grad_norm: float | None
    ) -> bool:
        """Update if the global batch is complete. Returns whether it was."""
        if optimizer not in self.counts:
            optimizer = self.prepared(optimizer)
        places = self._store.of(parameters_of(optimizer))
        if len(places) != self._parameter_counts.get(optimizer):
            self._check_optimizer(optimizer, len(places))
        ownership = self._ownership
        opened = ownership.opened()
        if not opened or (ownership.calls == 0 and not all(one.stepped for one in opened)):
            if ownership.step_for_previous(opened):
                return False
            raise UsageError(without_backward(places))
        for one in opened:
            one.step_called = True
            if not one.request.final:
                return False
        if len(ownership.loaders) > 1:
            ownership.several.check_update(opened)
        self._store.samples = self.samples
        self.strategy.finish()
        if self._accounts.unfinished and self._accounts.unreduced(places):
            raise UsageError(NOT_IN_EVERY_MICRO_BATCH)
        self._check_gradients(places)
        if self.warm_up is not None:
            self.warm_up.before_update(optimizer, places, self.names)
            self.warm_up = None if self.warm_up.over else self.warm_up
        # What the update draws, and the script until the next yield, is alike on every replica: SGLD's noise,
        # stochastic rounding.
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        used = places
        for observer in self.observers:
            used = observer.before_update(optimizer, used)
        if self._update(optimizer, used, max_grad_norm):
            self._advance(optimizer, schedulers)
        else:
            self.skipped += 1
        self._finish_global_batch(places, opened)
        return True

    def _check_gradients(self, places: Sequence[Tensor]) -> None:
        """Raises UsageError unless backward calls of this global batch made the gradients."""
        if self._guards.foreign_gradients:
            self._guards.refuse_foreign(places)
        if self._store.others is not ALONE:  # other processes may have the gradients
            return
        reached = self._accounts.reached
        if reached is not None and reached.isdisjoint(places):
            raise UsageError(not_reached(any_gradient(places)))
        if not any_gradient(places):  # the first has one, nearly always
            raise UsageError(without_backward(places))

    def _update(self, optimizer: torch.optim.Optimizer, places: list[Tensor], max_grad_norm: float | None) -> bool:
        """Make the update. Returns False if it was skipped, on all ranks alike, for a gradient that is not finite."""
        norm = None if max_grad_norm is None else self._store.norm(places, self.device)
        scaler = self._precision.scaler
        if scaler is not None or self.skip:
            finite = self.finite.all_finite(places) if norm is None else math.isfinite(norm.item())
            if scaler is not None:
                scaler.record(not finite)
            if not finite and not self.strategy.mesh.independent:
                return False
            if not finite:  # the other replicas make theirs, and count on this one when they average
                self.skipped_alone, self._store.samples, norm = self.skipped_alone + 1, 0.0, None
                self._store.clear(places)
        else:
            self.finite.check(places, norm, self.counts, self.names)
        if norm is not None and max_grad_norm is not None:
            self._store.clip(places, max_grad_norm, norm)
        self._guards.allow(self.strategy.step, optimizer)
        return True

    def _advance(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any], updated: bool = True) -> None:
        """Count the steps that the strategy reports as completed, and move the schedules by as many.

        One step for each update; where processes are not in step, the number that all workers completed since the last
        call.
        """
        steps = self.strategy.completed(optimizer, updated)
        self.counts[optimizer] += steps
        for scheduler in [*schedulers] * steps:
            self._guards.allow(scheduler.step)

    def catch_up(self, schedulers: Sequence[Any]) -> None:
        """At the end of a pass: count the steps that other workers completed, where processes are not in step."""
        if not self.strategy.plan.in_step:
            for optimizer in self.counts:
                self._advance(optimizer, [s for s in schedulers if s.optimizer is optimizer], updated=False)

    def _finish_global_batch(self, places: Sequence[Tensor], opened: Sequence[Yield]) -> None:
        """End a global batch whose update was made or skipped: clear its gradients."""
        self._store.clear(places)
        if self._accounts.reached is not None:
            self._accounts.reached.difference_update(places)
        for one in opened:
            one.stepped = True
            one.loader.mark_stepped(one.request)
            if self._ownership.deferred and self._ownership.fetched_ahead(one.loader):
                self._reseed(one.loader)

    def _reseed(self, loader: Loader) -> None:
        """Key the random generators for the batch that the script prefetched before this update, as its yield did."""
        self._ownership.prefetched = True
        if loader.current is not None:
            part = loader.current.parts[0]
            seed_torch(loader.streams.torch_key(loader.current, part.shard, part.micro), self.device)

    # --- an optimizer that evaluates the loss itself (objective.py)

    def check_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises UsageError or NonFiniteError unless the last evaluation has left finite gradients."""
        parameters = parameters_of(optimizer)
        self._check_gradients(parameters)
        self.finite.check(parameters, None, self.counts, self.names)
        for observer in self.observers:
            observer.after_evaluation(optimizer)

    def finish_closure_update(self, optimizer: torch.optim.Optimizer, schedulers: Sequence[Any]) -> None:
        """Count an update that the optimizer has made by a closure, and end the global batch."""
        opened = [one for one in self._ownership.open.values() if one.loader.current is not None]
        seed_torch(opened[0].key ^ _UPDATE, self.device)
        self._advance(optimizer, schedulers)
        self._finish_global_batch(parameters_of(optimizer), opened)

    # --- which optimizer

    def prepared(self, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
        """This optimizer, or the only one. Raises UsageError if it is not prepared, or must be named."""
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
        """The script calls zero_grad of the optimizer of these parameters. Returns whether that must do nothing, since
        they have gradients of earlier micro-batches."""
        if self._accounts.unreduced(parameters):
            return True
        if self.warm_up is not None:
            self.warm_up.cleared(parameters)
        return False

    # --- before others look at the model

    def drain(self) -> None:
        """Finish the checks of the gradients of all steps, whose flags an accelerator's host reads late. Raises
        NonFiniteError."""
        self.finite.drain(self.made)

    def prepare_save(self) -> None:
        """Finish the checks, and give independent replicas rank 0's loss scale. All processes call it."""
        self.drain()
        scaler = self._precision.scaler
        if self.strategy.mesh.independent and scaler is not None:
            scaler.load_state_dict(collectives.broadcast_object(scaler.state_dict()))

    def synchronize(self) -> None:
        """Finish the checks, and average independent replicas into one model, before it is evaluated or when training
        ends. All processes call it. Raises NonFiniteError."""
        self.drain()
        self.strategy.synchronize()
