"""The arguments of fit that determine when it evaluates, saves and stops, checked against each other."""

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
"""The number of global batches to use: an int, a fraction of all of them (a float), or all (None)."""


@dataclass(frozen=True)
class PerEpoch:
    """A schedule that `fit` advances after each epoch, not after each optimizer step: PerEpoch(StepLR(...))."""

    scheduler: LRScheduler


@dataclass(frozen=True)
class Plan:
    """The arguments of fit that determine when it evaluates, saves and stops, checked against each other."""

    epochs: int  # number of epochs in total
    per_step: LRScheduler | None  # schedule to advance after each optimizer step
    per_epoch: LRScheduler | None  # schedule to advance after each epoch
    checkpoints: Checkpoints | None  # where to save; None: save no checkpoints
    best: Best | None  # how to choose the best model; None: do not keep it
    monitor: str  # name of the monitored value
    interval: int | float | None  # also evaluate in mid-epoch, every N steps (int) or fraction of an epoch (float)
    limits: tuple[Limit, Limit]  # global batches per training epoch, and per evaluation
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
        """Make the plan from arguments of fit. Raises SettingError for invalid arguments.

        evaluated: the names of the metrics on `evaluate_on`, without the loss; None: nothing is evaluated.
        """
        check_whole("fit", "epochs", epochs)
        if best is not None and not isinstance(best, Best):
            raise SettingError(f"fit(best={best!r}): pass best=paceline.Best(monitor=..., mode=..., patience=...).")
        if checkpoints is not None and not isinstance(checkpoints, Checkpoints):
            checkpoints = Checkpoints(checkpoints)
        known = ["loss"] if evaluated is None else ["loss", "val_loss", *(f"val_{name}" for name in evaluated)]
        chosen = best.monitor if best is not None else None
        if chosen is not None and chosen not in known:
            hint = "" if evaluated is not None else " Nothing is evaluated: pass evaluate_on."
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
                f"fit(fast_dev_run={fast_dev_run!r}): pass True for one global batch, or an integer number of them."
            )
        few = int(fast_dev_run), int(fast_dev_run)
        return Plan(epochs, per_step, per_epoch, None, best, monitor, None, few, dry=True)

    @property
    def best_path(self) -> Path | None:
        """The file of the best model; None if none is written."""
        if self.best is None or self.dry:
            return None
        if self.best.path is not None:
            return Path(self.best.path)
        return None if self.checkpoints is None else Path(self.checkpoints.directory) / "best.safetensors"


def _schedules(scheduler: Any) -> tuple[LRScheduler | None, LRScheduler | None]:
    """(schedule per optimizer step, schedule per epoch): at most one of them, the other is None."""
    if scheduler is None:
        return None, None
    inner = scheduler.scheduler if isinstance(scheduler, PerEpoch) else scheduler
    if not isinstance(inner, LRScheduler):
        raise SettingError(
            f"fit(scheduler={type(inner).__name__}): pass a scheduler of torch.optim.lr_scheduler, which fit advances "
            "after each optimizer step, or paceline.PerEpoch(scheduler), which it advances after each epoch."
        )
    by_epoch = isinstance(scheduler, PerEpoch) or isinstance(inner, ReduceLROnPlateau)
    return (None, inner) if by_epoch else (inner, None)


def _check_interval(interval: Any, evaluates: bool) -> None:
    if interval is None:
        return
    if not evaluates:
        raise SettingError(f"fit(val_check_interval={interval!r}): nothing is evaluated. Pass evaluate_on.")
    whole = isinstance(interval, int) and not isinstance(interval, bool) and interval >= 1
    if not whole and not (isinstance(interval, float) and 0.0 < interval <= 1.0):
        raise SettingError(
            f"fit(val_check_interval={interval!r}): pass an integer number of optimizer steps, at least 1, or a "
            "fraction of an epoch, such as 0.25. Without it, fit evaluates after each epoch."
        )
