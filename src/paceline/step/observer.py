"""StepObserver: what happens in a run, for tools that watch it.

verify, compare and timeline watch a run through one (`run.observe`). Without observers nothing is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.data.loader import Loader


class StepObserver:
    """Each method is called at its moment and does nothing. A tool overrides the ones that it needs.

    A method whose name begins with "before" is called before the run acts, "after" when it has acted.
    """

    def before_prepare(self, objects: tuple[Any, ...]) -> None:
        """run.prepare is called with these."""

    def after_prepare(self) -> None:
        """Models and optimizers are prepared."""

    def before_loader(self, dataset: Any, options: dict[str, Any]) -> None:
        """run.loader is called with these keyword arguments, which may be changed in place."""

    def after_loader(self, loader: Loader) -> None:
        """A loader was made."""

    def before_yield(self, loader: Loader) -> None:
        """A loader has fetched `loader.current`, and the run does not know of it yet."""

    def after_yield(self, loader: Loader) -> None:
        """The script is about to get the batch."""

    def before_end(self, loader: Loader, whole: bool) -> None:
        """A pass over a loader has ended; whole: it was read to its end."""

    def after_end(self, loader: Loader, whole: bool) -> None:
        """The run has taken note of that end."""

    def before_backward(self, losses: tuple[Tensor, ...]) -> float:
        """A backward call is about to be made. losses: its scalars; none in the closure form, where the closure has yet
        to compute them. Returns a factor for the loss: 1, except where a tool leaves out a shard."""
        return 1

    def scale(self) -> float:
        """A factor for the loss in the backward that the step divides out of the gradients again, as a loss scale."""
        return 1

    def closure(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The closure to run in place of the script's."""
        return loss_fn

    def in_backward(self, begins: bool) -> None:
        """The strategy's backward, or forward and backward, begins or ends."""

    def after_backward(self) -> None:
        """A backward call was made."""

    def before_step(self) -> None:
        """run.step is called."""

    def before_update(self, optimizer: torch.optim.Optimizer, places: list[Tensor]) -> list[Tensor]:
        """The optimizer is about to use the gradients of these places. Returns the places whose gradients it shall
        use."""
        return places

    def after_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer that is given a closure has evaluated it once, and the gradients are finite."""

    def after_step(self, acted: bool) -> None:
        """run.step returns. acted: an update was made or skipped."""

    def on_request(self) -> None:
        """The script asks all processes for something: run.mean, sum, ratio or gather."""

    def in_save(self, begins: bool) -> None:
        """The run begins to write a checkpoint, or has written it."""

    def before_close(self) -> None:
        """The run is about to close."""

    def after_close(self) -> None:
        """The run is closed."""
