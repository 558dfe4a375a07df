"""The kind of a difference, from gradients with a known sum."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.verify.hypotheses import Explanation, explain

NAMES = ("weight", "bias")
Grads = dict[str, torch.Tensor]


def drawn(seed: int) -> Grads:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(20, generator=g, dtype=torch.float64) for name in NAMES}


def total(weights: Sequence[float], grads: Sequence[Grads], rounding: float = 1e-9) -> Grads:
    noise = drawn(99)
    return {n: sum(w * one[n] for w, one in zip(weights, grads, strict=True)) + rounding * noise[n] for n in NAMES}


PARTS = [drawn(0), drawn(1)]
EVEN = total([0.5, 0.5], PARTS)  # one process, if every example counts the same


def explained(ours: Grads, whole: Grads = EVEN, before: Grads | None = None) -> Explanation | None:
    return explain(NAMES, ours, whole, [[part] for part in PARTS], before or {}, lambda _: 1e-6)


@pytest.mark.parametrize(
    ("ours", "whole", "key", "words"),
    [
        (total([1, 1], PARTS), EVEN, "factor", "2 times (2 is the number of processes)"),
        (total([0.25, 0.25], PARTS), EVEN, "factor", "1/2 times"),
        (total([0, 0], PARTS, rounding=0), EVEN, "no-gradient", "zero"),
        (total([1, 0], PARTS), EVEN, "not-reduced", "rank 0's examples alone"),
        (EVEN, total([0.3, 0.7], PARTS), "mean-of-means", "weights them by 0.3, 0.7"),
        (total([0, 0.5], PARTS), EVEN, "rank-missing", "rank 0 contributes nothing"),
        (total([0.7, 0.3], PARTS), EVEN, "weights", "0.7 g0 + 0.3 g1"),
        (EVEN, drawn(5), "batch-level", "no mean of the ranks' losses"),
    ],
)
def test_the_kind_of_a_difference(ours: Grads, whole: Grads, key: str, words: str) -> None:
    found = explained(ours, whole)
    assert found is not None
    assert (found.key, found.accused) == (key, key != "batch-level")
    assert words in found.sentence


def test_a_gradient_of_the_previous_update() -> None:
    before = drawn(7)
    found = explained(before, before=before)
    assert found is not None
    assert found.key == "stale"
    assert explained(drawn(8), before=before) is None, "nothing explains other numbers"


def test_a_backward_that_is_lost() -> None:
    pieces = [[drawn(rank * 10 + k) for k in range(3)] for rank in range(2)]
    ours = total([0.5, 0.5, 0.0, 0.5, 0.5, 0.5], [one for rank in pieces for one in rank])
    whole = total([0.5] * 6, [one for rank in pieces for one in rank])
    found = explain(NAMES, ours, whole, pieces, {}, lambda _: 1e-6)
    assert found is not None
    assert found.key == "backward-lost"
    assert "rank 0: 0.5, 0.5, " in found.sentence
    assert "rank 1: 0.5, 0.5, 0.5" in found.sentence


def test_a_mean_of_the_means_of_micro_batches() -> None:
    pieces = [[drawn(rank * 10 + k) for k in range(2)] for rank in range(2)]
    each = [one for rank in pieces for one in rank]
    found = explain(NAMES, total([0.5] * 4, each), total([0.4, 0.7, 0.6, 0.3], each), pieces, {}, lambda _: 1e-6)
    assert found is not None
    assert (found.key, found.accused) == ("mean-of-means", True)
    assert "by 0.3 to 0.7" in found.sentence


def test_not_a_number_is_explained_by_nothing() -> None:
    assert explained({name: torch.full((20,), torch.nan, dtype=torch.float64) for name in NAMES}) is None
