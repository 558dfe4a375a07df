"""Loaders in one process: order, randomness, odd batches, samplers, streams, evaluation. Worlds of several processes
are played by giving a source the layout of each rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.data.batch_plan import one_shard
from paceline.data.loader import Loader
from paceline.data.sources import LoaderArguments, make_source
from paceline.errors import EmptyShardError, SettingError, UsageError

SETTINGS: dict[str, Any] = {
    "seed": 3,
    "name": "train",
    "micro_batch": None,
    "shuffle": False,
    "sampler": None,
    "batch_sampler": None,
    "drop_last": False,
    "shuffle_buffer": None,
    "collate": "example",
}


def loader(dataset: Any, rank: int = 0, size: int = 1, train: bool = True, **changed: Any) -> Loader:
    keys = {key: changed.pop(key, value) for key, value in {**SETTINGS, "global_batch": None}.items()}
    seed = keys.pop("seed")
    given = LoaderArguments(train=train, options=changed, **keys)
    source = make_source(dataset, given, seed=seed, plan=partial(one_shard, size, rank))
    return Loader(source, device=torch.device("cpu"), on_yield=lambda _: None)


class Noisy(Dataset[dict[str, Any]]):
    """Each example draws from all three generators."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"index": i, "torch": torch.rand(2), "numpy": np.random.rand(), "python": random.random()}


def draw_in_collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
    batch = torch.utils.data.default_collate(examples)
    return batch | {"collated": torch.rand(len(examples)), "python_collated": random.random()}


def everything(made: Loader, epochs: int = 1) -> list[dict[str, Any]]:
    return [batch for _ in range(epochs) for batch in made]


def by_example(batches: list[dict[str, Any]]) -> dict[int, tuple[float, ...]]:
    found = {}
    for batch in batches:
        for row, index in enumerate(batch["index"].tolist()):
            found[index] = (*batch["torch"][row].tolist(), float(batch["numpy"][row]), float(batch["python"][row]))
    return found


# --- randomness


