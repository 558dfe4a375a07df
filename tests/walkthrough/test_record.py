"""The arithmetic of the record can fail: each unlawful record is refused, in words that say what is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from .common import Case, Result
from .harness import difference, problems
from .record import Record, Step, Yield, cut, legal_epochs, merge, together

N, BATCH, EPOCHS, WORLD, MICRO = 11, 4, 2, 3, 1


def lawful() -> list[Record]:
    """Two epochs of 11 examples in batches of 4, 4 and 3 on three processes, one example at a time."""
    records = [Record() for _ in range(WORLD)]
    for epoch in range(EPOCHS):
        order = random.Random(epoch).sample(range(N), N)
        for start in range(0, N, BATCH):
            ids = order[start : start + BATCH]
            for shard, (record, parts) in enumerate(zip(records, cut(len(ids), WORLD, MICRO), strict=True)):
                yields = [
                    Yield("train", shard, [ids[i] for i in part], {}, {}, {"loss": (1.0, len(part))}) for part in parts
                ]
                record.steps.append((epoch, yields))
    return records


def check(steps: list[Step]) -> list[list[Step]]:
    return legal_epochs(steps, n=N, global_batch=BATCH, epochs=EPOCHS, micro_batch=MICRO)


def test_lawful_record_passes() -> None:
    epochs = check(merge(lawful()))
    assert [[len(step.batch) for step in epoch] for epoch in epochs] == [[4, 4, 3], [4, 4, 3]]
    assert epochs[0][0].losses == {"loss": 1.0}


def a_repeated_example(records: list[Record]) -> None:
    records[2].steps[1][1][0].ids[:] = records[2].steps[0][1][0].ids


def a_repeated_epoch(records: list[Record]) -> None:
    for record in records:
        record.steps[3:] = [(1, yields) for _, yields in record.steps[:3]]


def a_lost_step(records: list[Record]) -> None:
    for record in records:
        del record.steps[4]


def a_lost_example(records: list[Record]) -> None:
    records[2].steps[5][1][-1].ids.clear()


def a_foreign_example(records: list[Record]) -> None:
    records[2].steps[0][1][0].ids[0] = N


def ranks_out_of_step(records: list[Record]) -> None:
    records[1].steps[2] = (1, records[1].steps[2][1])


def a_padded_shard(records: list[Record]) -> None:
    """The stand-in that a distributed sampler would put where a shard has one example less."""
    records[1].steps[0][1][1].ids.append(records[0].steps[0][1][1].ids[0])


def no_shuffling(records: list[Record]) -> None:
    for record in records:
        for k, (_, yields) in enumerate(record.steps):
            sizes = cut(min(BATCH, N - k % 3 * BATCH), WORLD, MICRO)[records.index(record)]
            for y, part in zip(yields, sizes, strict=True):
                y.ids[:] = [k % 3 * BATCH + i for i in part]


@pytest.mark.parametrize(
    ("breakage", "words"),
    [
        (a_repeated_example, "came twice"),
        (a_repeated_epoch, "two epochs have one order"),
        (a_lost_step, "5 steps, expected 6"),
        (a_lost_example, "not"),
        (a_foreign_example, "outside"),
        (ranks_out_of_step, "different epochs"),
        (a_padded_shard, "came twice"),
        (no_shuffling, "not shuffled"),
    ],
)
def test_unlawful_records_are_refused(breakage: Callable[[list[Record]], None], words: str) -> None:
    records = lawful()
    breakage(records)
    with pytest.raises(AssertionError, match=words):
        check(merge(records))


def test_cut_is_contiguous_and_even() -> None:
    for n in range(12):
        for world in range(1, 6):
            shards = cut(n, world, None)
            assert [i for parts in shards for part in parts for i in part] == list(range(n))
            sizes = [len(parts[0]) for parts in shards]
            assert max(sizes) - min(sizes) <= 1
            for micro in (1, 2, 3) if n else ():
                parts = cut(n, world, micro)
                assert all(len(part) <= micro for shard in parts for part in shard)
                assert len({len(shard) for shard in parts}) == 1
                assert sorted(i for at_once in together(n, world, micro) for i in at_once) == list(range(n))


def result(**changes: Any) -> Result:
    weights = {"w": torch.ones(3, dtype=torch.float64)}
    parts: dict[str, Any] = {
        "parameters": weights,
        "buffers": {"n": torch.tensor(4)},
        "metrics": {"right": 3},
        "values": {"m": 0.5},
    }
    return Result(**(parts | {"losses": [{"loss": 2.0}]} | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parameters": {"w": torch.tensor([1, 1, 1 + 1e-9], dtype=torch.float64)}}, "parameters differ"),
        ({"parameters": {"w": torch.tensor([1, 1, torch.nan], dtype=torch.float64)}}, "parameters differ"),
        ({"buffers": {"n": torch.tensor(5)}}, "n is"),
        ({"metrics": {"right": 4}}, "counts are"),
        ({"values": {"m": 0.5 + 1e-8}}, "means differ"),
        ({"losses": [{"loss": float("nan")}]}, "losses"),
    ],
)
def test_the_comparison_sees(changes: dict[str, Any], words: str) -> None:
    case = Case("a")
    assert not problems(case, result(), [{"loss": 2.0}], result())
    ours = result(**changes)
    found = problems(case, ours, ours.losses, result())
    assert len(found) == 1
    assert words in found[0]


def test_difference_needs_the_same_names() -> None:
    with pytest.raises(AssertionError, match="names differ"):
        difference({"module.w": torch.ones(1)}, {"w": torch.ones(1)})
