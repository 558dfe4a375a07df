"""run.prepare takes torch's DataLoaders of a script for one device: their batch is the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

import paceline
from paceline.errors import UsageError

DATA = TensorDataset(torch.arange(10.0))


class Stream(IterableDataset[tuple[Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (DATA[index] for index in range(len(DATA)))


@pytest.fixture
def run() -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", progress="off")
    yield run
    run.close()


def batches(loader: Any) -> list[list[float]]:
    return [batch[0].tolist() for batch in loader]


@pytest.mark.parametrize(
    ("options", "same_as"),
    [
        ({"batch_size": 4}, {"global_batch": 4}),
        ({"batch_size": 4, "drop_last": True}, {"global_batch": 4, "drop_last": True}),
        ({"batch_size": 4, "shuffle": True}, {"global_batch": 4, "shuffle": True}),
        ({"batch_size": 4, "num_workers": 1, "prefetch_factor": 3}, {"global_batch": 4}),
    ],
)
def test_a_dataloader_is_read_as_a_global_batch(
    run: paceline.Run, options: dict[str, Any], same_as: dict[str, Any]
) -> None:
    _, loader = run.prepare(nn.Linear(1, 1), DataLoader(DATA, **options))
    found = batches(loader)
    run.close()
    other = paceline.start(device="cpu", progress="off")
    expected = batches(other.loader(DATA, **same_as))
    other.close()
    assert found == expected


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(DATA, batch_size=2, sampler=[5, 1, 2]), [[5, 1], [2]]),
        (DataLoader(DATA, batch_sampler=[[1, 2], [5]]), [[1, 2], [5]]),
        (DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, True)), [[0, 1, 2, 3, 4, 5]]),
        (DataLoader(Stream(), batch_size=6), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]),
        (DataLoader(DATA, batch_size=8, collate_fn=lambda rows: [-torch.stack([row[0] for row in rows])]),
         [[0, -1, -2, -3, -4, -5, -6, -7], [-8, -9]]),
    ],
    ids=["sampler", "list", "batch_sampler", "stream", "collate"],
)  # fmt: skip
def test_other_forms(run: paceline.Run, loader: Any, expected: list[list[float]]) -> None:
    assert batches(run.prepare(loader)) == expected


def test_draws_with_replacement_are_the_samplers(run: paceline.Run) -> None:
    sampler = RandomSampler(DATA, replacement=True, num_samples=40)
    found = batches(run.prepare(DataLoader(DATA, batch_size=8, sampler=sampler)))
    assert [len(batch) for batch in found] == [8] * 5


def test_a_dataloader_without_batches_is_refused(run: paceline.Run) -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        run.prepare(DataLoader(DATA, batch_size=None))


def test_a_second_one_is_refused(run: paceline.Run) -> None:
    with pytest.raises(UsageError, match="train=False"):
        run.prepare(DataLoader(DATA, batch_size=2), DataLoader(DATA, batch_size=2))
    run.loader(DATA, global_batch=2)
    with pytest.raises(UsageError, match="train=False"):
        run.prepare(DataLoader(DATA, batch_size=2))
