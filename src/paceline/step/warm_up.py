"""Checks of the first global batches, for mistakes that show early. In every step the checks would cost too much.

1. Compare the first backward calls between the processes (call_check.py).
2. Find gradients that one global batch leaves and the next global batch adds to (left_gradients.py).

The step drops its WarmUp when all checks are done.
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
    """The checks of one run.

    compares: whether all processes make the same backward calls, so that they can be compared.
    """

    def __init__(self, calls: CallCheck, store: GradientStore, compares: bool) -> None:
        self._calls, self._compares = calls, compares
        self._left = LeftGradients(store)

    @property
    def over(self) -> bool:
        return self._left.over and (self._calls.over or not self._compares)

    def before_backward(self, one: Yield, call: int) -> None:
        """Check before a backward call of this yield. call: its number in the micro-batch.

        Collective if the processes compare the call. Raises UsageError.
        """
        # Compare at the first backward of a global batch's last micro-batch, since all processes make this call. Do not
        # compare when a batch is fetched: one process alone may fetch a batch to look at it.
        if one.calls == 1 and one.request.final and self._compares:
            self._calls.same(BACKWARD)
        self._left.look(first=call == 0 and one.request.micro == 0)

    def before_update(
        self, optimizer: torch.optim.Optimizer, holders: Sequence[Tensor], names: Mapping[Tensor, str]
    ) -> None:
        self._left.warn_of(optimizer, holders, names)

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """Record that the script has cleared the gradients of these parameters."""
        self._left.cleared(parameters)
