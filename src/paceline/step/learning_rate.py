"""The learning rate of a larger global batch: how to scale it, and how to warm up to it.

More devices do not change the global batch, and need nothing of this. When the global batch itself grows from B to kB,
an epoch has fewer steps, each with a less noisy gradient. Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training
ImageNet in 1 Hour": multiply the rate of SGD by k (section 2.1), and reach it gradually over the first epochs, since
early on the weights change too fast for this rule (section 2.2). For Adam and its like the square root of k fits better
(Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms").
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
    """The learning rate for a global batch of `batch` examples, where `base_lr` is right for `base_batch`.

    rule: "linear" multiplies by batch / base_batch (SGD; Goyal et al. 2017, section 2.1), "sqrt" by its square root
    (Adam and its like; Malladi et al. 2022). Both are rules of thumb, and end where the batch is so large that
    gradients are hardly noisy any more. Raises SettingError.
    """
    if not _is_number(base_lr) or not 0 < base_lr < math.inf:
        raise SettingError(f"scale_lr(base_lr={base_lr!r}): a learning rate above 0 is needed.")
    for name, value in (("base_batch", base_batch), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError(f"scale_lr({name}={value!r}): a whole number of examples, at least 1, is needed.")
    if rule not in RULES:
        raise SettingError(f"scale_lr(rule={rule!r}) is not known. {suggest(str(rule), RULES)}")
    factor = batch / base_batch
    return base_lr * (factor if rule == "linear" else math.sqrt(factor))


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, *, start: float = 0.1, then: LRScheduler | None = None
) -> LRScheduler:
    """A schedule that raises the learning rate in a straight line over the first `steps` optimizer steps.

    Update number t, from 0, is made with lr x (start + (1 - start) x t / steps) while t < steps, where lr is what the
    optimizer was given for each parameter group (Goyal et al. 2017, section 2.2, begin at the rate of the small batch:
    start=base_batch / batch). From t = steps on it is lr, or what the schedule `then` says, which begins there: its
    update number 0 is our number `steps`. Plan it for the steps that remain.

    Prepare the warm-up, not `then`: `model, optimizer, schedule = run.prepare(model, optimizer, schedule)`. It moves
    both. Raises SettingError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingError(f"warmup(optimizer={type(optimizer).__name__}): a torch optimizer is needed.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise SettingError(f"warmup(steps={steps!r}): a whole number of optimizer steps, at least 1, is needed.")
    if not _is_number(start) or not 0 <= start <= 1:
        raise SettingError(f"warmup(start={start!r}): a part of the learning rate, from 0 to 1, is needed.")
    if isinstance(then, ReduceLROnPlateau):
        raise SettingError(
            "warmup(then=ReduceLROnPlateau): it moves with a metric, not with steps. Leave then out, and step it "
            "yourself when the warm-up is over."
        )
    if then is not None and not isinstance(then, LRScheduler):
        raise SettingError(f"warmup(then={type(then).__name__}): a torch.optim.lr_scheduler is needed.")
    if then is not None and then.optimizer is not optimizer:
        raise SettingError("warmup(then=...): that schedule moves another optimizer. Make it for the same one.")
    return _Warmup(optimizer, steps, float(start), then)


class _Warmup(LRScheduler):
    """See `warmup`. During the warm-up `then` is not stepped. Afterwards it alone sets the learning rate."""

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
            raise UsageError("warmup: step(epoch) cannot be followed. Call step() once after each optimizer step.")
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
                    f"warmup: after {self.last_epoch} steps the learning rate is {group['lr']!r}, not the {last!r} "
                    "that the warm-up set: something else moves it. A schedule given as then= is moved by the warm-up: "
                    "neither prepare nor step it."
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
        """The learning rate itself is part of the optimizer's state, as with torch's schedules."""
        if (state_dict["then"] is None) != (self.then is None):
            raise UsageError(
                f"warmup: the saved schedule was made {'without' if self.then else 'with'} then=, this one not so. "
                "Make it as it was made."
            )
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]
        self.targets, self._last_lr = list(state_dict["targets"]), list(state_dict["last_lr"])
        if self.then is not None:
            self.then.load_state_dict(state_dict["then"])


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
