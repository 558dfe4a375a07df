"""Sketches: linear, of the right size, and the same wherever they are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.observe import sketches
from paceline.observe.sketches import ROWS, WHOLE, sketch
from paceline.verify.plain_worker.step_draws import StepDraws


def test_a_small_tensor_stays_as_it_is() -> None:
    small = torch.randn(WHOLE)
    assert sketch(small) is small


def test_a_sketch_is_linear_and_keeps_norms() -> None:
    one, other = torch.randn(2, 300, 500, dtype=torch.float64)
    both = sketch(2 * one - other)
    torch.testing.assert_close(both, 2 * sketch(one) - sketch(other))
    expected = (2 * one - other).norm()
    assert abs(float(both.norm() / expected) - 1) < 5 * (2 / ROWS) ** 0.5


@pytest.mark.parametrize("kind", ["one column", "equal chunks", "few elements", "bfloat16"])
def test_norms_of_structured_tensors(kind: str) -> None:
    """A chunk has 2 ** 20 elements."""
    generator = torch.Generator().manual_seed(0)
    tensor = torch.zeros(3 << 9, 2048, dtype=torch.float64)
    if kind == "one column":
        tensor[:, 7] = torch.randn(len(tensor), generator=generator, dtype=torch.float64)
    elif kind == "few elements":
        tensor[::500, 3] = 1.0
    else:
        tensor[:] = torch.randn(1 << 9, 2048, generator=generator, dtype=torch.float64).repeat(3, 1)
    tensor = tensor.bfloat16() if kind == "bfloat16" else tensor
    assert abs(float(sketch(tensor).norm() / tensor.double().norm()) - 1) < 5 * (2 / ROWS) ** 0.5


def test_a_sketch_in_a_backward_is_that_of_anywhere_else() -> None:
    """verify sketches gradients in hooks, while the draws of a step are keyed by its examples."""
    sketches._drawn.cache_clear()
    draws = StepDraws()
    draws.begin_batch(0, np.arange(8, dtype=np.uint64), (8,))
    weight = nn.Parameter(torch.ones(64, 100))
    made: list[Tensor] = []

    def hook(grad: Tensor) -> None:
        with draws.suspended():
            made.append(sketch(grad))

    weight.register_hook(hook)
    try:
        (weight * 3).sum().backward()
    finally:
        draws.close()
    sketches._drawn.cache_clear()
    torch.testing.assert_close(made[0], sketch(torch.full((64, 100), 3.0)))


def test_suspended_draws_in_a_backward_are_torchs() -> None:
    draws = StepDraws()
    draws.begin_batch(0, np.arange(8, dtype=np.uint64), (8,))
    weight = nn.Parameter(torch.ones(3))
    made: list[Tensor] = []

    def hook(_: Tensor) -> None:
        with draws.suspended():
            made.append(torch.randn(8, 2, generator=torch.Generator().manual_seed(5)))

    weight.register_hook(hook)
    try:
        weight.sum().backward()
    finally:
        draws.close()
    torch.testing.assert_close(made[0], torch.randn(8, 2, generator=torch.Generator().manual_seed(5)))
