"""Refusing what would silently break the contract: a direct `optimizer.step()` or `scheduler.step()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import UsageError


class Guards:
    """Hooks on prepared optimizers and schedulers, taken off by `close`."""

    def __init__(self) -> None:
        self._allowed = False
        self._hooks: list[Any] = []
        self._schedulers: list[Any] = []

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def watch_scheduler(self, scheduler: Any) -> None:
        own = scheduler.step

        def step(*args: Any, **kwargs: Any) -> None:
            if not self._allowed:
                raise UsageError(
                    f"{type(scheduler).__name__}.step() was called directly, but it is prepared: run.step(optimizer) moves it, "
                    "once per optimizer step. Delete the call; or, to move it yourself (once per epoch, or with a metric), do "
                    "not prepare it and track it: run.track(scheduler=scheduler)."
                )
            own(*args, **kwargs)

        scheduler.step = step
        self._schedulers.append(scheduler)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._allowed:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called directly: micro-batches, precision, schedules and the position "
                "in the data would not follow. Write run.step(optimizer) in its place."
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
        for scheduler in self._schedulers:
            del scheduler.step
        self._hooks, self._schedulers = [], []
