"""Examples that draw get the numbers of their own streams, whether or not generators were seeded for those before."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from paceline.data import randomness
from paceline.data.batch_plan import one_shard
from paceline.data.fetch import _LOOKED_AT, ExampleReader, _reads_at_once
from paceline.data.sources import LoaderArguments, make_source

N = 3 * _LOOKED_AT
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": lambda: float(np.random.rand()),
    "a gauss of numpy": lambda: float(np.random.randn()),
    "python": random.random,
    "all the words of python's generator": lambda: [random.random() for _ in range(312)][-1],
    "all the words of numpy's generator": lambda: float(np.random.rand(312)[-1]),
}


class Drawing(Dataset[tuple[int, float]]):
    """Draws for the examples of `which`."""

    def __init__(self, which: range, draw: Callable[[], float]) -> None:
        self.which, self.draw, self.reads = which, draw, 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float]:
        self.reads += 1
        return index, self.draw() if index in self.which else -1.0


def keys(epoch: int, indices: Sequence[int]) -> list[int]:
    return [randomness.mix(epoch, index) for index in indices]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize(
    ("which", "again"), [(range(N), 0), (range(N - 5, N), 32), (range(_LOOKED_AT, N, 7), 32), (range(0), 0)]
)
def test_what_an_example_draws_is_its_own(draw: Callable[[], float], which: range, again: int) -> None:
    """again: how many examples of the first part in which something is drawn unseeded are read twice."""
    expected = {}
    for index in range(N):
        randomness.seed_all(*keys(1, [index]))
        expected[index] = draw() if index in which else -1.0
    dataset = Drawing(which, draw)
    reader = ExampleReader(dataset, keys)
    order = randomness.permutation(N, 0, "train", 0).tolist() if len(which) == N else list(range(N))
    found: list[tuple[int, float]] = []
    for first in range(0, N, 32):
        found += reader.read(1, order[first : first + 32])
        np.random.randn()  # the script draws too, and leaves a second gauss in store
    assert [index for index, _ in found] == order
    assert dict(found) == expected
    assert dataset.reads == N + again


def test_an_example_may_draw_from_a_further_generator_later() -> None:
    def draw() -> float:
        return torch.rand(()).item() + (random.random() if later else 0.0) + (np.random.rand() if latest else 0.0)

    later = latest = False
    reader = ExampleReader(Drawing(range(N), draw), keys)
    for first in range(0, N, 32):
        later, latest = first >= 96, first >= 128
        expected = []
        for index in range(first, first + 32):
            randomness.seed_all(*keys(0, [index]))
            expected.append((index, draw()))
        assert reader.read(0, range(first, first + 32)) == expected


class Batched(Drawing):
    batches = 0

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.batches += 1
        return [self[index] for index in indices]


def test_a_data_set_is_asked_for_several_examples_at_once() -> None:
    for which, batches in ((range(0), 4), (range(N), 0), (range(2 * _LOOKED_AT, N), 3)):
        dataset = Batched(which, random.random)
        reader = ExampleReader(dataset, keys)
        for first in range(0, N, 32):
            reader.read(0, range(first, first + 32))
        assert dataset.batches == batches


def test_a_batched_read_that_does_not_know_how_examples_are_made_is_not_used() -> None:
    class Numbers(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices

    class Own(Numbers):
        def __getitem__(self, index: int) -> int:
            return 100 + index

    class Delegating:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def __getitem__(self, index: int) -> Any:
            return 100 + self.inner[index]

    assert _reads_at_once(Batched)
    assert _reads_at_once(Subset)
    assert not _reads_at_once(Drawing)
    assert not _reads_at_once(TensorDataset)
    inner = Subset(list(range(N)), range(N))  # type: ignore[arg-type]
    assert hasattr(Delegating(inner), "__getitems__")
    for dataset in (Own(), Delegating(inner)):
        reader = ExampleReader(dataset, keys)
        for first in range(0, N, 32):
            assert reader.read(0, range(first, first + 32)) == list(range(100 + first, 132 + first))


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_tensors_are_what_torchs_loader_makes(workers: int) -> None:
    data = TensorDataset(torch.randn(70, 3), torch.arange(70), torch.rand(70) < 0.5, torch.randn(70, 2, 2).half())
    given = LoaderArguments(global_batch=32, shuffle=True, options={"num_workers": workers})
    source = make_source(data, given, seed=0, plan=lambda: one_shard(1, 0))
    order = randomness.permutation(70, 0, "train", 0)
    for step, (_, (batch,)) in enumerate(source.fetch(0, 0)):
        expected = default_collate([data[index] for index in order[32 * step : 32 * step + 32]])
        assert type(batch) is type(expected)
        for one, other in zip(batch, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_rows_by_numbers_that_count_from_the_end() -> None:
    rows = torch.randn(3, 5).t().requires_grad_()
    reader = ExampleReader(TensorDataset(rows), lambda *_: [])
    for numbers in ([4, -1, 0], [4, 4, 0]):
        (found,) = reader.collated(numbers)
        assert torch.equal(found, rows[[4, 4, 0]])
        assert found.requires_grad
    with pytest.raises(IndexError, match="5"):
        reader.collated([5])


def test_a_subclass_of_tensor_data_sets_makes_its_own_examples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * row for row in super().__getitem__(index))

    source = make_source(
        Doubled(torch.ones(100)), LoaderArguments(global_batch=50), seed=0, plan=lambda: one_shard(1, 0)
    )
    assert [batch[0].sum().item() for _, (batch,) in source.fetch(0, 0)] == [100.0, 100.0]


@pytest.mark.parametrize("peeks", [True, False])
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (random.random, "python"),
        (lambda: random.gauss(0, 1), "python"),
        (lambda: [random.getrandbits(32) for _ in range(624)], "python"),  # its position is the same again
        (lambda: np.random.rand(), "numpy"),
        (lambda: torch.rand(1), "torch"),
        (lambda: torch.randn(1), "torch"),
    ],
)
def test_every_draw_is_seen_since_the_seeding(
    monkeypatch: pytest.MonkeyPatch, peeks: bool, draw: Callable[[], object], name: str
) -> None:
    """Also where Python's generator cannot be looked at where it lies."""
    assert randomness._python is not None
    if not peeks:
        monkeypatch.setattr(randomness, "_python", None)
    for key in (0, 7, 2**63 + 5):
        randomness.seed_all(key)
        seeded = randomness.just_seeded()
        assert randomness.drawn_from(seeded) == frozenset()
        draw()
        assert randomness.drawn_from(seeded) == {name}