@pytest.mark.parametrize("size", [2, 3, 5])
def test_an_example_draws_the_same_on_any_number_of_processes(size: int) -> None:
    alone = by_example(everything(loader(Noisy(), global_batch=8, shuffle=True)))
    over = {}
    for rank in range(size):
        over |= by_example(everything(loader(Noisy(), rank, size, global_batch=8, shuffle=True)))
    assert over == alone
    assert len(set(alone.values())) == 21


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    def run(**options: Any) -> list[dict[str, Any]]:
        made = loader(Noisy(), 1, 2, global_batch=8, shuffle=True, collate_fn=draw_in_collate, **options)
        return everything(made, epochs=2)

    plain, worked = run(), run(num_workers=workers, prefetch_factor=3)
    assert len(plain) == len(worked) == 6
    for a, b in zip(plain, worked, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key


def test_persistent_workers_follow_the_epoch() -> None:
    made = loader(Noisy(), global_batch=8, num_workers=1, persistent_workers=True)
    first, second = by_example(everything(made)), by_example(everything(made))
    assert all(first[i] != second[i] for i in range(21))
    assert second == by_example(everything(loader(Noisy(), global_batch=8), epochs=2)[3:])
    made._source._loader._iterator._shutdown_workers()  # type: ignore[attr-defined]


def test_at_a_yield_noise_differs_over_shards_and_choices_agree() -> None:
    def drawn(rank: int) -> list[tuple[float, float, float]]:
        made = loader(TensorDataset(torch.zeros(12, 1)), rank, 2, global_batch=4, micro_batch=1)
        return [(torch.rand(()).item(), random.random(), np.random.rand()) for _ in made]

    zero, one = drawn(0), drawn(1)
    noise = [x[0] for x in zero + one]
    assert len(set(noise)) == len(noise) == 12  # another on each shard, micro-batch and step
    assert [x[1:] for x in zero] == [x[1:] for x in one]  # the choices of a step agree over shards
    assert len({x[1:] for x in zero}) == 3  # and over its micro-batches
    assert drawn(1) == one


def test_noise_is_the_same_after_a_restart_in_mid_epoch() -> None:
    def drawn(made: Loader, skip: int = 0) -> list[tuple[list[int], float]]:
        return [(list(made.indices), torch.rand(()).item()) for _ in made]

    whole = loader(Noisy(), global_batch=4, shuffle=True)
    expected = drawn(whole) + drawn(whole)
    resumed = loader(Noisy(), global_batch=4, shuffle=True)
    resumed.load_state_dict({"epoch": 0, "step": 4, **resumed._source.identity()})
    assert drawn(resumed) + drawn(resumed) == expected[4:]


# --- evaluation


def test_evaluation_counts_once_and_leaves_training_alone() -> None:
    def training(evaluate: bool) -> list[float]:
        made, drawn = loader(Noisy(), global_batch=8), []
        for step, _ in enumerate(made):
            drawn.append(torch.rand(()).item())
            if evaluate and step % 2 == 0:
                seen = [i for batch in loader(Noisy(), train=False, global_batch=5) for i in batch["index"].tolist()]
                assert seen == list(range(21))
                for _ in loader(Noisy(), train=False, global_batch=5):
                    break  # left early: put back too
            drawn += [torch.rand(()).item(), np.random.rand(), random.random()]
        return drawn

    assert training(True) == training(False)


def test_every_evaluation_is_alike() -> None:
    made = loader(Noisy(), train=False, global_batch=5, shuffle=True)
    assert [b["torch"].tolist() for b in made] == [b["torch"].tolist() for b in made]


# --- zero-length batches


class Pair(NamedTuple):
    image: Tensor
    name: str


@dataclass
class Boxes:
    flat: Tensor
    sizes: list[int]


def in_boxes(examples: list[Any]) -> Boxes:
    return Boxes(torch.cat([e["boxes"] for e in examples]), [len(e["boxes"]) for e in examples])


def time_major(examples: list[Any]) -> Tensor:
    return torch.stack([e["image"].flatten() for e in examples], dim=1)


class Images(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": torch.ones(3, 4), "label": i, "name": f"n{i}", "boxes": torch.ones(3, 4)}


def empty_of(collate: Callable[[list[Any]], Any] | None) -> Any:
    """The batch of the third of three ranks, which shares two examples with the others."""
    batches = [everything(loader(Images(), rank, 3, global_batch=2, collate_fn=collate)) for rank in range(3)]
    assert all(len(own) == 1 for own in batches)
    return batches[2][0]


def test_zero_length_batches_of_many_kinds() -> None:
    batch = empty_of(None)
    assert batch["image"].shape == (0, 3, 4)
    assert batch["label"].shape == (0,)
    assert batch["label"].dtype == torch.int64
    assert batch["name"] == []
    assert empty_of(time_major).shape == (12, 0)
    boxes = empty_of(in_boxes)
    assert (boxes.flat.shape, boxes.sizes) == ((0, 4), [])
    pair = empty_of(lambda examples: Pair(torch.stack([e["image"] for e in examples]), "constant"))
    assert (pair.image.shape, pair.name) == ((0, 3, 4), "constant")
    counts = empty_of(
        lambda examples: (
            len(examples),
            torch.tensor(3 * len(examples)),
            torch.tensor(0.5),
            np.ones((len(examples), 2)),
        )
    )
    assert (counts[0], int(counts[1]), float(counts[2]), counts[3].shape) == (0, 0, 0.5, (0, 2))


def test_a_batch_that_cannot_be_emptied_is_named() -> None:
    class Odd:
        def __init__(self, examples: list[Any]) -> None:
            self.examples = examples

    with pytest.raises(EmptyShardError, match="a zero-length Odd, the type that collate_fn returns, cannot be made"):
        empty_of(Odd)


# --- samplers


def test_the_users_sampler_is_followed_alike_on_every_rank() -> None:
    def seen(rank: int, size: int) -> list[int]:
        sampler = WeightedRandomSampler([1.0] * 10 + [5.0] * 11, 30)
        torch.manual_seed(rank)  # what the ranks have drawn before must not matter
        made = loader(Noisy(), rank, size, global_batch=8, sampler=sampler)
        assert made.steps == 4
        return [i for _ in range(2) for _ in made for i in made.indices]

    alone = seen(0, 1)
    assert len(alone) == 60
    assert alone[:30] != alone[30:]
    assert sorted(seen(0, 2) + seen(1, 2)) == sorted(alone)


def test_a_sampler_that_draws_while_it_is_iterated() -> None:
    """It finds its own generators, and the loop finds its own."""

    class Lazy:
        def __iter__(self) -> Iterator[int]:
            for _ in range(9):
                yield random.randrange(21)

    def run(disturb: bool) -> tuple[list[int], list[float]]:
        indices, drawn = [], []
        made = loader(Noisy(), global_batch=3, sampler=Lazy())
        for _ in made:
            indices += made.indices
            drawn.append(random.random())
            if disturb:
                random.seed(99)
        return indices, drawn

    assert run(False) == run(True)


def test_a_batch_sampler_makes_the_global_batches() -> None:
    batches = [[0, 5, 7], [1], [20, 3]]
    seen = [list(requested.indices) for requested in iterate(loader(Noisy(), batch_sampler=batches))]
    assert seen == batches
    parts = [[list(r.indices) for r in iterate(loader(Noisy(), rank, 2, batch_sampler=batches))] for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == batches


def test_the_length_counts_the_micro_batches_of_a_samplers_short_last_batch() -> None:
    """21 examples in batches of 8 are 8, 8 and 5: in micro-batches of 2, 4 + 4 + 3."""
    made = loader(Noisy(), batch_sampler=BatchSampler(range(21), 8, drop_last=False), micro_batch=2)
    assert len(made) == len(list(iterate(made))) == 11


def iterate(made: Loader) -> Iterator[Loader]:
    for _ in made:
        yield made


def test_set_epoch_of_a_sampler_is_called() -> None:
    class Sampler(list[int]):
        def set_epoch(self, epoch: int) -> None:
            self[:] = [epoch, epoch + 1]

    made = loader(Noisy(), global_batch=2, sampler=Sampler([0, 0]))
    assert [list(m.indices) for _ in range(3) for m in iterate(made)] == [[0, 1], [1, 2], [2, 3]]


# --- iterable data sets


class Stream(IterableDataset[Tensor]):
    """Splits itself over workers, as torch's documentation has it, and augments."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, float]]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, self.length, stride):
            yield i, random.random()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "size"), [(23, 1), (23, 3), (2, 4)])
def test_each_example_of_a_stream_is_seen_once(length: int, size: int, workers: int) -> None:
    seen, steps = [], set()
    for rank in range(size):
        made = loader(Stream(length), rank, size, global_batch=5, shuffle=True, shuffle_buffer=7, num_workers=workers)
        epoch = [(i, r) for numbers, noise in made for i, r in zip(numbers.tolist(), noise.tolist(), strict=True)]
        steps.add(sum(1 for _ in made))
        seen += epoch
    alone = [
        (i, r)
        for numbers, noise in loader(Stream(length), global_batch=5)
        for i, r in zip(numbers.tolist(), noise.tolist(), strict=True)
    ]
    assert sorted(seen) == sorted(alone)
    assert sorted(i for i, _ in seen) == list(range(length))
    assert steps == {-(-length // 5)}


def test_the_buffered_shuffle_shuffles_and_follows_the_epoch() -> None:
    made = loader(Stream(40), global_batch=40, shuffle=True, shuffle_buffer=10)
    epochs = [batch[0].tolist() for _ in range(2) for batch in made]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(40))
    assert epochs[0] != epochs[1]
    assert epochs[0] != list(range(40))
    # A buffer of 10 lets nothing come out before place i - 9: only what has been read can be drawn.
    assert all(example <= place + 10 for place, example in enumerate(epochs[0]))


def test_a_stream_is_resumed_where_it_stopped() -> None:
    whole = [list(m.indices) for m in iterate(loader(Stream(23), global_batch=5, shuffle=True, shuffle_buffer=4))]
    made = loader(Stream(23), global_batch=5, shuffle=True, shuffle_buffer=4)
    made.load_state_dict({"epoch": 0, "step": 3, **made._source.identity()})
    assert [list(m.indices) for m in iterate(made)] == whole[3:]


def test_the_length_of_a_stream_is_not_made_up() -> None:
    with pytest.raises(TypeError):
        len(loader(Stream(23), global_batch=5))


# --- lengths, positions


@pytest.mark.parametrize(
    ("micro", "size", "yields"), [(None, 1, 3), (3, 1, 3 + 3 + 2), (3, 2, 2 + 2 + 1), (1, 3, 3 + 3 + 2)]
)
def test_len_is_the_number_of_yields(micro: int | None, size: int, yields: int) -> None:
    made = loader(Noisy(), 0, size, global_batch=8, micro_batch=micro)  # 8 + 8 + 5 examples
    assert len(made) == sum(1 for _ in made) == yields
    assert made.steps == 3


def test_drop_last() -> None:
    made = loader(Noisy(), global_batch=8, drop_last=True)
    assert len(made) == made.steps == sum(1 for _ in made) == 2


def test_break_ends_the_epoch() -> None:
    made = loader(Noisy(), global_batch=8)
    for _ in made:
        made.mark_stepped(made.current)
        break
    assert (made.epoch, made.step) == (1, 0)
    assert made.state_dict()["epoch"] == 1
    assert sum(1 for _ in made) == 3
    assert made.epoch == 2


def test_a_look_at_the_first_batch_costs_no_epoch() -> None:
    made, other = loader(Noisy(), global_batch=8, shuffle=True), loader(Noisy(), global_batch=8, shuffle=True)
    peeked = iter(made)
    next(peeked)
    expected = [list(m.indices) for m in iterate(other)]
    seen = []
    for number, now in enumerate(iterate(made)):
        if number == 1:
            peeked.close()  # type: ignore[attr-defined]  # an abandoned iterator that is collected late
        seen.append(list(now.indices))
    assert seen == expected
    assert made.epoch == 1


def test_a_position_of_other_data_is_refused() -> None:
    made = loader(Noisy(), global_batch=8)
    state = {"epoch": 2, "step": 1, "length": 50, "global_batch": 8, "drop_last": False}
    with pytest.raises(UsageError, match=r"written in mid-epoch with length=50, but this script has length=21"):
        made.load_state_dict(state)
    made.load_state_dict(state | {"step": 0})  # between epochs a grown data set is no contradiction
    assert made.epoch == 2


# --- what cannot be


BAD = [
    ({"global_batch": 0}, r"global_batch=0.*at least 1"),
    ({"global_batch": 2.5}, r"global_batch=2\.5"),
    ({"global_batch": 4, "micro_batch": -1}, "micro_batch=-1"),
    ({}, "pass global_batch"),
    ({"batch_size": 4}, r"batch_size=4.*use global_batch"),
    ({"global_batch": 4, "num_worker": 2}, "'num_worker'. Did you mean 'num_workers'"),
    ({"global_batch": 4, "batch_sampler": [[0]]}, "remove global_batch"),
    ({"global_batch": 4, "sampler": [0], "shuffle": True}, "remove shuffle"),
    ({"global_batch": 4, "shuffle_buffer": 4}, "for iterable data sets"),
    (
        {"global_batch": 4, "sampler": DistributedSampler(Noisy(), 2, 0)},
        "DistributedSampler.*picks a part for each rank",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    run = paceline.start(device="cpu")
    try:
        with pytest.raises(SettingError, match=message):
            run.loader(Noisy(), **arguments)
    finally:
        run.close()


def test_what_is_no_data_set_is_named() -> None:
    with pytest.raises(SettingError, match="an iterator or generator can be read only once"):
        loader(iter([1, 2]), global_batch=2)
    with pytest.raises(SettingError, match="an iterable data set has no indices"):
        loader(Stream(3), global_batch=2, sampler=[0])


def test_a_loader_without_a_batch_says_so() -> None:
    run = paceline.start(progress="off", device="cpu")
    short = run.loader(TensorDataset(torch.ones(3, 1)), global_batch=4, drop_last=True)
    with pytest.raises(SettingError, match=r"'train' has no batch.*has 3 examples, but its global batch needs 4"):
        next(iter(short))
    empty = run.loader(TensorDataset(torch.ones(0, 1)), global_batch=4, name="empty")
    with pytest.raises(SettingError, match=r"'empty' has no batch: its data set is empty"):
        next(iter(empty))
    stream = run.loader(Stream(0), global_batch=4, name="stream")
    with pytest.raises(SettingError, match=r"'stream' has no batch: its data set, or its sampler, gives no example"):
        next(iter(stream))
    assert list(run.loader(TensorDataset(torch.ones(0, 1)), global_batch=4, train=False)) == []
    run.close()
