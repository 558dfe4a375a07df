"""Numbers that stand for the values of a tensor."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.observe.digests import digest, projections
from paceline.observe.sketches import ROWS, WHOLE, sketch
from paceline.verify.evidence import linear_combination


def test_a_digest_is_of_the_bits() -> None:
    numbers = torch.arange(4096.0).view(64, 64)
    assert digest(numbers) == digest(numbers.clone()) == digest(numbers.t().contiguous().t())
    assert digest(numbers) != digest(numbers + 1e-3)
    assert digest(numbers, most=512) == digest(numbers.clone(), most=512)
    assert digest(numbers.bfloat16()) != digest(numbers.bfloat16() + 1)
    assert digest(torch.tensor(True)) != digest(torch.tensor(False))


def test_scores_that_are_masked_with_infinity_are_told_apart() -> None:
    """A contrastive loss masks each example's similarity with itself: every row holds an infinite number."""
    scores = torch.randn(6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.eye(6, dtype=torch.bool)
    own, other = (one.masked_fill(mask, -math.inf) for one in (scores, scores + 1))
    assert all(abs(value) < 1e3 for value in projections(own))
    assert all(abs(a - b) > 1e-3 for a, b in zip(projections(own), projections(other), strict=True))
    assert projections(own) != projections(scores.masked_fill(mask, math.inf))
    assert projections(own) != projections(scores.masked_fill(mask, 0.0))


def test_what_is_not_a_number_stays_apart() -> None:
    assert projections(torch.tensor([[1.0, math.nan], [1.0, 2.0]]))[0] == 1e308


def test_a_sketch_keeps_norms_of_differences_and_linear_relations() -> None:
    draw = torch.Generator().manual_seed(5)
    first, second = (torch.randn(300, 700, generator=draw, dtype=torch.float64) for _ in range(2))
    assert sketch(first).shape == (ROWS,)
    for other in (second, first + 1e-6 * second, torch.zeros_like(first)):
        found, exact = float((sketch(first) - sketch(other)).norm()), float((first - other).norm())
        assert found == pytest.approx(exact, rel=0.2)  # four standard deviations
    one_column = first.clone()
    one_column[:, 3] += 0.1
    exact = float((one_column - first).norm())
    assert float((sketch(one_column) - sketch(first)).norm()) == pytest.approx(exact, rel=0.2)
    whole = {"w": sketch(0.3 * first + 0.9 * second)}
    found_shares = linear_combination(whole, [{"w": sketch(first)}, {"w": sketch(second)}])
    assert found_shares is not None
    assert found_shares[0] == pytest.approx([0.3, 0.9])


def test_what_is_small_is_kept_whole() -> None:
    tensor = torch.randn(WHOLE)
    assert sketch(tensor) is tensor
