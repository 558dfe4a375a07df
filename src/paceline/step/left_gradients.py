"""Warn about gradients that one optimizer's loss leaves on another optimizer's parameters.

For example, a GAN's generator loss also leaves gradients on the critic. If the script does not clear them before the
critic's next backward, the critic's update uses the sum of both gradients, as in plain PyTorch. That is seldom
intended. Also, checkpoints hold no gradients, so a resumed run trains a different model. Only the first global batches
are checked, since a check goes over all parameters and waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.errors import warn
from paceline.strategies.gradient_store import GradientStore

_CHECKED = 3  # the number of global batches to check


class LeftGradients:
    """Checks the first global batches of a run."""

    def __init__(self, store: GradientStore) -> None:
        self._store, self._remaining = store, _CHECKED
        self._left: set[Tensor] = set()  # tensors that still hold a gradient of an earlier global batch

    @property
    def over(self) -> bool:
        """Whether all checks are done."""
        return not self._remaining and not self._left

    def look(self, *, first: bool) -> None:
        """Find left gradients before a backward. first: whether it is the first backward of its global batch."""
        if first:
            self._left = set(self._store.parameters) if self._remaining else set()
            self._remaining = max(self._remaining - 1, 0)
        if self._left:
            self._left = {p for p in self._left if p.grad is not None and bool(dtensor.local(p.grad).any())}

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """Record that the script has cleared the gradients of these parameters."""
        if self._left:
            self._left.difference_update(self._store.of(parameters))

    def warn_of(self, optimizer: torch.optim.Optimizer, holders: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
        """Before an update, warn if its gradients include a left gradient.

        holders: the tensors that hold the optimizer's gradients.
        """
        if not self._left:
            return
        added_to = [names[p] for p in holders if p in self._left]
        if added_to:
            more = f" and {len(added_to) - 1} more" if len(added_to) > 1 else ""
            self._left, self._remaining = set(), 0  # warn once
            warn(
                f"run.step({type(optimizer).__name__}): the gradients of {added_to[0]}{more} include gradients that "
                "another optimizer's loss left in the last global batch. Plain PyTorch adds them too, but a "
                "checkpoint does not hold them, so a resumed run would train a different model. Name the optimizer of "
                "each loss, run.backward(loss, optimizer=...), or call optimizer.zero_grad() before the backward."
            )
