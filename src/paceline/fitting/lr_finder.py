"""lr_find: a learning-rate range test (L. Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section
3.3), on copies of the model and the optimizer, in a separate run. So the script's objects stay unchanged.

1. Copy model and optimizer together, start a run, prepare the copies.
2. Train. The learning rate grows from step to step by a constant factor. Record the loss of each global batch, and the
   smoothed loss. Stop when the smoothed loss is several times its minimum, or not finite.
3. Close the run, and restore the random generators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import SettingError, check_whole
from paceline.fitting.evaluate import LossFn
from paceline.fitting.model_loss import ModelLoss, used_columns
from paceline.fitting.trial_run import trial_run
from paceline.run import Run

_SMOOTHING = 0.98  # decay of the running mean of the losses, which is bias-corrected as in Adam
_SKIPPED = 10  # number of first steps that are never suggested, because the smoothed loss is still unstable
_DIVERGED = 4.0  # stop if the smoothed loss exceeds this multiple of its minimum


@dataclass(frozen=True)
class LearningRates:
    """The result of `lr_find`, the same on every process. With several parameter groups, `lrs` are the rates of the
    first group. The other groups' rates keep their ratio to it."""

    lrs: list[float]  # the learning rate of each step
    losses: list[float]  # the loss of each step's global batch
    smoothed: list[float]  # the running mean of the losses at each step

    @property
    def suggestion(self) -> float | None:
        """The rate at the steepest fall of the smoothed loss, plotted over the logarithm of the rate. None if there are
        too few steps, or if the loss never falls."""
        slopes = [(after - before) / 2 for before, after in zip(self.smoothed, self.smoothed[2:], strict=False)]
        known = [(slope, step) for step, slope in enumerate(slopes, start=1) if step >= _SKIPPED and slope < 0]
        return self.lrs[min(known)[1]] if known else None


def lr_find(
    model: nn.Module,
    loss_fn: LossFn | None,
    train_set: Any,
    *,
    optimizer: torch.optim.Optimizer,
    global_batch: int,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    steps: int = 100,
    settings: dict[str, Any] | None = None,
    **loader_options: Any,
) -> LearningRates:
    """Finds learning rates that reduce the loss: trains a copy of the model while the rate grows from min_lr to max_lr.

    Args:
        model, loss_fn, train_set, optimizer, global_batch, loader_options: as for `fit`. The model, the optimizer and
            the random generators stay unchanged. The copies of model and optimizer state take memory.
        steps: number of global batches to train on. If an epoch is shorter, more epochs follow.
        settings: arguments of paceline.start for the separate run, such as {"strategy": "fsdp"}.

    Call it before paceline.start(), on every process. It does not set the optimizer's learning rate. Check
    `.suggestion` against the curve of `.lrs` and `.smoothed`. Raises SettingError for invalid arguments, and UsageError
    if a run is open.
    """
    if not (isinstance(min_lr, (int, float)) and isinstance(max_lr, (int, float)) and 0 < min_lr < max_lr < math.inf):
        raise SettingError(f"lr_find(min_lr={min_lr!r}, max_lr={max_lr!r}): pass rates with 0 < min_lr < max_lr.")
    check_whole("lr_find", "steps", steps, least=2)
    if loss_fn is None:
        loss_fn, train_set = ModelLoss(), used_columns(train_set, model)
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    # A non-finite gradient ends the test without an error.
    with trial_run("lr_find", model, optimizer, {"nonfinite": "skip", **(settings or {})}) as (run, copied, optimizer):
        return _range_test(run, copied, optimizer, loss_fn, train_set, global_batch, rates, loader_options)


def _range_test(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    train_set: Any,
    global_batch: int,
    rates: list[float],
    options: dict[str, Any],
) -> LearningRates:
    """Phase 2: train while the learning rate grows."""
    run.prepare(model, optimizer)
    model.train()
    custom_order = options.get("sampler") is not None
    loader = run.loader(train_set, **{"global_batch": global_batch, "shuffle": not custom_order, **options})
    found = LearningRates([], [], [])
    shares = _shares(optimizer)
    running, top, count = 0.0, 0.0, 0.0
    for batch in (batch for _ in run.epochs(1 << 30) for batch in loader):  # over any number of epochs
        if not top and not count:
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                group["lr"] = rates[len(found.lrs)] * share
        loss = run.forward_backward(loss_fn, model, batch)
        examples = getattr(loss, "loss_count", loader.examples)
        if float(examples):
            top, count = top + float(loss) * float(examples), count + float(examples)
        if not run.step(optimizer):
            continue  # the global batch has more micro-batches
        value, top, count = run.ratio(top, count), 0.0, 0.0
        running = _SMOOTHING * running + (1 - _SMOOTHING) * value
        smooth = running / (1 - _SMOOTHING ** (len(found.lrs) + 1))
        if not math.isfinite(smooth) or (len(found.lrs) > 1 and smooth > _DIVERGED * min(found.smoothed)):
            break
        found.lrs.append(rates[len(found.lrs)])
        found.losses.append(value)
        found.smoothed.append(smooth)
        if len(found.lrs) == len(rates):
            break
    return found


def _shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """The rate of each group divided by the first group's. Raises SettingError if the first group's rate is 0."""
    # A scheduler stores the initial rates in "initial_lr". With a warm-up, the current rates may be 0.
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if not rates[0]:
        raise SettingError(
            f"lr_find: the first of the optimizer's {len(rates)} parameter groups has lr=0, but the rates of the "
            "other groups are set in proportion to it. Give it a rate above 0."
        )
    return [rate / rates[0] for rate in rates]
