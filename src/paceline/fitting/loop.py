"""fit: the ready-made loop. The checks of its arguments are in fit_plan.py, its state in fit_state.py.

The mean loss of an epoch is exact and never waits for the device: losses stay tensors, are added on the device, and are
summed over the processes once, at the end of the epoch or at a checkpoint in mid-epoch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline import notebook, session
from paceline.data.loader import Loader
from paceline.data.sources import DATALOADER_OPTIONS, PACELINE_ARGUMENTS
from paceline.errors import SettingError, suggest
from paceline.fitting.best import Best
from paceline.fitting.callbacks import Callback
from paceline.fitting.evaluate import LossFn, Metrics, check_metrics, evaluate_pass, evaluation_loader
from paceline.fitting.fit_plan import Limit, PerEpoch, Plan
from paceline.fitting.fit_state import Fitting
from paceline.fitting.history import Checkpoints, History
from paceline.fitting.metric_target import Target, check_target
from paceline.fitting.model_loss import ModelLoss, used_columns
from paceline.run import Run
from paceline.step.messages import wrong_closure


def fit(
    model: nn.Module,
    loss_fn: LossFn | None,
    train_set: Any,
    *,
    optimizer: torch.optim.Optimizer,
    global_batch: int | Mapping[int, int],
    epochs: int,
    scheduler: LRScheduler | PerEpoch | None = None,
    evaluate_on: Any = None,
    metrics: Metrics | None = None,
    target: Target = None,
    val_check_interval: int | float | None = None,
    limit_train_batches: Limit = None,
    limit_val_batches: Limit = None,
    fast_dev_run: bool | int = False,
    max_grad_norm: float | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    best: Best | None = None,
    callbacks: Sequence[Callback] = (),
    run: Run | None = None,
    **loader_options: Any,
) -> History:
    """Trains a model, under any strategy, and returns the values of each epoch.

    Args:
        model, loss_fn: loss_fn(model, batch) returns a loss, as for `run.forward_backward`. None: the loss that the
            model computes, model(**batch).loss, as in Hugging Face's models. A mean over labels, such as tokens, is
            weighted by the number of labels other than -100. If fit cannot determine the weight of the loss, it
            warns or raises an error.
        train_set: a data set. It is reshuffled in each epoch, unless the options include shuffle=False or a sampler.
        optimizer: an optimizer of the model's parameters. fit prepares everything that is not yet prepared.
        global_batch: examples per optimizer step, over all devices. {0: 64, 4: 128} means 128 from epoch 4 on.
        epochs: the total number, including epochs before a restart and earlier epochs of this run.
        scheduler: advanced after each optimizer step. PerEpoch(scheduler) and ReduceLROnPlateau are advanced after each
            epoch. ReduceLROnPlateau gets the value that `best` monitors (default "val_loss", or "loss" without
            evaluate_on).
        evaluate_on: a data set, or an evaluation loader, to evaluate after each epoch. The values are "val_loss" and,
            for each of `metrics`, "val_" and its name. For `metrics` and `target`, see `evaluate`.
        val_check_interval: also evaluate in mid-epoch, every N optimizer steps of the run (int) or every fraction of an
            epoch (float, such as 0.25).
        limit_train_batches, limit_val_batches: use at most this number (int) or fraction (float) of the global batches
            in each epoch, and in each evaluation.
        fast_dev_run: a dry run: one epoch of one global batch (True) or of N (int), also for `evaluate_on`. It reads
            and writes no checkpoints and no best model.
        max_grad_norm: clip the gradients' 2-norm to this.
        checkpoints: a directory, or Checkpoints(directory, keep, every). fit saves a checkpoint there after each epoch.
            If the directory contains a checkpoint already, training resumes from it, also in mid-epoch.
        best: Best(monitor, mode, patience, path): keep the best model, and stop early.
        callbacks: see `Callback`.
        run: default: the open run, or a new one from paceline.start().
        loader_options: micro_batch, shuffle, sampler, num_workers, collate_fn and so on, as in `run.loader`. The
            options for reading (micro_batch, workers, collate_fn) also apply to `evaluate_on`.

    If the model is in evaluation mode, fit puts it into training mode, with all submodules. If it is in training mode,
    submodules in evaluation mode (such as a frozen batch norm) stay in evaluation mode. Raises SettingError for invalid
    arguments, and the errors of run.forward_backward, run.step and the other calls of the loop.
    """
    # Phase 1: prepare everything, and restore it from the last checkpoint.
    _check(model, loss_fn, loader_options, metrics)
    check_target(target)
    if loss_fn is None:
        loss_fn = ModelLoss()
        train_set, evaluate_on = used_columns(train_set, model), used_columns(evaluate_on, model)
    names = None if evaluate_on is None else tuple(metrics or ())
    limits = limit_train_batches, limit_val_batches
    plan = Plan.of(epochs, scheduler, checkpoints, best, names, val_check_interval, limits, fast_dev_run)
    run = _run(run)
    run.prepare(model, optimizer, *filter(None, [plan.per_step]))
    if not model.training:
        model.train()
    loader = run.loader(train_set, **_training(global_batch, loader_options, plan.limits[0]))
    evaluation = None
    if evaluate_on is not None:
        at_once = min(global_batch.values()) if isinstance(global_batch, Mapping) else global_batch
        test = evaluation_loader(run, evaluate_on, at_once, _reading(loader_options, plan.limits[1]))
        evaluation = functools.partial(evaluate_pass, run, model, loss_fn, test, metrics, target)
    again = functools.cache(functools.partial(_once_more, run, train_set, loader.name, loader_options, plan.limits[0]))
    forward = functools.partial(_forward_pass, run, model, loss_fn, loader, again)
    fitting = Fitting(run, model, optimizer, loader, plan, callbacks, evaluation, forward)
    fitting.restore()
    fitting.call("on_start")

    # Phase 2: the epochs.
    try:
        for _ in fitting.remaining():
            fitting.call("on_epoch_start")
            for batch in loader:
                fitting.add_loss(run.forward_backward(loss_fn, model, batch))
                if run.step(optimizer, max_grad_norm=max_grad_norm) and fitting.end_step():
                    break
            fitting.end_epoch()
    except KeyboardInterrupt as error:
        notebook.shorten(
            error, f"KeyboardInterrupt: fit was interrupted in epoch {fitting.epoch + 1}, after step {run.steps}."
        )
        raise

    # Phase 3: finish.
    fitting.call("on_end")
    run.wait_for_save()
    return fitting.history


def _forward_pass(
    run: Run, model: nn.Module, loss_fn: LossFn, training: Loader, again: Callable[[int | None], Loader]
) -> None:
    with torch.no_grad():
        for batch in again(training.global_batch):
            with run.autocast():
                loss_fn(model, batch)


def _once_more(
    run: Run, train_set: Any, name: str, options: Mapping[str, Any], limit: Limit, global_batch: int | None
) -> Loader:
    """Return a loader that reads an epoch's training data again, not shuffled, without affecting the training. It is
    created once and has a separate name, so that dropout draws the same numbers in each pass, also after a restart."""
    kept = {key: value for key, value in options.items() if key not in ("shuffle", "shuffle_buffer", "name")}
    if options.get("batch_sampler") is not None:
        global_batch = None  # the batch sampler makes the batches
    kept |= {"name": f"{name} again", "global_batch": global_batch, "limit_batches": limit}
    return run.loader(train_set, train=False, **kept)


_started: Run | None = None  # the last run that fit has started


def _run(given: Run | None) -> Run:
    """Return the given run, otherwise the open run if the script started it, otherwise a new run."""
    global _started
    if given is not None:
        return given
    found = session.current()
    if found is None or found is _started:
        found = _started = session.start()
    return found


def _check(model: Any, loss_fn: Any, options: Mapping[str, Any], metrics: Any) -> None:
    wrong = None if loss_fn is None else wrong_closure(loss_fn, model)
    if wrong is not None:
        raise SettingError(f"fit: {wrong}")
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"fit(model={type(model).__name__}): fit trains one torch.nn.Module. For several models write the loop, "
            "with run.forward_backward and run.step."
        )
    known = (DATALOADER_OPTIONS | PACELINE_ARGUMENTS) - {"train", "limit_batches"}
    for name in options:
        if name not in known and name != "batch_size":  # the loader has an error message for batch_size
            named = {name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY}
            raise SettingError(f"fit has no argument {name!r}. {suggest(name, known | named)}")
    check_metrics(metrics)


def _training(global_batch: int | Mapping[int, int], options: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
    """The options of the training loader."""
    custom_order = any(options.get(name) is not None for name in ("sampler", "batch_sampler"))
    made = {"shuffle": not custom_order, "global_batch": global_batch, "limit_batches": limit, **options}
    return {**made, "global_batch": None} if options.get("batch_sampler") is not None else made


def _reading(options: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
    """The options of the evaluation loader: the training loader's options for reading, and the limit."""
    reading = {name: value for name, value in options.items() if name in DATALOADER_OPTIONS or name == "micro_batch"}
    return reading if limit is None else {**reading, "limit_batches": limit}
