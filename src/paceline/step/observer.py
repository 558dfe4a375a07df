"""StepObserver: the events of a run, for tools such as verify, compare and timeline.

A tool registers an observer with `run.observe`. Without observers nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.data.loader import Loader


class StepObserver:
    """The methods of an observer. All do nothing here; a tool overrides those that it needs.

    The run calls a `before_` method before it acts, and an `after_` method afterwards.
    """

    def before_prepare(self, objects: tuple[Any, ...]) -> None:
        """run.prepare is called with these objects."""

    def after_prepare(self) -> None:
        """Models and optimizers are prepared."""

    def before_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        """run.loader is called with these keyword arguments, which may be changed in place."""

    def after_loader(self, loader: Loader) -> None:
        """A loader was made."""

    def before_yield(self, loader: Loader) -> None:
        """A loader has fetched `loader.current`. The run has not yet processed it."""

    def after_yield(self, loader: Loader) -> None:
        """The run is about to pass the batch to the script."""

    def before_end(self, loader: Loader, whole: bool) -> None:
        """A pass over a loader has ended. whole: the loader was read to its end."""

    def after_end(self, loader: Loader, whole: bool) -> None:
        """The run has processed the end of the pass."""

    def before_backward(self, losses: tuple[Tensor, ...]) -> float:
        """A backward call is about to be made. Returns a factor for the loss: 1, unless a tool leaves out a shard.

        losses: the scalars of the call; empty in the closure form, since the closure has not run yet.
        """
        return 1

    def scale(self) -> float:
        """A loss scale. The backward multiplies the loss by it, and then divides the gradients by it."""
        return 1

    def closure(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The closure to run instead of the script's closure."""
        return loss_fn

    def in_backward(self, begins: bool) -> None:
        """The strategy's backward (or forward and backward) begins if `begins`, else ends."""

    def after_backward(self) -> None:
        """A backward call was made."""

    def before_step(self) -> None:
        """run.step is called."""

    def before_update(self, optimizer: torch.optim.Optimizer, holders: list[Tensor]) -> list[Tensor]:
        """The optimizer is about to use the gradients in `.grad` of these tensors. Returns the tensors to use."""
        return holders

    def after_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has evaluated its closure once, and the gradients are finite."""

    def after_step(self, acted: bool) -> None:
        """run.step returns. acted: an update was made or skipped."""

    def on_request(self) -> None:
        """The script calls run.mean, sum, ratio or gather."""

    def in_save(self, begins: bool) -> None:
        """The run begins to write a checkpoint if `begins`, else has written it."""

    def before_close(self) -> None:
        """The run is about to close."""

    def after_close(self) -> None:
        """The run is closed."""
