"""fit: the ready-made loop. Its arguments' checks and its state are in fit_state.py.

The mean loss of an epoch is exact and costs no wait for the device: losses stay tensors, are added on the device, and
are summed over the processes once, at the end of the epoch or when a checkpoint is written in the middle of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline import session
from paceline.errors import SettingError, suggest
from paceline.fitting.callbacks import Callback
from paceline.fitting.evaluate import LossFn, Metrics, check_metrics, evaluate_pass, evaluation_loader
from paceline.fitting.fit_state import Fitting, PerEpoch, Plan
from paceline.fitting.history import Best, Checkpoints, History
from paceline.run import Run
from paceline.train.messages import wrong_closure
from paceline.train.sources import DATALOADER_OPTIONS, OWN_ARGUMENTS


def fit(
    model: nn.Module,
    loss_fn: LossFn,
    train_set: Any,
    *,
    optimizer: torch.optim.Optimizer,
    global_batch: int,
    epochs: int,
    scheduler: LRScheduler | PerEpoch | None = None,
    evaluate_on: Any = None,
    metrics: Metrics | None = None,
    max_grad_norm: float | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    best: Best | None = None,
    callbacks: Sequence[Callback] = (),
    run: Run | None = None,
    **loader_options: Any,
) -> History:
    """Trains a model, under any strategy, and returns the values of each epoch.

    Args:
        model, loss_fn: loss_fn(model, batch) returns a loss, as for `run.forward_backward`.
        train_set: a data set; shuffled anew in each epoch, unless shuffle=False or a sampler is among the options.
        optimizer: of the model's parameters. Everything is prepared here, or was before.
        global_batch: examples of one optimizer step, over all devices.
        epochs: how many in all, those before a restart, and earlier ones of this run, included.
        scheduler: moved after each optimizer step; PerEpoch(scheduler) after each epoch; ReduceLROnPlateau too, with
            the value that `best` monitors, or else "val_loss", or without evaluate_on "loss".
        evaluate_on: a data set, or an evaluation loader, that `evaluate` goes through after each epoch: its values are
            "val_loss" and, for each of `metrics` (see there), "val_" and its name.
        max_grad_norm: clip the gradients' 2-norm to this.
        checkpoints: a directory, or Checkpoints(directory, keep, every): saved after each epoch, and if there is one
            already, training goes on from it, in mid-epoch too.
        best: Best(monitor, mode, patience, path): keep the best model, and stop early.
        callbacks: see `Callback`.
        run: else the one that is open, else a new one, by paceline.start().
        loader_options: micro_batch, shuffle, sampler, num_workers, collate_fn and so on, as of `run.loader`. What says
            how to read (micro_batch, workers, collate_fn) is used for `evaluate_on` too.

    A model in evaluation mode is put into training mode; single modules of it (a frozen batch norm) stay as they are.
    Raises SettingError for arguments that cannot be, and what the calls of a loop raise.
    """
    # Phase 1: prepare everything, and restore it from the last checkpoint.
    # Phase 1: everything in its place, and as it was when the last checkpoint was written.
    _check(model, loss_fn, loader_options, metrics)
    plan = Plan.of(epochs, scheduler, checkpoints, best, None if evaluate_on is None else tuple(metrics or ()))
    run = _run(run)
    run.prepare(model, optimizer, *filter(None, [plan.per_step]))
    if not model.training:
        model.train()
    loader = run.loader(train_set, **_training(global_batch, loader_options))
    test = None if evaluate_on is None else evaluation_loader(run, evaluate_on, global_batch, _reading(loader_options))
    fitting = Fitting(run, model, optimizer, loader, plan)
    fitting.restore()
    _call(callbacks, "on_start", fitting)

    # Phase 2: the epochs.
    for _ in fitting.remaining():
        _call(callbacks, "on_epoch_start", fitting)
        for batch in loader:
            fitting.add_loss(run.forward_backward(loss_fn, model, batch))
            if run.step(optimizer, max_grad_norm=max_grad_norm):
                _call(callbacks, "on_step", fitting)
                fitting.save_in_mid_epoch()
        fitting.values = {"loss": fitting.mean_loss()}
        if test is not None:
            scores = evaluate_pass(run, model, loss_fn, test, metrics)
            fitting.values |= {f"val_{name}": value for name, value in scores.items()}
            _call(callbacks, "on_evaluate", fitting)
        fitting.end_epoch()
        _call(callbacks, "on_epoch_end", fitting)
        fitting.save()

    # Phase 3: the end.
    _call(callbacks, "on_end", fitting)
    return fitting.history


def _call(callbacks: Sequence[Callback], event: str, fitting: Fitting) -> None:
    for callback in callbacks:
        getattr(callback, event)(fitting)


_own: Run | None = None  # the last run that fit started itself


def _run(given: Run | None) -> Run:
    """The given run; or the open one, if the script started it; or else a new one."""
    global _own
    if given is not None:
        return given
    found = session.current()
    if found is None or found is _own:
        found = _own = session.start()
    return found


def _check(model: Any, loss_fn: Any, options: Mapping[str, Any], metrics: Any) -> None:
    wrong = wrong_closure(loss_fn, model)
    if wrong is not None:
        raise SettingError(f"fit: {wrong}")
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"fit(model={type(model).__name__}): it trains one torch.nn.Module. For several models write the loop, "
            "with run.forward_backward and run.step."
        )
    known = (DATALOADER_OPTIONS | OWN_ARGUMENTS) - {"train"}
    for name in options:
        if name not in known and name != "batch_size":  # for which the loader has an answer of its own
            own = {name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY}
            raise SettingError(f"fit has no argument {name!r}. {suggest(name, known | own)}")
    check_metrics(metrics)


def _training(global_batch: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the training loader."""
    own_order = any(options.get(name) is not None for name in ("sampler", "batch_sampler"))
    made = {"shuffle": not own_order, "global_batch": global_batch, **options}
    return {**made, "global_batch": None} if options.get("batch_sampler") is not None else made


def _reading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the loader's options those that say how to read."""
    return {name: value for name, value in options.items() if name in DATALOADER_OPTIONS or name == "micro_batch"}
