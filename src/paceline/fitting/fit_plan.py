"""The arguments of fit that decide what happens when, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data.sources import check_limit
from paceline.errors import SettingError, check_whole, suggest
from paceline.fitting.best import Best
from paceline.fitting.history import Checkpoints

Limit = int | float | None
"""How many global batches are used: so many (an int), this part of all of them (a float), or all (None)."""


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
    interval: int | float | None  # evaluate in mid-epoch too: after so many steps, or such a part of an epoch
    limits: tuple[Limit, Limit]  # the most global batches of an epoch's training, and of an evaluation
    dry: bool  # a dry run: end after one epoch, and leave no files

    @staticmethod
    def of(
        epochs: int,
        scheduler: Any,
        checkpoints: Checkpoints | str | Path | None,
        best: Best | None,
        evaluated: tuple[str, ...] | None,
        val_check_interval: Any = None,
        limits: tuple[Limit, Limit] = (None, None),
        fast_dev_run: bool | int = False,
    ) -> Plan:
        """The plan for arguments of fit. Raises SettingError.

        evaluated: the names of the metrics that `evaluate_on` gives beside its loss; None: nothing is evaluated.
        """
        check_whole("fit", "epochs", epochs)
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
        _check_interval(val_check_interval, evaluated is not None)
        for name, limit in zip(("limit_train_batches", "limit_val_batches"), limits, strict=True):
            check_limit(f"fit({name}", limit)
        if fast_dev_run is False:
            return Plan(epochs, per_step, per_epoch, checkpoints, best, monitor, val_check_interval, limits, dry=False)
        if fast_dev_run is not True and (not isinstance(fast_dev_run, int) or fast_dev_run < 1):
            raise SettingError(
                f"fit(fast_dev_run={fast_dev_run!r}): True for one global batch, a whole number for so many, is needed."
            )
        few = int(fast_dev_run), int(fast_dev_run)
        return Plan(epochs, per_step, per_epoch, None, best, monitor, None, few, dry=True)

    @property
    def best_path(self) -> Path | None:
        """The file of the best model; None where none is written."""
        if self.best is None or self.dry:
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


def _check_interval(interval: Any, evaluates: bool) -> None:
    if interval is None:
        return
    if not evaluates:
        raise SettingError(f"fit(val_check_interval={interval!r}): nothing is evaluated. Give evaluate_on.")
    whole = isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1
    if not whole and not (isinstance(interval, float) and 0.0 < interval <= 1.0):
        raise SettingError(
            f"fit(val_check_interval={interval!r}): a whole number of optimizer steps, at least 1, or a part of an "
            "epoch, such as 0.25, is needed. Without it fit evaluates after each epoch."
        )
