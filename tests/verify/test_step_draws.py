"""Random numbers of a plain script's step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.verify.plain_worker.step_draws import StepDraws, own_keys


@pytest.fixture
def draws() -> Iterator[StepDraws]:
    made = StepDraws()
    yield made
    made.close()


def begin(draws: StepDraws, examples: range, sizes: tuple[int, ...]) -> None:
    draws.begin_batch(0, np.array(examples, dtype=np.uint64), sizes)


def test_each_row_is_that_of_its_example(draws: StepDraws) -> None:
    begin(draws, range(8), (4, 4))
    whole = torch.randn(8, 3)
    found: list[Tensor] = []
    for share in (range(4), range(4, 8)):
        begin(draws, share, (4,))
        found.append(torch.randn(4, 3))
    torch.testing.assert_close(torch.cat(found), whole)


@pytest.mark.parametrize("rows", [8, 5])
def test_draws_aside_do_not_shift_later_draws(rows: int, draws: StepDraws) -> None:
    """Rank 0 evaluates before a training step, and the other ranks do not."""
    begin(draws, range(8), (8,))
    first, second = torch.randn(8, 3), torch.randn(8, 3)
    begin(draws, range(8), (8,))
    again = [torch.randn(8, 3)]
    with draws.aside():
        aside = torch.randn(rows, 3)
        torch.rand(rows)
    again.append(torch.randn(8, 3))
    torch.testing.assert_close(again, [first, second])
    assert not torch.equal(aside, first[:rows])


def test_a_teachers_draws_aside_belong_to_its_examples(draws: StepDraws) -> None:
    """An encoder that is not trained adds noise to each example of the batch."""
    begin(draws, range(8), (4, 4))
    with draws.aside():
        whole = torch.randn(8, 3)
    begin(draws, range(4, 8), (4,))
    with draws.aside():
        torch.testing.assert_close(torch.randn(4, 3), whole[4:])


def test_copies_of_an_example_have_draws_of_their_own(draws: StepDraws) -> None:
    """A rank generates several answers to a prompt: equal answers would have no advantage over each other."""
    examples = [5, 5, 6, 5, 6, 6]
    keys, sizes = own_keys(examples, (3, 3)), (3, 3)
    draws.begin_batch(0, keys, sizes)
    whole = torch.randn(6, 3)
    shares = []
    for share in (examples[:3], examples[3:]):
        draws.begin_batch(0, own_keys(share, (3,)), (3,))
        shares.append(torch.randn(3, 3))
    torch.testing.assert_close(torch.cat(shares), whole)
    for rank in shares:
        assert len({tuple(row.tolist()) for row in rank}) == 3
