"""Refuse what would silently break the contract: a direct `optimizer.step()`, `scheduler.step()`, `loss.backward()`.

A direct `loss.backward()` is no fault by itself: a script may inspect gradients and clear them. So the guards replace
torch.autograd.backward while a run is open, and note which prepared parameters a direct call adds to. The run refuses
such a gradient if it is still there when the run makes or uses gradients. The run's own backward calls cost nothing.
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
        self._allowed = False  # run.step is stepping: optimizers and schedulers may step
        # The run makes a backward pass: passes nested in it (torch.utils.checkpoint) belong to the run.
        self.in_run_backward = False
        # For each parameter that a direct backward() has added to: its gradient then.
        self.foreign_gradients: dict[Tensor, Tensor] = {}
        self._parameters: Callable[[], Sequence[Tensor]] = list  # see watch_backward
        self._hooks: list[Any] = []  # handles of the hooks on optimizers
        self._optimizers: list[torch.optim.Optimizer] = []  # the optimizers whose zero_grad is replaced
        self._schedulers: list[tuple[Any, type]] = []  # each watched scheduler and its own class

    def watch_optimizer(self, optimizer: torch.optim.Optimizer, keeps: Callable[[list[Tensor]], bool]) -> None:
        """Refuse a direct step(), and let zero_grad() do nothing between micro-batches.

        Scripts for one device call zero_grad() at the top of their loop; `run.step` clears at a global batch's end.
        keeps: whether these parameters have gradients of earlier micro-batches, which must stay.
        """
        own = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            if not keeps([p for group in optimizer.param_groups for p in group["params"]]):
                own(set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._optimizers.append(optimizer)
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    def watch_backward(self, parameters: Callable[[], Sequence[Tensor]]) -> None:
        """Watch direct backward calls. parameters: the tensors in whose `.grad` the run's gradients lie."""
        self._parameters = parameters
        _watching.append(self)
        torch.autograd.backward = _watched_backward

    def watch_direct_backward(self, backward: Callable[[], object]) -> None:
        """Make a backward call that is not the run's own, and note which parameters it adds to."""
        before = {p: (p.grad, version_within(p.grad)) for p in self._parameters()}
        backward()
        for p, (grad, version) in before.items():
            if p.grad is not None and (p.grad is not grad or version_within(p.grad) != version):
                self.foreign_gradients[p] = p.grad

    def refuse_foreign(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Raises UsageError if a direct backward() left a gradient on these parameters (None: on any)."""
        left = {
            p: grad for p, grad in self.foreign_gradients.items() if p.grad is grad and bool(dtensor.local(grad).any())
        }
        self.foreign_gradients = left
        if left if parameters is None else any(p in left for p in parameters):
            raise UsageError(DIRECT_BACKWARD)

    def watch_scheduler(self, scheduler: Any) -> None:
        """Refuse a direct step(). By a subclass, not an attribute: a scheduler's attributes are its state_dict."""
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

    def allow(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function on behalf of `run.step`: it may step optimizers and schedulers."""
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
