"""Refusing what would silently break the contract: a direct `optimizer.step()` or `scheduler.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError


class Guards:
    """Hooks on prepared optimizers and schedulers, taken off by `close`."""

    def __init__(self) -> None:
        self._allowed = False
        self._hooks: list[Any] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._schedulers: list[tuple[Any, type]] = []

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, accumulating: Callable[[list[Tensor]], bool]) -> None:
        """accumulating: whether these parameters have gradients of earlier micro-batches. Then its zero_grad, which
        scripts for one device have at the top of their loop, does nothing: `run.step` clears at the end of a global
        batch."""
        own = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not accumulating([p for group in optimizer.param_groups for p in group["params"]]):
                own(set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def watch_scheduler(self, scheduler: Any) -> None:
        """By a subclass, not an attribute: a scheduler's attributes are its state_dict."""
        cls, guards = type(scheduler), self

        def step(own: Any, *args: Any, **kwargs: Any) -> None:
            if not guards._allowed:
                raise UsageError(
                    f"{cls.__name__}.step() was called directly, but it is prepared: run.step(optimizer) moves it, "
                    "once per optimizer step. If the script moves it once per epoch (as StepLR and MultiStepLR usually "
                    "are), or with a metric, leave the call and take it out of run.prepare: run.track(scheduler="
                    "scheduler) keeps it in checkpoints. If it counts optimizer steps, delete the call."
                )
            cls.step(own, *args, **kwargs)

        scheduler.__class__ = type(cls.__name__, (cls,), {"step": step, "__module__": cls.__module__})
        self._schedulers.append((scheduler, cls))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._allowed:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called directly: micro-batches, precision, schedules and the "
                "position in the data would not follow. Write run.step(optimizer) in its place."
            )

    def allow(self, function: Callable[..., object], *args: Any) -> None:
        """Calls it on behalf of `run.step`."""
        self._allowed = True
        try:
            function(*args)
        finally:
            self._allowed = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for scheduler, cls in self._schedulers:
            scheduler.__class__ = cls
        for optimizer in self._optimizers:
            del optimizer.zero_grad
        self._hooks, self._optimizers, self._schedulers = [], [], []
