"""fit: the ready-made loop. The checks of its arguments are in fit_plan.py, its state in fit_state.py.

The mean loss of an epoch is exact and costs no wait for the device: losses stay tensors, are added on the device, and
are summed over the processes once, at the end of the epoch or when a checkpoint is written in the middle of it.
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
from paceline.data.sources import DATALOADER_OPTIONS, OWN_ARGUMENTS
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
            model computes itself, model(**batch).loss, as Hugging Face's do. A mean over labels, such as tokens, is
            weighted by those that are not -100; where what it is a mean over is not known, fit says so.
        train_set: a data set; shuffled anew in each epoch, unless shuffle=False or a sampler is among the options.
        optimizer: of the model's parameters. Everything is prepared here, or was before.
        global_batch: examples of one optimizer step, over all devices; {0: 64, 4: 128} is 128 from epoch 4 on.
        epochs: how many in all, those before a restart, and earlier ones of this run, included.
        scheduler: moved after each optimizer step; PerEpoch(scheduler) after each epoch; ReduceLROnPlateau too, with
            the value that `best` monitors, or else "val_loss", or without evaluate_on "loss".
        evaluate_on: a data set, or an evaluation loader, that `evaluate` goes through after each epoch: its values are
            "val_loss" and, for each of `metrics` (see there, also for `target`), "val_" and its name.
        val_check_interval: evaluate in mid-epoch too, after each so many optimizer steps of the run (an int) or such a
            part of an epoch (a float, such as 0.25).
        limit_train_batches, limit_val_batches: use at most so many global batches of an epoch, and of an evaluation (an
            int), or this part of them (a float).
        fast_dev_run: a dry run: one epoch of one global batch (True) or of so many, and as many of `evaluate_on`. It
            reads and writes no checkpoints and no best model.
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

    # Phase 3: the end.
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
    """A loader that goes through what an epoch trains on, without disturbing the training. It is not shuffled. It is
    made once and has a name of its own, so that dropout draws the same in each pass, also after a restart."""
    kept = {key: value for key, value in options.items() if key not in ("shuffle", "shuffle_buffer", "name")}
    if options.get("batch_sampler") is not None:
        global_batch = None  # the sampler makes them
    kept |= {"name": f"{name} again", "global_batch": global_batch, "limit_batches": limit}
    return run.loader(train_set, train=False, **kept)


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
    wrong = None if loss_fn is None else wrong_closure(loss_fn, model)
    if wrong is not None:
        raise SettingError(f"fit: {wrong}")
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"fit(model={type(model).__name__}): it trains one torch.nn.Module. For several models write the loop, "
            "with run.forward_backward and run.step."
        )
    known = (DATALOADER_OPTIONS | OWN_ARGUMENTS) - {"train", "limit_batches"}
    for name in options:
        if name not in known and name != "batch_size":  # for which the loader has an answer of its own
            own = {name for name, p in inspect.signature(fit).parameters.items() if p.kind is p.KEYWORD_ONLY}
            raise SettingError(f"fit has no argument {name!r}. {suggest(name, known | own)}")
    check_metrics(metrics)


def _training(global_batch: int | Mapping[int, int], options: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
    """The options of the training loader."""
    own_order = any(options.get(name) is not None for name in ("sampler", "batch_sampler"))
    made = {"shuffle": not own_order, "global_batch": global_batch, "limit_batches": limit, **options}
    return {**made, "global_batch": None} if options.get("batch_sampler") is not None else made


def _reading(options: Mapping[str, Any], limit: Limit) -> dict[str, Any]:
    """The options of the evaluation loader: of the training loader's those that say how to read, and the limit."""
    reading = {name: value for name, value in options.items() if name in DATALOADER_OPTIONS or name == "micro_batch"}
    return reading if limit is None else {**reading, "limit_batches": limit}
