"""What is looked at in the first global batches only: mistakes that show there, and would cost too much in each step.

1. The first backward calls are compared between the processes (call_check.py).
2. Gradients that the last global batch has left, and that the next one adds to (left_gradients.py).

The step holds a WarmUp until it is over, and then drops it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.step.call_check import BACKWARD, CallCheck
from paceline.step.left_gradients import LeftGradients
from paceline.step.yields import Yield
from paceline.strategies.gradient_store import GradientStore


class WarmUp:
    """compares: whether all processes make the same backward calls, so that these can be compared."""

    def __init__(self, calls: CallCheck, store: GradientStore, compares: bool) -> None:
        self._calls, self._compares = calls, compares
        self._left = LeftGradients(store)

    @property
    def over(self) -> bool:
        return self._left.over and (self._calls.over or not self._compares)

    def before_backward(self, one: Yield, call: int) -> None:
        """A backward call of this yield is about to be made, of this number in its micro-batch. Collective, where the
        processes compare it. Raises UsageError."""
        # The first backward of a global batch's last micro-batch is the first of its calls that all processes make. To
        # take a batch is none: a process may look at one by itself.
        if one.calls == 1 and one.request.final and self._compares:
            self._calls.same(BACKWARD)
        self._left.look(first=call == 0 and one.request.micro == 0)

    def before_update(
        self, optimizer: torch.optim.Optimizer, places: Sequence[Tensor], names: Mapping[Tensor, str]
    ) -> None:
        self._left.warn_of(optimizer, places, names)

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """The script has cleared the gradients of these parameters."""
        self._left.cleared(parameters)
