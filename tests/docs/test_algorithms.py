"""The figures of docs/figures.md follow the formulas that are written there; what is cheap is measured here again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import algorithms

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "benchmarks" / "results" / "algorithms.json").read_text(encoding="utf-8"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads for such small tensors would wait for a core on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


G = 4e6  # bytes of the gradients, and of the weights


def expected(way: str, n: int, number: int) -> float:
    """Bytes that process `number` sends in a step of n replicas; of "server" 0 is the server."""
    if way == "ring":
        return 2 * (n - 1) / n * G
    if way == "reduce_to_one":  # once up the tree, but for the root; once down to each child
        lowest = number & -number if number else 2 ** math.ceil(math.log2(n))
        children = [number + 2**k for k in range(8) if 2**k < lowest and number + 2**k < n]
        return ((number > 0) + len(children)) * G
    if number == 0:
        return n * 2 * G
    return (2 if number == 1 else 1) * G  # the one matrix cannot be cut: the first worker's share is all of it


@pytest.mark.parametrize("row", FOUND["bytes"], ids=lambda row: f"{row['way']}-{row['replicas']}")
def test_each_process_sent_what_the_formula_says(row: dict[str, Any]) -> None:
    n = row["replicas"]
    assert len(row["sent"]) == n + (row["way"] == "server")
    for number, sent in enumerate(row["sent"]):
        # Beside the tensors: counts, and in a parameter server's run headers and heartbeats.
        assert 0 <= sent - expected(row["way"], n, number) < 0.02 * G, (number, sent)
    first, *others = (expected(row["way"], n, number) for number in range(len(row["sent"])))
    assert math.isclose(row["formula"]["first"], first)
    assert math.isclose(row["formula"]["others"], sum(others) / len(others))


def test_all_sizes_and_ways_were_measured() -> None:
    assert {(row["way"], row["replicas"]) for row in FOUND["bytes"]} == {
        (way, n) for way in algorithms.WAYS for n in range(2, 9)
    }
    assert [row["mode"] for row in FOUND["staleness"]] == list(algorithms.MODES)
    assert all(len(row["losses"]) == algorithms.SEEDS for row in FOUND["staleness"])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_bytes_are_those_of_the_formula_on_two_replicas() -> None:
    for row in algorithms.measure_bytes(range(2, 3)):
        test_each_process_sent_what_the_formula_says(row)


def test_of_updates_in_step_none_is_dropped_and_without_staleness_many() -> None:
    dropped = {row["mode"]: row["dropped"] for row in FOUND["staleness"]}
    assert dropped["sync"] == dropped["async"] == 0
    assert dropped["staleness 0"] > dropped["staleness 2"] >= dropped["staleness 8"] >= 0


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.usefixtures("one_thread")
def test_the_first_device_is_fuller_only_with_the_loss_on_it(devices: int) -> None:
    hidden = algorithms.EXAMPLES / devices * algorithms.HIDDEN * 4
    outputs = algorithms.EXAMPLES * algorithms.CLASSES * 4
    rows = {row["loss_on"]: row for row in algorithms.measure_memory((devices,))}
    kept = {row["loss_on"]: row for row in FOUND["memory"] if row["devices"] == devices}
    for found in (rows, kept):
        first, replicas = found["first device"], found["replicas"]
        assert (first["first"] - hidden - outputs, first["others"] - hidden) == (8, 0)  # 8: the loss, and its weight
        assert replicas["first"] == replicas["others"] == hidden + outputs / devices + 8


@pytest.mark.usefixtures("one_thread")
def test_bf16_on_several_devices_of_a_process_is_autocast_by_hand() -> None:
    rows = [*algorithms.measure_bf16(steps=6), *FOUND["bf16"]]
    assert {row["strategy"] for row in rows} == {"data_parallel", "mirrored"}
    for row in rows:
        assert row["from_autocast_by_hand"] == 0.0, row
        assert row["fp32_from_autocast_by_hand"] > 1e-4, "in fp32 it is another training"
