"""Refuse direct calls of `optimizer.step()`, `scheduler.step()` and `backward()`, which would train a different model.

A direct `loss.backward()` does no harm if the script only inspects the gradients and clears them. So the guards replace
torch.autograd.backward while a run is open, and record the prepared parameters that get a gradient from a direct call.
The run refuses such a gradient if it is still in `.grad` when the run computes or uses gradients. The run's own
backward calls are not watched.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.errors import UsageError
from paceline.step.messages import DIRECT_BACKWARD
from paceline.torch_private.core import version_within

T = TypeVar("T")


class Guards:
    """Hooks on prepared optimizers and schedulers, and on torch's backward. `close` removes them."""

    def __init__(self) -> None:
        self._allowed = False  # whether run.step is running: optimizers and schedulers may step
        # Whether the run is in a backward pass. Nested passes (torch.utils.checkpoint) belong to it.
        self.in_run_backward = False
        # For each parameter that a direct backward() has added to: its gradient after that call.
        self.foreign_gradients: dict[Tensor, Tensor] = {}
        self._parameters: Callable[[], Sequence[Tensor]] = list  # see watch_backward
        self._hooks: list[Any] = []  # handles of the hooks on optimizers
        self._optimizers: list[torch.optim.Optimizer] = []  # optimizers with a replaced zero_grad
        self._schedulers: list[tuple[Any, type]] = []  # each watched scheduler and its original class

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, keeps: Callable[[list[Tensor]], bool]) -> None:
        """Refuse a direct step(), and make zero_grad() do nothing between micro-batches.

        Scripts for one device call zero_grad() at the top of their loop. `run.step` clears gradients at the end of a
        global batch. keeps: returns whether parameters have gradients of earlier micro-batches, which must be kept.
        """
        original = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not keeps([p for group in optimizer.param_groups for p in group["params"]]):
                original(set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def watch_backward(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Watch direct backward calls. parameters: returns the tensors that hold the run's gradients in `.grad`."""
        self._parameters = parameters
        _watching.append(self)
        torch.autograd.backward = _watched_backward

    def watch_direct_backward(self, backward: Callable[[], object]) -> None:
        """Make a backward call of the script, and record the parameters that get a gradient from it."""
        before = {p: (p.grad, version_within(p.grad)) for p in self._parameters()}
        backward()
        for p, (grad, version) in before.items():
            if p.grad is not None and (p.grad is not grad or version_within(p.grad) != version):
                self.foreign_gradients[p] = p.grad

    def refuse_foreign(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Raises UsageError if a direct backward() left a gradient on these parameters (None: on any parameter)."""
        left = {
            p: grad for p, grad in self.foreign_gradients.items() if p.grad is grad and bool(dtensor.local(grad).any())
        }
        self.foreign_gradients = left
        if left if parameters is None else any(p in left for p in parameters):
            raise UsageError(DIRECT_BACKWARD)

    def watch_scheduler(self, scheduler: Any) -> None:
        """Refuse a direct step(). Uses a subclass, since an attribute would enter the scheduler's state_dict."""
        cls, guards = type(scheduler), self

        def step(wrapped: Any, *args: Any, **kwargs: Any) -> None:
            if not guards._allowed:
                raise UsageError(
                    f"{cls.__name__}.step() was called directly, but this scheduler is prepared, so "
                    "run.step(optimizer) steps it once per optimizer step. If the script steps it once per epoch "
                    "(usual for StepLR and MultiStepLR) or with a metric, keep the call, remove the scheduler from "
                    "run.prepare, and add run.track(scheduler=scheduler), which saves it in checkpoints. If it counts "
                    "optimizer steps, delete the call."
                )
            cls.step(wrapped, *args, **kwargs)

        scheduler.__class__ = type(cls.__name__, (cls,), {"step": step, "__module__": cls.__module__})
        self._schedulers.append((scheduler, cls))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._allowed:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called directly, which bypasses micro-batches, precision, "
                "schedules and the position in the data. Call run.step(optimizer) instead."
            )

    def allow(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function of `run.step`, which may step optimizers and schedulers."""
        self._allowed = True
        try:
            return function(*args)
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
        if self in _watching:
            _watching.remove(self)
        if not _watching and torch.autograd.backward is _watched_backward:
            torch.autograd.backward = _backward


_backward = torch.autograd.backward
_watching: list[Guards] = []


@functools.wraps(_backward)
def _watched_backward(*args: Any, **kwargs: Any) -> None:
    call: Callable[[], object] = functools.partial(_backward, *args, **kwargs)
    if not any(guards.in_run_backward for guards in _watching):
        for guards in _watching:
            call = functools.partial(guards.watch_direct_backward, call)
    call()
