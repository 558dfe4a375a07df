"""How a batch is cut by weight, and which cut follows from the measured times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.balance.balance import GAIN, TOLERANCE, line, new_weights, steady_part
from paceline.data.batch_plan import DealtShards, cut, one_shard
from paceline.data.shard_sizes import ShardSizes, bounds, sizes_of

WEIGHTS = st.lists(st.integers(1, 2**20), min_size=1, max_size=9).map(tuple)


@given(st.integers(0, 3000), WEIGHTS)
def test_parts_join_up_and_have_sizes_in_proportion(count: int, weights: tuple[int, ...]) -> None:
    found = bounds(count, weights)
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(end == start for (_, end), (start, _) in pairwise(found))
    sizes = sizes_of(count, weights)
    if count >= len(weights):  # each process has something to measure
        assert min(sizes) >= 1
        free = count - len(weights)
        for size, weight in zip(sizes, weights, strict=True):
            assert abs(size - 1 - free * weight / sum(weights)) < 1


def test_equal_weights_are_an_even_split_with_the_first_parts_larger() -> None:
    for count in range(3, 40):
        assert [cut(count, 3, part, (7, 7, 7)) for part in range(3)] == [cut(count, 3, part) for part in range(3)]


def test_a_batch_smaller_than_the_number_of_shards_ignores_the_weights() -> None:
    assert [cut(2, 3, part, (1, 1, 100)) for part in range(3)] == [(0, 1), (1, 2), (2, 2)]


def test_times_become_equal_where_they_are_in_proportion_to_the_examples() -> None:
    weights = new_weights([32, 32], [0.1, 0.3], 64)
    assert weights is not None
    assert sizes_of(64, weights) == [48, 16]
    assert new_weights([48, 16], [0.15, 0.15], 64) is None


def test_a_fixed_part_of_each_step_is_found_in_a_few_cuts() -> None:
    """Seconds are 0.05 + 0.001 n and 0.05 + 0.004 n: equal at n = 51.2 and 12.8 of 64."""
    sizes = [32, 32]
    for _ in range(8):
        weights = new_weights(list(map(float, sizes)), [0.05 + 0.001 * sizes[0], 0.05 + 0.004 * sizes[1]], 64)
        if weights is not None:
            sizes = sizes_of(64, weights)
    assert abs(sizes[0] - 51.2) < 3


@pytest.mark.parametrize(
    ("examples", "took"),
    [
        ([32.0, 32.0], [1.0, 1.01 - TOLERANCE]),  # near enough
        ([2.0, 2.0], [1.0, 0.8]),  # a whole example is too much
        ([32.0, 32.0, 32.0], [0.5, 0.5, 0.5]),
    ],
)
def test_no_new_cut_where_it_would_not_help(examples: list[float], took: list[float]) -> None:
    assert new_weights(examples, took, round(sum(examples))) is None


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.floats(1e-4, 10, allow_nan=False, allow_infinity=False)),
        min_size=2,
        max_size=8,
    )
)
def test_a_new_cut_shortens_the_longest_time_as_far_as_it_is_known(pairs: list[tuple[int, float]]) -> None:
    examples, took = [float(count) for count, _ in pairs], [seconds for _, seconds in pairs]
    total = round(sum(examples))
    weights = new_weights(examples, took, total)
    if weights is not None:
        new = sizes_of(total, weights)
        assert sum(new) == total
        expected = [size * seconds / count for size, (count, seconds) in zip(new, pairs, strict=True)]
        assert max(expected) <= (1 - GAIN) * max(took) * (1 + 1e-9)


def test_whole_shards_are_distributed_where_they_have_a_fixed_size() -> None:
    """8 shards of 4 examples, 3 times as fast on one process: 6 and 2."""
    weights = new_weights([16, 16], [0.1, 0.3], 8)
    assert weights is not None
    assert sizes_of(8, weights) == [6, 2]
    assert new_weights([20, 12], [0.1, 0.11], 8) is None  # a whole shard is too much
    assert "8 shards are now split 6, 2 (were 4, 4)" in line(60, [16, 16], [0.1, 0.3], weights, 8, "shard")
    sizes = ShardSizes()
    plan = DealtShards(8, (4, 5, 6, 7), 4, process=1).balanced(sizes)
    layout = plan.layout(32, None, (3, 1))
    assert [(shard, low, high) for ((shard, _, low, high),) in layout.yields] == [
        (6, 24, 28), (7, 28, 32), (8, 32, 32), (8, 32, 32), (8, 32, 32), (8, 32, 32),
    ]  # fmt: skip
    assert len(plan.layout(32, None).yields) == 4
    with pytest.raises(TypeError, match=r"loader\.steps"):
        plan.count({32: 5}, None)


def test_the_steps_count_in_which_the_speed_was_about_the_same() -> None:
    steady = [(10, 1.0), (10, 1.2)] * 8
    assert steady_part(steady) == steady
    recut = [(30, 3.0)] * 4 + [(10, 1.0)] * 4
    assert steady_part(recut) == recut
    slower = [(10, 1.0)] * 40 + [(10, 3.0)] * 10  # 25 newer steps are of both kinds, and 13 too
    assert steady_part(slower) == [(10, 3.0)] * 7
    assert steady_part([(10, 3.0)] * 6 + [(10, 1.0)] * 2) == []  # too few since the change
    for unknown in ([], [(10, 1.0)] * 4, [(0, 0.0)] * 8):
        assert steady_part(unknown) == []


def test_a_cut_begins_after_the_last_position_that_was_planned() -> None:
    sizes = ShardSizes()
    assert sizes.plan("a", 0, 7) == ()
    sizes.change((3, 1), {"a": (0, 9)})  # another process has planned two steps more
    assert sizes.at("a", 0, 9) == ()
    assert sizes.at("a", 0, 10) == (3, 1)
    assert sizes.at("b", 0, 0) == (3, 1)  # of a loader that nobody has read yet
    sizes.change((5, 1), {"a": (1, 2), "b": (0, 0)})
    assert [sizes.at("a", *place) for place in ((0, 9), (1, 2), (1, 3))] == [(), (3, 1), (5, 1)]
    assert [sizes.at("b", 0, step) for step in (0, 1)] == [(3, 1), (5, 1)]
    sizes.change((9, 1), {"a": (0, 4)})  # a restore went back: later cuts were never used
    assert [sizes.at("a", *place) for place in ((0, 4), (0, 5), (2, 0))] == [(), (9, 1), (9, 1)]


def test_micro_batches_follow_the_largest_shard() -> None:
    sizes = ShardSizes()
    plan = one_shard(2, 1).balanced(sizes)
    layout = plan.layout(12, 4, (3, 1))
    assert layout.micro_batches == 3  # 9 examples on the other process
    assert [high - low for ((_, _, low, high),) in layout.yields] == [1, 1, 1]
    assert layout.mean_over == 12
    with pytest.raises(TypeError, match=r"loader\.steps"):
        plan.count({12: 5}, 4)
    assert plan.count({12: 5}, None) == 5


def test_independent_replicas_average_over_their_own_examples() -> None:
    plan = one_shard(2, 1, independent=True).balanced(ShardSizes())
    assert plan.layout(12, None, (3, 1)).mean_over == 3


def test_the_line_names_sizes_and_times() -> None:
    assert line(60, [32, 32], [0.1, 0.3], (3, 1), 64) == (
        "balance, step 60: 64 examples are now split 48, 16 (were 32, 32), because the processes took 100, 300 ms of "
        "their own time for a step."
    )
