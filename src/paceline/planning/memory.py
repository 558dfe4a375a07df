"""Memory of a device in parts, and its peak in the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.planning.ranges import Range


class Memory(NamedTuple):
    """Bytes on the device that needs most, at the peak of a step.

    Only `activations` has an interval. The other parts follow from the sizes of tensors.
    """

    weights: float  # including gathered layers
    gradients: float  # held at the peak
    optimizer: float  # its state
    activations: Range  # saved for the backward
    buffers: float  # of communication, and copies for it
    other: float  # interpreter, libraries, temporary tensors; as measured in one process

    @property
    def total(self) -> Range:
        rest = self.weights + self.gradients + self.optimizer + self.buffers + self.other
        return self.activations.plus(Range.exact(rest))


class Peak(NamedTuple):
    """Gradients and activations at the moment of a backward when both together are largest."""

    gradients: float
    activations: float


def backward_peak(
    activations: Sequence[float], gradients: Sequence[float], outside_activations: float, outside_gradients: float
) -> Peak:
    """The peak of a backward that frees a layer's activations and then holds its gradients, the last layer first.

    Activations outside of layers (such as logits) are freed first. Gradients outside of layers arrive first, as those
    of a head do.

    Args:
        activations, gradients: bytes of each layer, in the order of the forward.
    """
    peak = Peak(0.0, sum(activations) + outside_activations)
    held, left = outside_gradients, sum(activations)
    for saved, gradient in zip([0.0, *reversed(activations)], [0.0, *reversed(gradients)], strict=True):
        held, left = held + gradient, left - saved
        if held + left > sum(peak):
            peak = Peak(held, left)
    return peak
