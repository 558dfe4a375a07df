"""Draws that belong to examples: each row is the same in any batch, and distributed as torch's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.draws import ExampleDraws, RowKeys
from paceline.data.randomness import mix, mix_each


def drawing(examples: Sequence[int]) -> ExampleDraws:
    keys = RowKeys(len(examples), lambda: mix_each(mix(7), np.array(examples)))
    return ExampleDraws(keys, lambda call, number: call.plain())


DRAWS: dict[str, Callable[[int], Tensor]] = {
    "rand": lambda n: torch.rand(n, 3),
    "a number each": lambda n: torch.rand(n),
    "rand in double": lambda n: torch.rand((n, 2), dtype=torch.float64),
    "rand in half": lambda n: torch.rand(n, 5, dtype=torch.float16),
    "randn": lambda n: torch.randn(n, 2, 3, 2),
    "complex randn": lambda n: torch.randn(n, 2, dtype=torch.complex64),
    "randint": lambda n: torch.randint(0, 1000, (n, 4)),
    "with a generator": lambda n: torch.randint(9, (n, 4), generator=torch.Generator().manual_seed(n)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 2)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 2)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n, 2), 3, 99),
    "normal": lambda n: torch.normal(torch.zeros(n, 3), torch.ones(3)),
    "normal of a size": lambda n: torch.normal(1.0, 2.0, (n, 3)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 9), 0.4)),
    "bernoulli with p": lambda n: torch.bernoulli(torch.zeros(n, 9), p=0.4),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(-1, 2),
    "uniform_ of a part": lambda n: torch.zeros(4, n, 3).transpose(0, 1).uniform_(-1, 2),
    "normal_": lambda n: torch.empty(n, 3).normal_(),
    "bernoulli_": lambda n: torch.empty(n, 9).bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda n: torch.empty(n, 9).bernoulli_(torch.full((9,), 0.3)),
    "random_": lambda n: torch.empty(n, 3).random_(5, 500),
    "random_ of all": lambda n: torch.empty(n, 3, dtype=torch.int64).random_(),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(),
    "cauchy_": lambda n: torch.empty(n, 3).cauchy_(),
    "log_normal_": lambda n: torch.empty(n, 3).log_normal_(),
    "geometric_": lambda n: torch.empty(n, 3).geometric_(0.1),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 8), 5),
    "multinomial with replacement": lambda n: torch.multinomial(torch.ones(n, 8), 5, replacement=True),
    "poisson": lambda n: torch.poisson(torch.full((n, 4), 9.0)),
    "binomial": lambda n: torch.binomial(torch.full((n, 4), 50.0), torch.full((n, 4), 0.5)),
    "gamma": lambda n: torch.distributions.Gamma(torch.ones(n, 2), torch.ones(n, 2)).sample(),
    "dirichlet": lambda n: torch.distributions.Dirichlet(torch.ones(n, 3)).sample(),
    "categorical": lambda n: torch.distributions.Categorical(torch.ones(n, 99)).sample(),
    "dropout": lambda n: F.dropout(torch.ones(n, 20), 0.4),
    "dropout2d": lambda n: F.dropout2d(torch.ones(n, 20, 2, 2), 0.4),
    "alpha dropout": lambda n: F.alpha_dropout(torch.ones(n, 20), 0.4, training=True),
    "rrelu": lambda n: F.rrelu(-torch.ones(n, 4), training=True),
    "gumbel": lambda n: F.gumbel_softmax(torch.zeros(n, 4)),
    "attention": lambda n: F.scaled_dot_product_attention(*[torch.ones(n, 2, 4, 3)] * 3, dropout_p=0.4),
    "out": lambda n: torch.rand(n, 3, out=torch.empty(n, 3)),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("inference", [False, True])
def test_a_row_is_the_same_in_any_batch(name: str, inference: bool) -> None:
    draw = DRAWS[name]
    with torch.inference_mode(inference):
        with drawing(range(6)):
            first, second = draw(6), draw(6)
        for part in ([4], [2, 5], [5, 4, 3, 2, 1, 0]):
            torch.manual_seed(part[0])
            with drawing(part):
                assert torch.equal(draw(len(part)), first[part])
                assert torch.equal(draw(len(part)), second[part])
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("name", ["rand", "randn", "bernoulli", "randint", "dropout", "attention weights"])
def test_padding_appends_draws_and_changes_none(name: str) -> None:
    made: dict[str, Callable[[int], Tensor]] = {
        "rand": lambda n: torch.rand(3, n),
        "randn": lambda n: torch.randn(3, n),
        "bernoulli": lambda n: torch.bernoulli(torch.full((3, n), 0.4)),
        "randint": lambda n: torch.randint(50, (3, n)),
        "dropout": lambda n: F.dropout(torch.ones(3, n, 4), 0.4),
        "attention weights": lambda n: F.dropout(torch.ones(3, 2, n, n), 0.4),
    }
    with drawing(range(3)):
        short = made[name](17)
    with drawing(range(3)):
        long = made[name](40)
    assert torch.equal(long[tuple(slice(0, size) for size in short.shape)], short)


MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(400, 500), 0.5, 1 / 12),
    "rand in bfloat16": (lambda: torch.rand(400, 500, dtype=torch.bfloat16), 0.5 - 2**-9, 1 / 12),
    "randn": (lambda: torch.randn(400, 500), 0, 1),
    "normal": (lambda: torch.normal(3.0, 2.0, (400, 500)), 3, 4),
    "randint": (lambda: torch.randint(0, 7, (400, 500)), 3, 4),
    "bernoulli": (lambda: torch.bernoulli(torch.full((400, 500), 0.15)), 0.15, 0.15 * 0.85),
    "bernoulli_": (lambda: torch.empty(400, 500).bernoulli_(0.15), 0.15, 0.15 * 0.85),
    "exponential_": (lambda: torch.empty(400, 500).exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda: torch.empty(400, 500).geometric_(0.25), 4, 12),
    "dropout": (lambda: F.dropout(torch.ones(400, 500), 0.2), 1, 0.25),
    "poisson": (lambda: torch.poisson(torch.full((400, 500), 4.0)), 4, 4),
    "multinomial": (lambda: torch.multinomial(torch.tensor([[1.0, 2, 1]]).expand(400, 3), 500, True), 1, 0.5),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_the_distribution_is_the_operators(name: str) -> None:
    draw, mean, variance = MOMENTS[name]
    with drawing(range(400)):
        drawn = draw().double()
    error = math.sqrt(variance / drawn.numel())
    assert abs(float(drawn.mean()) - mean) < 5 * error
    assert abs(float(drawn.var()) - variance) < 0.04 * variance  # some 8 standard errors, of geometric the most


def test_what_has_no_row_for_each_example_comes_from_the_default_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4), torch.rand(2, 3), torch.randperm(3)
    torch.manual_seed(5)
    with drawing(range(3)):
        kept = torch.rand(3, 4)
        made = torch.rand(4), torch.rand(2, 3), torch.randperm(3)
    assert all(map(torch.equal, made, expected))
    assert kept.shape == (3, 4)


def test_numbers_stay_inside_their_range() -> None:
    with drawing(range(200)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            drawn = torch.rand(200, 500, dtype=dtype)
            assert float(drawn.min()) >= 0
            assert float(drawn.max()) < 1
        assert bool(torch.empty(200, 500).exponential_().isfinite().all())
        assert bool(torch.randn(200, 500).isfinite().all())
        assert set(torch.empty(200, 50, dtype=torch.uint8).random_().flatten().tolist()) <= set(range(256))
        assert float(torch.bernoulli(torch.ones(200, 500)).min()) == 1


def test_gradients_go_through_what_is_drawn() -> None:
    x: Any = torch.ones(4, 50, requires_grad=True)
    with drawing(range(4)):
        out = F.dropout(x, 0.5)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())
