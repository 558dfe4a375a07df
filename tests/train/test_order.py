"""The order of the data, and how a global batch is cut: against arithmetic of the test's own."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.strategies.batch_plan import AllMicroBatches, AllShards, cut, one_shard
from paceline.train.randomness import permutation


def test_an_epoch_is_a_permutation_that_seed_name_and_epoch_change() -> None:
    orders = {
        key: tuple(permutation(101, *key))
        for key in [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0), (2**63 - 1, "a", 0)]
    }
    assert all(sorted(order) == list(range(101)) for order in orders.values())
    assert len(set(orders.values())) == len(orders)
    assert orders[(0, "a", 0)] == tuple(permutation(101, 0, "a", 0))


def test_the_order_of_a_seed_never_changes() -> None:
    """A checkpoint written by an earlier version is resumed in the same order: these numbers are part of the format."""
    assert permutation(10, 0, "train", 0).tolist() == [4, 8, 1, 5, 7, 3, 2, 6, 0, 9]
    assert permutation(10, 7, "train", 3).tolist() == [1, 2, 4, 9, 5, 0, 3, 7, 8, 6]


def test_every_place_is_equally_likely() -> None:
    """Chi-squared over the place of example 0 in 2,000 epochs of 10: 9 degrees of freedom, 27.9 is its 99.9% point."""
    places = Counter(permutation(10, 0, "train", epoch).tolist().index(0) for epoch in range(2000))
    assert sum((places[i] - 200) ** 2 / 200 for i in range(10)) < 27.9


@given(
    total=st.integers(1, 60),
    shards=st.integers(1, 9),
    micro=st.none() | st.integers(1, 9),
    together=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_a_global_batch_is_cut_without_loss_and_equally_often(
    total: int, shards: int, micro: int | None, together: bool
) -> None:
    batch = list(range(100, 100 + total))
    plans = [AllMicroBatches(shards, (s,)) if together else one_shard(shards, s) for s in range(shards)]
    per_shard = [list(plan.requests(batch, 0, 0, micro)) for plan in plans]
    assert len({len(own) for own in per_shard}) == 1, "the ranks' loaders yield unequally often"
    assert [i for own in per_shard for r in own for i in r.indices] == batch, "lost, doubled, or out of order"
    sizes = [sum(r.examples for r in own) for own in per_shard]
    assert max(sizes) - min(sizes) <= 1
    if micro is not None:
        assert all(len(part.indices) <= micro for own in per_shard for r in own for part in r.parts)
    assert all(own[-1].final and not any(r.final for r in own[:-1]) for own in per_shard)
    assert all(r.total == total and r.first == 100 for own in per_shard for r in own)


@given(count=st.integers(0, 1000), parts=st.integers(1, 70))
def test_parts_are_adjacent_and_cover(count: int, parts: int) -> None:
    bounds = [cut(count, parts, part) for part in range(parts)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(bounds))
    sizes = [stop - start for start, stop in bounds]
    assert sizes == sorted(sizes, reverse=True), "what is left over goes to the first parts"
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize("shards", [2, 3])
def test_one_process_that_computes_all_shards_has_the_same_parts(shards: int) -> None:
    batch = list(range(23))
    alone = [list(one_shard(shards, s).requests(batch, 1, 2, 4)) for s in range(shards)]
    for number, request in enumerate(AllShards(shards, tuple(range(shards))).requests(batch, 1, 2, 4)):
        assert list(request.parts) == [own[number].parts[0] for own in alone]
