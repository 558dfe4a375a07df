"""The recorded examples of plain scripts: what is stored, how it is joined, and which random numbers it gets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.trials.spec import TrialEnded
from paceline.verify.plain_worker.examples import (
    Recorded,
    Replay,
    collated,
    content_key,
    dump,
    examples_path,
    joined,
)


def test_a_row_is_stored_without_the_rest_of_its_tensor() -> None:
    rows = torch.arange(1_000_000.0).reshape(-1, 10)
    stored = dump((rows[3], {"label": rows[4].bfloat16()}))
    assert len(stored) < 2000
    row, labels = pickle.loads(stored)
    assert torch.equal(row, rows[3])
    assert torch.equal(labels["label"], rows[4].bfloat16())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1, 2]), torch.tensor([2, 1])),
        ({"a": 1}, {"b": 1}),
        ([1, [2]], [[1], 2]),
        ("1", 1),
        (np.zeros((2, 3)), np.zeros((3, 2))),
    ],
)
def test_different_examples_have_different_keys(one: Any, other: Any) -> None:
    assert content_key(one) == content_key(pickle.loads(pickle.dumps(one)))
    assert content_key(one) != content_key(other)


def test_batches_that_a_data_set_makes_are_joined_by_rows() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    found = joined(
        [{"x": x[:1], "y": ["a"], "z": (np.ones(1), None)}, {"x": x[1:], "y": ["b", "c"], "z": (np.zeros(2), None)}]
    )
    assert torch.equal(found["x"], x)
    assert found["y"] == ["a", "b", "c"]
    assert found["z"][0].tolist() == [1.0, 0.0, 0.0]


def test_a_collate_function_draws_the_same_for_an_example_alone_and_with_others() -> None:
    def mask(examples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(examples) * torch.bernoulli(torch.full((len(examples), 8), 0.5))

    examples = [torch.full((8,), float(i + 1)) for i in range(4)]
    keys = [content_key(one) for one in examples]
    together = collated(mask, examples, keys, [2, 2])
    apart = [collated(mask, examples[a:b], keys[a:b], [b - a]) for a, b in ((0, 2), (2, 4))]
    assert torch.equal(together, torch.cat(apart))
    assert 0 < int(together.count_nonzero()) < 32


def test_a_permutation_of_a_batch_stays_within_each_rank() -> None:
    def mix(examples: list[int]) -> list[int]:
        return [examples[i] for i in torch.randperm(len(examples)).tolist()]

    together = collated(mix, list(range(8)), [*range(8)], [5, 3])
    assert sorted(together[:5]) == [0, 1, 2, 3, 4]
    assert together[:5] == collated(mix, list(range(5)), [*range(5)], [5])
    assert together[5:] == [5 + i for i in collated(mix, list(range(3)), [*range(3)], [3])]


def test_the_script_keeps_its_own_random_numbers() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    collated(lambda examples: torch.rand(len(examples)), [1, 2], [1, 2], [2])
    assert torch.equal(torch.rand(3), expected)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two ranks; rank 0 has three batches of a pass, and rank 1 has two."""
    for rank, batches in enumerate(([[0, 1], [2, 3], [4]], [[10, 11], [12]])):
        for number, batch in enumerate(batches):
            path = examples_path(str(tmp_path), 0, 0, number, rank)
            Path(path).write_bytes(dump(Recorded(batch, batch, True)))
    return tmp_path


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, [[0, 1, 10, 11], [2, 3, 12], [4]]),
        ({"only_rank": 1}, [[10, 11], [12]]),
        ({"separately": True}, [[0, 1], [10, 11], [2, 3], [12], [4]]),
        ({"reverse": True}, [[11, 10, 1, 0], [12, 3, 2], [4]]),
    ],
)
def test_uneven_ranks_are_replayed(recorded: Path, how: dict[str, Any], expected: list[list[int]]) -> None:
    replay = Replay(str(recorded), [[[0, 0, 3, True]], [[0, 0, 2, True]]], **how)
    found = [[one for part in parts for one in part.examples] for parts in replay.batches(0, 0)]
    assert found == expected


def test_a_run_that_asks_for_more_than_was_recorded_ends(recorded: Path) -> None:
    replay = Replay(str(recorded), [[[0, 0, 3, False]], [[0, 0, 2, False]]])
    with pytest.raises(TrialEnded):
        list(replay.batches(0, 0))
    assert replay.exhausted
