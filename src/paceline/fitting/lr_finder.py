"""lr_find: a learning-rate range test (L. Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section
3.3), on copies of the model and the optimizer, in a run of its own. So nothing of the script has to be put back.

1. Copy model and optimizer together, start a run, prepare the copies.
2. Train: the learning rate grows from step to step by a constant factor. Note the loss of each global batch, smoothed.
   End where it is several times the best one, or not finite.
3. Close the run, and put the random generators back.
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

_SMOOTHING = 0.98  # of the running mean of the losses, whose beginning is corrected as Adam's is
_SKIPPED = 10  # steps at the beginning that are not suggested: the smoothed loss has not settled
_DIVERGED = 4.0  # times the best smoothed loss


@dataclass(frozen=True)
class LearningRates:
    """What `lr_find` has seen, the same on every process. Of an optimizer with several groups the rates are the first
    one's; the others keep their proportion to it."""

    lrs: list[float]  # of each step
    losses: list[float]  # of each step's global batch
    smoothed: list[float]  # their running mean

    @property
    def suggestion(self) -> float | None:
        """The rate where the smoothed loss falls most steeply over the logarithm of the rate; None where too few steps
        were made to tell, or it never falls."""
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
    """Which learning rates make the loss fall: trains a copy of the model while the rate grows from min_lr to max_lr.

    Args:
        model, loss_fn, train_set, optimizer, global_batch, loader_options: as for `fit`. The model, the optimizer and
            the random generators stay as they are. A copy of the model and of the optimizer's state takes memory.
        steps: how many global batches; several epochs where one has fewer.
        settings: arguments of paceline.start for the run that it makes, such as {"strategy": "fsdp"}.

    Call it before paceline.start(), on every process. It sets no learning rate: `.suggestion` is one to look at, beside
    the curve of `.lrs` and `.smoothed`. Raises SettingError for arguments that cannot be, UsageError in an open run.
    """
    if not (isinstance(min_lr, (int, float)) and isinstance(max_lr, (int, float)) and 0 < min_lr < max_lr < math.inf):
        raise SettingError(f"lr_find(min_lr={min_lr!r}, max_lr={max_lr!r}): 0 < min_lr < max_lr is needed.")
    check_whole("lr_find", "steps", steps, least=2)
    if loss_fn is None:
        loss_fn, train_set = ModelLoss(), used_columns(train_set, model)
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    # A gradient that is not finite ends the test, and is no error.
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
    """Phase 2."""
    run.prepare(model, optimizer)
    model.train()
    own_order = options.get("sampler") is not None
    loader = run.loader(train_set, **{"global_batch": global_batch, "shuffle": not own_order, **options})
    found = LearningRates([], [], [])
    shares = _shares(optimizer)
    running, top, count = 0.0, 0.0, 0.0
    for batch in (batch for _ in run.epochs(1 << 30) for batch in loader):  # of as many epochs as are needed
        if not top and not count:
            for group, share in zip(optimizer.param_groups, shares, strict=True):
                group["lr"] = rates[len(found.lrs)] * share
        loss = run.forward_backward(loss_fn, model, batch)
        examples = getattr(loss, "loss_count", loader.examples)
        if float(examples):
            top, count = top + float(loss) * float(examples), count + float(examples)
        if not run.step(optimizer):
            continue  # of several micro-batches
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
    """The rate of each group over the first group's. Raises SettingError where that one is 0."""
    # A scheduler keeps the rates that the optimizer was given there, and with a warm-up the present ones may be 0.
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    if not rates[0]:
        raise SettingError(
            f"lr_find: the first of the optimizer's {len(rates)} parameter groups has lr=0, and the rates of the "
            "others are to keep their proportion to it. Give it a rate above 0."
        )
    return [rate / rates[0] for rate in rates]
