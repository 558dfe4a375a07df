"""Gradients that the loss of one optimizer leaves on the parameters of another, and that the next step adds to.

A GAN's generator loss reaches the critic too. Where nothing clears that before the critic's next backward, the critic
is trained with both, in plain PyTorch as here. That is seldom meant; and a checkpoint holds no gradients, so that a run
which goes on from it becomes another model. The first global batches tell: later nobody looks, since a look goes over
all parameters and waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.errors import warn
from paceline.strategies.gradient_store import GradientStore

_LOOKS = 3  # the global batches that are looked at, from the first on


class LeftGradients:
    """Of one run."""

    def __init__(self, store: GradientStore) -> None:
        self._store, self._looks = store, _LOOKS
        self._left: set[Tensor] = set()  # places whose gradients an earlier global batch has left, not cleared since

    @property
    def over(self) -> bool:
        """Whether nothing is looked at any more."""
        return not self._looks and not self._left

    def look(self, *, first: bool) -> None:
        """A backward is about to be made. first: of its global batch."""
        if first:
            self._left = set(self._store.parameters) if self._looks else set()
            self._looks = max(self._looks - 1, 0)
        if self._left:
            self._left = {p for p in self._left if p.grad is not None and bool(dtensor.local(p.grad).any())}

    def cleared(self, parameters: Iterable[Tensor]) -> None:
        """The script has cleared the gradients of these parameters."""
        if self._left:
            self._left.difference_update(self._store.of(parameters))

    def warn_of(self, optimizer: torch.optim.Optimizer, places: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
        """The optimizer is about to use the gradients of these places. Warn where one is a sum with what was left."""
        if not self._left:
            return
        added_to = [names[p] for p in places if p in self._left]
        if added_to:
            more = f" and of {len(added_to) - 1} more" if len(added_to) > 1 else ""
            self._left, self._looks = set(), 0  # once
            warn(
                f"run.step({type(optimizer).__name__}): the gradient of {added_to[0]}{more} holds also what the last "
                "global batch left there, by the loss of another optimizer. Plain PyTorch adds them too, but a "
                "checkpoint does not hold them, so that a run which goes on from it becomes another model. Say whose "
                "gradients a loss is for, run.backward(loss, optimizer=...), or clear them before the backward: "
                "optimizer.zero_grad()."
            )
