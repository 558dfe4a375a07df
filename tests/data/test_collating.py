"""Collate functions that draw: an example's draws are the same however a global batch is cut. Worlds of several
processes are played by giving a source the layout of each rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, RandomSampler, default_collate

from paceline.data.batch_plan import one_shard
from paceline.data.loader import Loader
from paceline.data.sources import LoaderArguments, make_source
from paceline.errors import SettingError, UsageError

LENGTH = 22
CUTS = [(1, None), (2, None), (1, 3), (2, 2), (5, None), (9, 1)]
"""(processes, micro_batch); with 9, some shards are empty."""


class Lengths(Dataset[dict[str, Any]]):
    """Sequences of different lengths, so that parts of a batch are padded to different ones."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"index": i, "tokens": torch.full((2 + 5 * i % 7,), i)}


class Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Any:
        return (Lengths()[i] for i in range(LENGTH))


def padded(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(
        [e.pop("tokens") for e in examples], True, -1
    )  # as some do: it changes them
    return {"index": torch.tensor([e["index"] for e in examples]), "tokens": tokens}


def masked(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = padded(examples)
    chances = torch.full(batch["tokens"].shape, 0.5)
    return batch | {"masked": torch.bernoulli(chances), "other": torch.randint(1000, batch["tokens"].shape)}


class WithGenerator:
    """Keeps a generator, as Hugging Face's collators with a seed do; in a worker with another seed."""

    generator: torch.Generator | None = None

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        if self.generator is None:
            worker = torch.utils.data.get_worker_info()
            self.generator = torch.Generator().manual_seed(0 if worker is None else 1 + worker.id)
        batch = padded(examples)
        return batch | {"masked": torch.rand(batch["tokens"].shape, generator=self.generator)}


def once(examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Choices for the whole batch: of NumPy, Python and torch, one of them as long as some parts are."""
    batch = padded(examples)
    choices = [float(np.random.rand()), random.random(), *torch.rand(4).tolist(), *torch.rand(1).tolist()]
    return batch | {"choice": str(choices), "masked": torch.rand(batch["tokens"].shape)}


def loaders(size: int, micro_batch: int | None = None, workers: int = 0, **changed: Any) -> list[Loader]:
    given: dict[str, Any] = {
        "seed": 3,
        "name": "train",
        "global_batch": 8,
        "shuffle": True,
        "sampler": None,
        "batch_sampler": None,
        "drop_last": False,
        "shuffle_buffer": None,
        "dataset": Lengths(),
        **changed,
    }
    options = {key: given.pop(key) for key in ("collate_fn",) if key in given} | {"num_workers": workers}
    made = []
    for rank in range(size):
        keys = {key: value for key, value in given.items() if key not in ("dataset", "seed")}
        arguments = LoaderArguments(micro_batch=micro_batch, options=dict(options), **keys)
        plan = partial(one_shard, size, rank)
        source = make_source(given["dataset"], arguments, seed=given["seed"], plan=plan)
        hooks: Any = {"device": torch.device("cpu"), "on_yield": lambda _: None}
        made.append(Loader(source, **hooks))
    return made


def batches(size: int, micro_batch: int | None = None, workers: int = 0, epochs: int = 1, **changed: Any) -> list[Any]:
    made = loaders(size, micro_batch, workers, **changed)
    return [(loader.epoch, loader.step, batch) for loader in made for _ in range(epochs) for batch in loader]


def rows(found: Sequence[tuple[int, int, dict[str, Any]]]) -> dict[tuple[int, int], dict[str, list[float]]]:
    """(epoch, index of the example) -> what it drew, without the padding."""
    drawn = {}
    for epoch, _, batch in found:
        for i, index in enumerate(batch["index"].tolist()):
            length = int((batch["tokens"][i] >= 0).sum())
            names = [name for name in ("masked", "other") if name in batch]
            drawn[epoch, index] = {name: batch[name][i][:length].tolist() for name in names}
    return drawn


@pytest.mark.parametrize("collate", [masked, WithGenerator(), once], ids=["masked", "generator", "once"])
@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_an_example_draws_the_same_however_the_batch_is_cut(collate: Any, cut: tuple[int, int | None]) -> None:
    alone = rows(batches(1, epochs=2, collate_fn=collate))
    assert rows(batches(*cut, epochs=2, collate_fn=collate)) == alone
    assert len({str(drawn) for drawn in alone.values()}) == len(alone) == 2 * LENGTH


def test_workers_draw_as_the_main_process_does() -> None:
    for collate in (masked, WithGenerator()):
        alone = rows(batches(1, collate_fn=collate))
        assert rows(batches(2, 2, workers=2, collate_fn=collate)) == alone


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
def test_an_example_of_a_stream_draws_the_same(cut: tuple[int, int | None]) -> None:
    alone = rows(batches(1, dataset=Stream(), collate_fn=masked))
    assert len(alone) == LENGTH
    assert rows(batches(*cut, dataset=Stream(), collate_fn=masked)) == alone


def test_an_example_draws_the_same_in_a_global_batch_of_another_size_and_order() -> None:
    alone = rows(batches(1, collate_fn=masked))
    assert rows(batches(2, collate_fn=masked, global_batch=5, shuffle=False)) == alone


def test_each_epoch_draws_anew_whatever_generator_is_kept() -> None:
    for collate in (masked, WithGenerator()):
        drawn = rows(batches(1, epochs=2, collate_fn=collate))
        assert sum(drawn[0, i] == drawn[1, i] for i in range(LENGTH)) < 3  # short sequences may be masked alike


def test_a_choice_for_the_whole_batch_is_the_same_for_all_its_parts() -> None:
    found: dict[tuple[int, int], set[Any]] = {}
    for cut in CUTS:
        for epoch, step, batch in batches(*cut, epochs=2, collate_fn=once):
            if len(batch["index"]):
                found.setdefault((epoch, step), set()).add(batch["choice"])
    assert all(len(choices) == 1 for choices in found.values())
    assert len(set().union(*found.values())) == len(found) == 6


def test_an_example_that_comes_twice_draws_twice() -> None:
    def drawn(size: int) -> list[Any]:
        sampler = RandomSampler(range(5), replacement=True, num_samples=40)
        made = loaders(
            size,
            collate_fn=lambda rows: default_collate(rows) | {"drawn": torch.rand(len(rows))},
            dataset=[{"index": i} for i in range(5)],
            sampler=sampler,
            shuffle=False,
        )
        return [
            list(zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True))
            for r in zip(*made, strict=True)
            for batch in r
        ]

    alone = [row for batch in drawn(1) for row in batch]
    assert len(set(alone)) == 40
    assert [row for batch in drawn(3) for row in batch] == alone


# --- what depends on the cut is refused


def by_example_with_numpy(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(examples) | {"drawn": torch.tensor([np.random.rand() for _ in examples])}


def by_example_with_python(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(examples) | {"drawn": torch.tensor([random.gauss(0, 1) for _ in examples])}


def by_example_with_torch(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(examples) | {"drawn": torch.stack([torch.rand(3) for _ in examples])}


def in_one_row(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    return padded(examples) | {"drawn": torch.rand(2 * len(examples))[::2]}


def mixup(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    batch = padded(examples)
    return batch | {"drawn": batch["index"][torch.randperm(len(examples))] + torch.rand(1)}


class OwnNumpy:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        return padded(examples) | {"drawn": torch.from_numpy(self.rng.random(len(examples)))}


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "numpy": (by_example_with_numpy, "numpy draws from NumPy's or Python's generators once per example"),
    "python": (by_example_with_python, "draws from NumPy's or Python's generators once per example"),
    "torch": (by_example_with_torch, "draws from torch's generators once per example"),
    "one row": (in_one_row, "draws from torch's generators once per example"),
    "mixup": (mixup, "draws a permutation of the examples, as mixup does"),
    "a generator of its own": (OwnNumpy(), "OwnNumpy draws from NumPy's or Python's generators once per example"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("cut", [(2, None), (1, 3)], ids=str)
def test_draws_that_depend_on_the_cut_are_refused_by_name(name: str, cut: tuple[int, int | None]) -> None:
    collate, message = REFUSED[name]
    with pytest.raises(UsageError, match=message) as told:
        batches(*cut, collate_fn=collate)
    assert 'collate="global"' in str(told.value)
    assert "'train'" in str(told.value)


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_taken_where_nothing_is_cut_and_with_the_whole_batch(name: str) -> None:
    collate, _ = REFUSED[name]
    alone = batches(1, epochs=2, collate_fn=collate)
    assert len(alone) == 6
    expected = {(e, i): x for e, _, b in alone for i, x in zip(b["index"].tolist(), b["drawn"].tolist(), strict=True)}
    assert len({str(x) for x in expected.values()}) == 2 * LENGTH
    for cut in CUTS:
        drawn = {}
        for epoch, _, batch in batches(*cut, epochs=2, collate_fn=collate, collate="global"):
            drawn.update({(epoch, i): x for i, x in zip(batch["index"].tolist(), batch["drawn"].tolist(), strict=True)})
        if name in ("numpy", "python", "mixup", "a generator of its own"):  # drawn in the same order from the same keys
            assert drawn == expected, cut
        else:
            expected = drawn if cut == CUTS[0] else expected
            assert drawn == expected, cut


def test_each_part_draws_for_itself_with_collate_shard() -> None:
    drawn = [
        x
        for _, _, batch in batches(2, 2, collate_fn=by_example_with_numpy, collate="shard")
        for x in batch["drawn"].tolist()
    ]
    assert len(set(drawn)) == LENGTH


class Counting:
    """Has a state of its own: how much it draws changes from call to call."""

    calls = 0

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Tensor]:
        self.calls += 1
        return padded(examples) | {"drawn": torch.tensor(np.random.rand(self.calls).sum())}


def in_fours(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    assert len(examples) == 4
    return padded(examples) | {"drawn": torch.tensor([np.random.rand() for _ in examples])}


@pytest.mark.parametrize("collate", [Counting(), in_fours], ids=["a state of its own", "only four"])
def test_what_cannot_be_asked_is_believed(collate: Any) -> None:
    assert len(batches(2, collate_fn=collate, drop_last=True)) == 4


def test_a_collate_function_that_does_not_draw_is_called_once_for_each_batch() -> None:
    calls = []
    batches(1, collate_fn=lambda rows: calls.append(len(rows)) or padded(rows))
    assert calls == [8, 8, 6]


def test_a_draw_that_begins_later_is_looked_at_with_the_next_batch() -> None:
    calls: list[int] = []

    def collate(examples: list[dict[str, Any]]) -> Any:
        calls.append(len(examples))
        return by_example_with_numpy(examples) if len(calls) > 2 else padded(examples)

    made = iter(loaders(1, 4, collate_fn=collate)[0])
    next(made), next(made), next(made)
    with pytest.raises(UsageError, match='collate="global"'):
        next(made)


# --- collate="global"


def test_rows_of_the_whole_batch_are_those_that_one_process_has() -> None:
    (alone,) = loaders(1, collate_fn=lambda rows: nested(rows), collate="global")
    whole = list(alone)
    for size, micro in CUTS:
        parts = [list(made) for made in loaders(size, micro, collate_fn=nested, collate="global")]
        assert sorted(n for p in parts for b in p for n in b["pair"][1]) == sorted(
            n for b in whole for n in b["pair"][1]
        )
        if micro is None:
            for k, batch in enumerate(whole):
                assert torch.equal(torch.cat([p[k]["time first"] for p in parts], 1), batch["time first"])
                assert sum(p[k]["count"] for p in parts) == batch["count"]
                assert all(p[k]["fixed"] == batch["fixed"] for p in parts)


def nested(examples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = padded(examples)
    names = [f"{i}" for i in batch["index"].tolist()]
    return {
        "time first": batch["tokens"].T,
        "pair": (batch["index"].numpy(), names),
        "count": len(examples),
        "fixed": "text",
        "table": torch.eye(3),
        "none": None,
    }


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda rows: {"x": torch.cat([torch.zeros(3) for _ in rows])}, r"batch\['x'\] has 3 rows for one example"),
        (lambda rows: torch.zeros(max(1, len(rows) // 2 * 2)), r"batch has 6 rows|batch has"),
        (lambda rows: {"pairs": torch.zeros(len(rows), len(rows))}, "only the dimension of the examples may differ"),
        (lambda rows: {"tokens": 7 * len(rows), "x": torch.zeros(len(rows))}, "a number that grows with the examples"),
        (lambda rows: [torch.zeros(2)] * (len(rows) + 1), "batch has 2 rows for one example"),
    ],
)
def test_a_batch_that_cannot_be_cut_by_examples_is_named(collate: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        batches(2, collate_fn=collate, collate="global", global_batch=7)


@pytest.mark.parametrize(("value", "message"), [("gobal", "Did you mean 'global'"), (padded, "collate_fn=")])
def test_another_word_for_collate_is_told(value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        loaders(1, collate=value)
