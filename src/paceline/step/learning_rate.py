"""Scale and warm up the learning rate for a larger global batch.

More devices do not change the global batch, so they need no new learning rate. If the global batch grows from B to kB,
an epoch has fewer steps, each with a less noisy gradient. For SGD multiply the rate by k (section 2.1 of Goyal et al.
2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour"). Increase it gradually over the first epochs, since
the weights change too fast for this rule at first (section 2.2). For Adam and similar optimizers the square root
of k fits better (Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import SettingError, UsageError, suggest

RULES = ("linear", "sqrt")


def scale_lr(base_lr: float, base_batch: int, batch: int, rule: str = "linear") -> float:
    """The learning rate for a global batch of `batch` examples, given a tuned `base_lr` for `base_batch` examples.

    rule: "linear" multiplies by batch / base_batch (SGD; Goyal et al. 2017, section 2.1), "sqrt" by its square root
    (Adam and similar optimizers; Malladi et al. 2022). Both are rules of thumb. They fail for batches with hardly any
    gradient noise. Raises SettingError.
    """
    if not _is_number(base_lr) or not 0 < base_lr < math.inf:
        raise SettingError(f"scale_lr(base_lr={base_lr!r}): give a learning rate above 0.")
    for name, value in (("base_batch", base_batch), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError(f"scale_lr({name}={value!r}): give the number of examples, an integer of at least 1.")
    if rule not in RULES:
        raise SettingError(f"scale_lr(rule={rule!r}): unknown rule. {suggest(str(rule), RULES)}")
    factor = batch / base_batch
    return base_lr * (factor if rule == "linear" else math.sqrt(factor))


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, *, start: float = 0.1, then: LRScheduler | None = None
) -> LRScheduler:
    """A schedule that increases the learning rate linearly over the first `steps` optimizer steps.

    lr is the optimizer's learning rate (of each parameter group), and t is the number of the update, from 0:

        t < steps:   lr x (start + (1 - start) x t / steps)
        t >= steps:  lr, or the schedule `then`, which begins with its update 0 at t = steps

    Goyal et al. 2017, section 2.2, start at the rate of the small batch: start=base_batch / batch. Plan `then` for the
    remaining steps.

    Prepare the warm-up, not `then`: `model, optimizer, schedule = run.prepare(model, optimizer, schedule)`. The warm-up
    also steps `then`. Raises SettingError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"warmup(optimizer={type(optimizer).__name__}): give a torch optimizer.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SettingError(f"warmup(steps={steps!r}): give the number of optimizer steps, an integer of at least 1.")
    if not _is_number(start) or not 0 <= start <= 1:
        raise SettingError(f"warmup(start={start!r}): give a fraction of the learning rate, from 0 to 1.")
    if isinstance(then, ReduceLROnPlateau):
        raise SettingError(
            "warmup(then=ReduceLROnPlateau): it needs a metric at each step. Leave then= out, and step the scheduler "
            "yourself after the warm-up."
        )
    if then is not None and not isinstance(then, LRScheduler):
        raise SettingError(f"warmup(then={type(then).__name__}): give a scheduler of torch.optim.lr_scheduler.")
    if then is not None and then.optimizer is not optimizer:
        raise SettingError(
            "warmup(then=...): this schedule belongs to another optimizer. Make it for the same optimizer as the "
            "warm-up."
        )
    return _Warmup(optimizer, steps, float(start), then)


class _Warmup(LRScheduler):
    """See `warmup`. `then` is not stepped during the warm-up. Afterwards it alone sets the learning rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, start: float, then: LRScheduler | None) -> None:
        self.steps, self.start, self.then = steps, start, then
        self.targets = [float(group["lr"]) for group in optimizer.param_groups]  # the rates after the warm-up
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        share = min(self.last_epoch / self.steps, 1.0)
        factor = self.start + (1.0 - self.start) * share
        return [target * factor if share < 1.0 else target for target in self.targets]

    def step(self, epoch: int | None = None) -> None:
        if epoch is not None:
            raise UsageError("warmup: step(epoch) is not supported. Call step() once after each optimizer step.")
        if self.last_epoch >= self.steps and self.then is not None:
            self.last_epoch += 1
            self._step_count += 1
            self.then.step()
            self._last_lr = self.then.get_last_lr()
            return
        if self.last_epoch >= 0:
            self._check_unmoved()
        super().step()

    def _check_unmoved(self) -> None:
        for group, last in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if not isinstance(group["lr"], Tensor) and group["lr"] != last:
                raise UsageError(
                    f"warmup: after {self.last_epoch} steps the learning rate is {group['lr']!r}, but the warm-up set "
                    f"{last!r}: something else changes it. The warm-up steps the schedule of then=, so do not prepare "
                    "or step that schedule yourself."
                )

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_epoch": self.last_epoch,
            "step_count": self._step_count,
            "targets": self.targets,
            "last_lr": [float(lr) for lr in self._last_lr],
            "then": None if self.then is None else self.then.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the schedule. The learning rate itself is in the optimizer's state, as with torch's schedules."""
        if (state_dict["then"] is None) != (self.then is None):
            raise UsageError(
                f"warmup: the checkpoint's schedule was made {'without' if self.then else 'with'} then=, but this "
                f"script's {'with' if self.then else 'without'} it. Use the same then= as the script that wrote the "
                "checkpoint."
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.targets, self._last_lr = list(state_dict["targets"]), list(state_dict["last_lr"])
        if self.then is not None:
            self.then.load_state_dict(state_dict["then"])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
