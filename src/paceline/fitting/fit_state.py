"""The arguments of fit, checked (Plan), and its state while it runs (Fitting)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.comm import collectives
from paceline.errors import SettingError, suggest
from paceline.fitting.history import Best, Checkpoints, History
from paceline.run import Run
from paceline.train.loader import Loader
from paceline.train.loss import parts_of
from paceline.train.metrics import Average, reduce_averages


@dataclass(frozen=True)
class PerEpoch:
    """A schedule that `fit` moves once after each epoch, and not after each optimizer step: PerEpoch(StepLR(...))."""

    scheduler: LRScheduler


@dataclass(frozen=True)
class Plan:
    """The arguments of fit that decide what happens when, checked against each other."""

    epochs: int  # how many in all
    per_step: LRScheduler | None  # the schedule that is moved after each optimizer step
    per_epoch: LRScheduler | None  # the schedule that is moved after each epoch
    checkpoints: Checkpoints | None  # where to save, if anywhere
    best: Best | None  # by which value the best model is kept, if one is
    monitor: str  # the name of that value

    @staticmethod
    def of(
        epochs: int,
        scheduler: Any,
        checkpoints: Checkpoints | str | Path | None,
        best: Best | None,
        evaluated: tuple[str, ...] | None,
    ) -> Plan:
        """The plan for arguments of fit. Raises SettingError.

        evaluated: the names of the metrics that `evaluate_on` gives beside its loss; None: nothing is evaluated.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
            raise SettingError(f"fit(epochs={epochs!r}): a whole number, at least 1, is needed.")
        if best is not None and not isinstance(best, Best):
            raise SettingError(f"fit(best={best!r}): write best=paceline.Best(monitor=..., mode=..., patience=...).")
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        known = ["loss"] if evaluated is None else ["loss", "val_loss", *(f"val_{name}" for name in evaluated)]
        chosen = best.monitor if best is not None else None
        if chosen is not None and chosen not in known:
            hint = "" if evaluated is not None else " Nothing is evaluated: give evaluate_on."
            raise SettingError(f"Best(monitor={chosen!r}) is not a value of this fit.{hint} {suggest(chosen, known)}")
        per_step, per_epoch = _schedules(scheduler)
        monitor = chosen or ("loss" if evaluated is None else "val_loss")
        return Plan(epochs, per_step, per_epoch, checkpoints, best, monitor)

    @property
    def best_path(self) -> Path | None:
        """The file of the best model; None where none is written."""
        if self.best is None:
            return None
        if self.best.path is not None:
            return Path(self.best.path)
        return None if self.checkpoints is None else Path(self.checkpoints.directory) / "best.safetensors"


def _schedules(scheduler: Any) -> tuple[LRScheduler | None, LRScheduler | None]:
    """(schedule moved after each step, schedule moved after each epoch)."""
    if scheduler is None:
        return None, None
    inner = scheduler.scheduler if isinstance(scheduler, PerEpoch) else scheduler
    if not isinstance(inner, LRScheduler):
        raise SettingError(
            f"fit(scheduler={type(inner).__name__}): give one of torch.optim.lr_scheduler, which is moved after each "
            "optimizer step, or paceline.PerEpoch(scheduler), which is moved after each epoch."
        )
    by_epoch = isinstance(scheduler, PerEpoch) or isinstance(inner, ReduceLROnPlateau)
    return (None, inner) if by_epoch else (inner, None)


class Fitting:
    """A fit while it runs; callbacks are handed it.

    Attributes:
        run, model, optimizer, loader: those of the fit.
        epoch: from 0.
        loss: this process's last loss, a detached 0-dim tensor.
        values: those of the epoch, once it is over.
        history: those of all epochs.
    """

    def __init__(
        self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Loader, plan: Plan
    ) -> None:
        self.run, self.model, self.optimizer, self.loader = run, model, optimizer, loader
        self.history, self.epoch, self.values = History(), 0, dict[str, float]()
        self.loss = torch.zeros((), device=run.device)
        self._plan, self._stop = plan, False
        self._mean = Average(run.device)

    def stop(self) -> None:
        """End the fit after this epoch. One process is enough."""
        self._stop = True

    # --- checkpoints

    def restore(self) -> None:
        """Restore the last checkpoint, if there is one."""
        name, plan = self.loader.name, self._plan
        self.run.track(**{f"{name} fit": self})
        if plan.per_epoch is not None:
            self.run.track(**{f"{name} schedule": plan.per_epoch})
        if plan.checkpoints is not None:
            self.run.restore(plan.checkpoints.directory, missing_ok=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "history": self.history.state_dict(),
            "loss": list(self._mean.shared),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._mean.shared = state["loss"][0], state["loss"][1]
        if self.history.best_epoch is not None:
            self.history.best_path = self._plan.best_path

    # --- the loop's own

    def remaining(self) -> Iterator[int]:
        """The epochs that are still to do."""
        if self.history.stopped_early:
            return
        for epoch in self.run.epochs(self._plan.epochs):
            self.epoch = epoch
            yield epoch
            if self._stop or self.history.stopped_early:
                return

    def add_loss(self, loss: Tensor) -> None:
        """Add a batch's loss to the mean of the epoch."""
        self.loss = loss
        for part, count in parts_of(loss):
            self._mean.add_mean(part, self.loader.examples if count is None else count)

    def mean_loss(self) -> float:
        """The mean loss over all examples (or what the loss counts) of the epoch, on all processes."""
        (value,) = reduce_averages([self._mean])
        self._mean = Average(self.run.device)
        return value

    def save_in_mid_epoch(self) -> None:
        """Save, if this step is one of those after which a checkpoint is due."""
        where = self._plan.checkpoints
        if where is not None and where.every is not None and self.run.steps % where.every == 0:
            reduce_averages([self._mean])
            self.run.save(where.directory, keep=where.keep)

    def end_epoch(self) -> None:
        """Record the epoch's values, keep the best model, move a schedule; all processes by rank 0's numbers."""
        plan = self._plan
        self.values = collectives.broadcast_object(self.values)
        self.history.add(self.values)
        if evaluated := {name: value for name, value in self.values.items() if name != "loss"}:
            self.run.log(evaluated)  # the loss is what every run shows by itself
        if plan.best is not None and self.history.update_best(plan.best, plan.monitor) and plan.best_path is not None:
            self.run.export(plan.best_path, self.model)
            self.history.best_path = plan.best_path
        if isinstance(plan.per_epoch, ReduceLROnPlateau):
            plan.per_epoch.step(self.values[plan.monitor])
        elif plan.per_epoch is not None:
            plan.per_epoch.step()

    def save(self) -> None:
        """Save a checkpoint of a whole epoch, and learn whether some process asked to stop."""
        self._stop = any(collectives.gather_objects(self._stop))
        if self._plan.checkpoints is not None:
            self.run.save(self._plan.checkpoints.directory, keep=self._plan.checkpoints.keep)
