"""Data that is not the same on every rank is told."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset, TensorDataset

from paceline.errors import UsageError

X = torch.arange(40.0).reshape(40, 1)
Y = torch.arange(40) % 3


def train(dataset: Any, **options: Any) -> tuple[int, list[str]]:
    """One epoch. Returns the steps that were made, and what was warned of. Global batches of 8 where not said."""
    if "batch_sampler" not in options:
        options = {"global_batch": 8, **options}
    with started() as run, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.prepare(model, optimizer)
        for batch in run.loader(dataset, **options):
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            run.backward(model(x.float()).mean())
            run.step(optimizer)
        return run.steps, [str(w.message) for w in said if "not the same on all ranks" in str(w.message)]


def refused(dataset: Any, *words: str, **options: Any) -> None:
    try:
        train(dataset, **options)
    except UsageError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"not noticed: {words}")


@pytest.mark.ranks(2, full=3)
def test_lengths_that_differ_are_told() -> None:
    refused(
        TensorDataset(X[: 36 + 2 * dist.get_rank()], Y[: 36 + 2 * dist.get_rank()]),
        *("loader 'train'", "length=36 on rank 0", "length=38 on rank 1", "after paceline.start"),
        shuffle=True,
    )


@pytest.mark.ranks(2, full=3)
def test_settings_of_a_loader_that_differ_are_told() -> None:
    data = TensorDataset(X, Y)
    first = dist.get_rank() == 0
    refused(data, "global_batch=8 on rank 0", "global_batch=16 on rank 1", global_batch=8 if first else 16)
    refused(data, "shuffle=True on rank 0", "shuffle=False on rank 1", shuffle=first)
    refused(data, "sampler='list' on rank 0", "sampler=None on rank 1", sampler=list(range(40)) if first else None)


@pytest.mark.ranks(2, full=3)
def test_parts_of_a_data_set_drawn_before_start_are_told() -> None:
    """As torch's random_split gives them: equally long, of other examples."""
    indices = torch.randperm(40, generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    refused(Subset(TensorDataset(X, Y), indices[:24]), "subset=", "on rank 0", "on rank 1", "after paceline.start")
    same = torch.randperm(40, generator=torch.Generator().manual_seed(5)).tolist()
    assert train(Subset(TensorDataset(X, Y), same[:24])) == (3, [])


@pytest.mark.ranks(2, full=3)
def test_samplers_of_different_orders_are_told() -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(dist.get_rank())).tolist()
    refused(TensorDataset(X, Y), "order", "sampler", sampler=order)
    batches = [order[:8], order[8:16]]
    refused(TensorDataset(X, Y), "order", "sampler", batch_sampler=batches)
    assert train(TensorDataset(X, Y), sampler=sorted(order))[0] == 5


class Items(list[Any]):
    """A data set of items, which may be augmented as they are read."""

    augment: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return self.augment(x), y


@pytest.mark.ranks(2, full=3)
def test_other_examples_of_equal_number_are_told_and_augmented_ones_are_not() -> None:
    items = list(zip(X, Y.tolist(), strict=True))
    other = Items(random.Random(dist.get_rank()).sample(items, 24))
    for workers in (0, 1):
        steps, said = train(other, num_workers=workers)
        assert (steps, len(said)) == (3, int(dist.get_rank() == 0))
        assert all("loader 'train'" in text and "paceline.start" in text for text in said)
    assert train(Items(items), num_workers=1, shuffle=True) == (5, [])
    noisy = Items(items)
    generator = np.random.default_rng()  # of its own, as some augmentation libraries have it: the labels still agree
    noisy.augment = lambda x: x + float(generator.random())
    assert train(noisy) == (5, [])


class Stream(IterableDataset[Any]):
    """One that takes a part for each rank itself, as webdataset's and datasets' split_by_node do; or does not."""

    def __init__(self, by_rank: bool, labels: bool = True, noise: bool = False) -> None:
        self.by_rank, self.labels = by_rank, labels
        self.draw = np.random.default_rng().random if noise else lambda: 0.0

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.by_rank else (0, 1)
        for i in range(rank, 40, size):
            x = X[i] + float(self.draw())
            yield (x, int(Y[i]), "constant", {"id": f"{i}"}) if self.labels else x


@pytest.mark.ranks(2, full=3)
def test_streams_that_shard_themselves_are_told() -> None:
    for labels in (True, False):
        for options in ({}, {"shuffle": True}, {"micro_batch": 2}):
            refused(Stream(True, labels), "loader 'train'", "examples of an iterable data set", "every rank", **options)
            assert train(Stream(False, labels), **options) == (5, [])
    assert train(Stream(False, noise=True)) == (5, []), "noise of its own, but the ids agree"


@pytest.mark.ranks(2, full=3)
def test_data_is_compared_once_and_a_look_at_a_batch_on_one_rank_does_not_hang() -> None:
    with started(progress="off") as run:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        run.prepare(model, optimizer)
        loader = run.loader(TensorDataset(X, Y), global_batch=8)
        if run.main:
            next(iter(loader))
        for _ in range(2):
            for x, _ in loader:
                run.backward(model(x).mean())
                with torch.profiler.profile() as profile:
                    run.step(optimizer)
                gathers = [e.name for e in profile.events() if e.name.startswith("gloo:") and "gather" in e.name]
                assert bool(gathers) == (run.steps == 1), (run.steps, gathers)
