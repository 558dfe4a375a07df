"""The order of the data, and how a global batch is cut: against arithmetic of the test's own."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from contextlib import closing
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.data import order
from paceline.data.batch_plan import AllMicroBatches, AllShards, cut, one_shard
from paceline.data.randomness import permutation
from paceline.data.sources import LoaderArguments, make_source
from paceline.errors import UsageError


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


LARGE = order.WHOLE + 4321


def keyed(length: int, *key: Any) -> np.ndarray:
    found = order.order_of(length, *key)
    assert isinstance(found, order.KeyedOrder)
    return found[0:length]


def test_a_large_epoch_is_a_permutation_that_seed_name_and_epoch_change() -> None:
    orders = [keyed(LARGE, *key) for key in [(0, "a", 0), (0, "a", 1), (0, "b", 0), (1, "a", 0), (2**63 - 1, "a", 0)]]
    assert all((np.sort(one) == np.arange(LARGE)).all() for one in orders)
    for one, other in combinations(orders, 2):  # of two random orders one place in LARGE is alike
        assert (one == other).sum() < 10
    assert (orders[0] == keyed(LARGE, 0, "a", 0)).all()
    assert keyed(LARGE, 7, "train", 3)[:5].tolist() == [
        406,
        61646,
        59256,
        5076,
        54187,
    ]  # part of the format of checkpoints


@given(length=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=100, deadline=None)
def test_a_keyed_order_has_each_example_once(length: int, key: int) -> None:
    assert np.sort(order.KeyedOrder(length, key)[0:length]).tolist() == list(range(length))


def test_slices_of_a_keyed_order_are_those_of_the_whole() -> None:
    whole, one = keyed(LARGE, 0, "a", 0), order.order_of(LARGE, 0, "a", 0)
    assert len(one) == LARGE
    for first, last in [(0, 1), (4090, 4100), (100, 20000), (LARGE - 3, LARGE + 99), (5, 5), (0, 4096), (70, 60)]:
        assert one[first:last].tolist() == whole[first:last].tolist()


def test_an_epoch_of_ten_billion_examples_takes_no_memory_and_begins_anywhere() -> None:
    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 10**10

        def __getitem__(self, index: int) -> int:
            return index

    given = LoaderArguments(global_batch=256, shuffle=True)
    tracemalloc.start()
    try:
        source = make_source(Numbers(), given, seed=0, plan=lambda: one_shard(2, 1))
        assert (source.steps(), source.yields()) == (39_062_500, 39_062_500)
        request, (batch,) = next(source.fetch(3, 39_062_499))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert (request.step, len(batch), request.final) == (39_062_499, 128, True)
    assert batch.tolist() == order.order_of(10**10, 0, "train", 3)[10**10 - 128 : 10**10].tolist()


def test_an_epoch_that_an_earlier_release_began_ends_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "WHOLE", 100)
    length = 700
    data = torch.utils.data.TensorDataset(torch.arange(length))

    def read(state: dict[str, Any]) -> tuple[list[list[int]], dict[str, Any]]:
        """The rest of the epoch that the state is in, and the next one; and the state in the middle of the former."""
        with closing(paceline.start(device="cpu", progress="off")) as run:
            loader = run.loader(data, global_batch=200, shuffle=True)
            loader.load_state_dict(state)
            seen: list[list[int]] = []
            saved: dict[str, Any] = {}
            for _ in range(2):
                seen.append([])
                for (batch,) in loader:
                    seen[-1] += batch.tolist()
                    loader.mark_stepped(loader.current)
                    saved = saved or loader.state_dict()
        return seen, saved

    before = {"epoch": 1, "step": 2, "length": length, "global_batch": 200, "drop_last": False}
    first, second = permutation(length, 0, "train", 1).tolist(), keyed(length, 0, "train", 2).tolist()
    seen, saved = read(before)
    assert seen == [first[400:], second]
    assert (saved["step"], saved["order"]) == (3, 1)
    assert read(saved)[0] == [first[600:], second]
    now = keyed(length, 0, "train", 1).tolist()
    assert read({**before, "order": 2})[0] == [now[400:], second]
    assert read({**before, "step": 0})[0] == [now, second]
    with pytest.raises(UsageError, match=r"by a newer Paceline, .* \(order 3\)"):
        read({**before, "order": 3})


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
