"""`make bench` (benchmarks/suite): what it claims, what it leaves out, and that contenders must compute the same."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.suite import __main__ as suite
from benchmarks.suite import contenders, figures, gpu, measure, models, page
from tests.docs.test_figures import ROOT, Table, not_held, tables

from paceline.config import parse_strategy

HAND, AGAIN, REFERENCE = contenders.BY_HAND, contenders.AGAIN, contenders.REFERENCE
NO_SOURCES = models.Sources(Path("no.zip"), Path("no.txt"))


def named(*names: str) -> list[contenders.Contender]:
    return [one for one in contenders.CONTENDERS if one.name in names]


def test_an_interval_has_the_median_in_it_and_narrows_with_rounds() -> None:
    few, many = figures.interval([1.0, 1.2, 0.8, 1.1]), figures.interval([1.0, 1.2, 0.8, 1.1] * 50)
    assert few[1] <= few[0] <= few[2]
    assert many[2] - many[1] < few[2] - few[1]


@pytest.mark.parametrize(
    ("ratio", "control", "settled"),
    [
        ([1.30, 1.25, 1.35], [1.0, 0.98, 1.02], True),
        ([0.70, 0.65, 0.75], [1.0, 0.98, 1.02], True),
        ([1.05, 0.99, 1.11], [1.0, 0.98, 1.02], False),
        ([1.05, 1.04, 1.06], [1.0, 0.94, 1.06], False),
    ],
    ids=["faster", "slower", "its interval has 1 in it", "within the control's"],
)
def test_no_claim_below_the_spread(ratio: list[float], control: list[float], settled: bool) -> None:
    assert figures.settled(ratio, control) == settled
    assert page.ratio(ratio, control).endswith("no difference") != settled


def test_ratios_are_those_within_a_round() -> None:
    """A machine that is half as fast in every second round changes them nothing."""
    slow = [1.0, 2.0] * 10
    assert figures.ratios([3 * value for value in slow], slow) == [3.0, 3.0, 3.0]


def test_every_contender_has_a_name_of_its_own_and_can_be_parsed() -> None:
    assert len({one.name for one in contenders.CONTENDERS}) == len(contenders.CONTENDERS)
    for one in contenders.CONTENDERS:
        if one.kind == "paceline":
            parse_strategy(one.strategy)


def test_what_is_not_there_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    there = named(HAND)[0]
    assert there.missing() is None
    assert replace(there, package="no_such_library").missing() == "no_such_library is not installed"
    assert "no_such_strategy" in (replace(there, kind="paceline", strategy="no_such_strategy").missing() or "")
    monkeypatch.setenv("PACELINE_TENSORFLOW", "/no/such/python")
    assert "/no/such/python" in (named("tf.distribute")[0].missing() or "")


@pytest.mark.parametrize("name", ["conv", "gpt"])
def test_a_model_without_its_data_is_left_out(name: str) -> None:
    with pytest.raises(models.NoData, match="make bench"):
        models.MODELS[name].data(64, NO_SOURCES)


def test_the_perceptron_has_25_million_parameters() -> None:
    assert round(sum(p.numel() for p in models.perceptron().parameters()) / 1e6, 1) == 25.8


def test_paceline_s_best_way_stands_beside_the_best_of_the_others() -> None:
    speeds = {
        REFERENCE: [100.0] * 5, HAND: [90.0] * 5, AGAIN: [91.0] * 5, "Accelerate": [80.0] * 5,
        "tf.distribute": [95.0] * 5, "Paceline ddp": [89.0] * 5, "Paceline shared": [120.0] * 5,
    }  # fmt: skip
    best = measure.best(speeds)
    assert (best["ours"], best["peer"]) == ("Paceline shared", "tf.distribute")
    assert best["ours / peer"][0] == pytest.approx(120 / 95, abs=1e-4)
    assert best["ours / all threads"][0] == pytest.approx(1.2)
    assert best["control"][0] == pytest.approx(91 / 90, abs=1e-4)
    assert measure.best({HAND: [1.0], "Accelerate": [1.0]}) == {}


class FakeGroup:
    def __init__(self, name: str, losses: list[float]) -> None:
        (self.contender,) = named(name)
        self.losses = losses


def test_a_contender_that_computes_something_else_is_left_out() -> None:
    groups: Any = {
        REFERENCE: FakeGroup(REFERENCE, [2.0, 1.0]),
        HAND: FakeGroup(HAND, [2.0, 1.0001]),
        "DeepSpeed": FakeGroup("DeepSpeed", [2.0, 1.5]),
        "Accelerate": FakeGroup("Accelerate", [2.0, float("nan")]),
    }
    skipped: dict[str, str] = {}
    apart = measure._apart(models.MODELS["layers"], groups, skipped)
    assert list(groups) == [REFERENCE, HAND]
    assert apart["DeepSpeed"] == pytest.approx(0.5)
    assert skipped.keys() == {"DeepSpeed", "Accelerate"}


def test_batch_norm_by_shard_is_compared_with_its_like() -> None:
    groups: Any = {
        REFERENCE: FakeGroup(REFERENCE, [1.0]),
        HAND: FakeGroup(HAND, [1.1]),
        "Accelerate": FakeGroup("Accelerate", [1.1]),
        "Paceline ddp": FakeGroup("Paceline ddp", [1.0]),
    }
    assert set(measure._apart(models.MODELS["conv_bn"], groups, {}).values()) == {0.0}
    assert set(groups) == {REFERENCE, HAND, "Accelerate", "Paceline ddp"}


def result(seconds: float) -> dict[str, Any]:
    """What measure.measured returns, of made-up times."""
    names = [REFERENCE, contenders.ONE_THREAD, HAND, AGAIN, "Accelerate", "Paceline ddp"]
    times = {name: [seconds + 0.01 * place + 0.001 * k for k in range(9)] for place, name in enumerate(names)}
    model = models.MODELS["layers"]
    memory = {name: [{"peak resident MB": 300.5, "proportional MB": 200.25}] for name in names}
    found = {"seconds": times, "sent": dict.fromkeys(names, 123456.0), "steps": 7}
    about = {"about": model.about, "parameters": 123, "global_batch": 64, "optimizer": "sgd", "batch_norm": False,
             "skipped": {"X": "why"}}  # fmt: skip
    return about | measure._summary(model, found, memory, dict.fromkeys(names, 1e-7)) | {"command": "c", "time": "2026"}


def test_the_page_shows_the_file_s_numbers_and_charts_are_drawn(tmp_path: Path) -> None:
    machine = {"processor": "P", "cores": 2, "accelerators": 0, "torch": "2", "python": "3"}
    document = {"command": "c", "time": "2026-01-01", "machine": machine, "models": {
        "layers": result(1.0), "conv": {"left_out": "no data"}, "gpu": {"left_out": "no device"}}}  # fmt: skip
    (tmp_path / "bench.json").write_text(json.dumps(document))
    page.write(tmp_path / "bench.json", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "`conv` is left out: no data" in text
    assert "no device" in text
    assert "- X: left out. why" in text
    found = [table for table in tables(tmp_path / "page.md", tmp_path) if isinstance(table, Table)]
    assert len(found) == 2
    for table in found:
        assert table.file == str(tmp_path / "bench.json")
        assert not_held(table, document) == []
    xml.parse(tmp_path / page.IMAGES / "layers.svg")


def test_the_page_in_the_docs_is_what_its_file_gives(tmp_path: Path) -> None:
    """Also with contenders that the suite no longer has: figures of some models stay when others are measured anew."""
    page.write(suite.RESULTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == suite.PAGE.read_text()


def test_results_are_added_to_those_of_the_same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bench.json"
    monkeypatch.setattr(suite, "machine", lambda: {"processor": "P"})
    suite.write(file, "gpt", result(1.0))
    suite.write(file, "layers", result(2.0))
    suite.write(file, "gpt", {"left_out": "no data", "command": "c", "time": "2026"})
    kept = json.loads(file.read_text())["models"]
    assert kept.keys() == {"gpt", "layers"}
    assert "contenders" in kept["gpt"], "a run that measured nothing takes nothing away"
    monkeypatch.setattr(suite, "machine", lambda: {"processor": "Q"})
    suite.write(file, "mlp", result(1.0))
    assert json.loads(file.read_text())["models"].keys() == {"mlp"}


def test_without_a_cuda_device_its_part_says_so() -> None:
    if not gpu.torch.cuda.is_available():
        with pytest.raises(gpu.NoDevice, match="no CUDA device"):
            gpu.measured(1.0)


def test_the_ways_on_a_cuda_device_can_be_built() -> None:
    ways = gpu.ways(small=True)
    assert {"GPT-2, fp32", "GPT-2, tf32, fused AdamW", "GPT-2, bf16, fused AdamW, compiled"} <= ways.keys()
    for load, tf32 in ways.values():
        assert not (tf32 and load.precision == "bf16")


def test_the_committed_page_is_that_of_the_committed_results() -> None:
    results = ROOT / "benchmarks" / "results" / "bench.json"
    document = json.loads(results.read_text())
    assert (ROOT / "docs" / "benchmarks.md").read_text() == page.page(document, "benchmarks/results/bench.json")


@pytest.mark.full
def test_contenders_really_take_turns() -> None:
    """One process, DDP by hand twice, and Paceline, on a model without data of its own."""
    chosen = named(REFERENCE, HAND, AGAIN, "Paceline ddp, gloo")
    found = measure.measured("layers", chosen, NO_SOURCES, 1.0)
    assert found["skipped"] == {}
    assert found["contenders"].keys() == {one.name for one in chosen}
    assert found["rounds"] >= measure.LEAST_ROUNDS
    parameters, sent = found["parameters"], "sent MB a step, each process"
    for name in (HAND, "Paceline ddp, gloo"):  # a ring of two: each sends half of the gradients twice
        assert found["contenders"][name][sent] == pytest.approx(4e-6 * parameters, rel=0.1)
    assert found["contenders"][REFERENCE][sent] == 0.0


@pytest.mark.full
def test_the_part_for_a_cuda_device_runs_on_a_cpu() -> None:
    found = gpu.one("GPT-2, fp32, fused AdamW", 1.0, small=True)
    assert found["ours"]["tokens/s"] > 0
    assert found["sides"]["P"]["weights apart after the first step"] < 1e-3
