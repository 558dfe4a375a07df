"""Numbers that stand for the values of a tensor."""

from __future__ import annotations

import math

import torch

from paceline.observe.digests import digest, projections


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
