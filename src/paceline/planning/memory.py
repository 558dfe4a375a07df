"""Memory of a device in parts, at the moment of a step when it needs most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
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
    temporary: float  # that the backward or an update needs only while it computes
    other: float  # interpreter and libraries; as measured in one process

    @property
    def total(self) -> Range:
        rest = self.weights + self.gradients + self.optimizer + self.buffers + self.temporary + self.other
        return self.activations.plus(Range.exact(rest))


def largest(moments: Iterable[Memory]) -> Memory:
    """The moment that needs most."""
    return max(moments, key=lambda memory: memory.total.middle)


class ShardedMoment(NamedTuple):
    """Bytes at a moment of a backward under fsdp, without the device's shards of weights and optimizer state."""

    gathered: float  # parameters
    gradients: float
    activations: float
    buffers: float  # a reduce-scatter's input
    is_first: bool  # the gradient of the loss is computed, and no layer's


def sharded_moments(
    parameters: Sequence[float],
    gradients: Sequence[float],
    activations: Sequence[float],
    outside: tuple[float, float, float],
    shards: int,
    keeps: bool,
    accumulates: bool,
) -> Iterator[ShardedMoment]:
    """The moments of FSDP2's backward, the last layer first.

    While a layer is computed, the next one's parameters are gathered already, the gradients of the layer before are
    being reduced from a copy, and those of earlier layers are shards. Parameters outside of layers stay gathered, and
    their gradients whole, until the end.

    Args:
        parameters, gradients, activations: bytes of each layer, in the order of the forward. Parameters as gathered.
        outside: the same three of everything outside of layers.
        keeps: all layers stay gathered from the forward on (stage 2).
        accumulates: shards of all gradients are there from earlier micro-batches.
    """
    outside_parameters, outside_gradients, outside_activations = outside
    before = [0.0, *accumulate(activations)]  # activations of the layers before each layer
    below = [0.0, *accumulate(parameters)]
    reduced = (sum(gradients) + outside_gradients) / shards if accumulates else 0.0
    gathered = outside_parameters + (below[-1] if keeps else 0.0)
    yield ShardedMoment(gathered, reduced, before[-1] + outside_activations, 0.0, True)
    copy = 0.0
    for i in reversed(range(len(parameters))):
        gathered = outside_parameters + (below[i + 1] if keeps else sum(parameters[max(i - 1, 0) : i + 1]))
        yield ShardedMoment(gathered, reduced + outside_gradients, before[i + 1], copy, False)
        yield ShardedMoment(gathered, reduced + outside_gradients + gradients[i], before[i], copy, False)
        copy = gradients[i]
        reduced += 0.0 if accumulates else gradients[i] / shards
    yield ShardedMoment(outside_parameters, reduced + outside_gradients, 0.0, outside_gradients, False)


def backward_moments(
    activations: Sequence[float], gradients: Sequence[float], outside_activations: float, outside_gradients: float
) -> Iterator[tuple[float, float]]:
    """(gradients, activations) at the moments of a backward, first that of the loss.

    A layer's activations are freed, and then its gradients are held, the last layer first. Activations outside of
    layers (such as logits) are freed first. Gradients outside of layers arrive first, as those of a head do.

    Args:
        activations, gradients: bytes of each layer, in the order of the forward.
    """
    yield 0.0, sum(activations) + outside_activations
    held, left = outside_gradients, sum(activations)
    for saved, gradient in zip([0.0, *reversed(activations)], [0.0, *reversed(gradients)], strict=True):
        held, left = held + gradient, left - saved
        yield held, left
