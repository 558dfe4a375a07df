"""`make bench` (benchmarks/suite): what it claims, what it leaves out, and that contenders must compute the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.suite import __main__ as suite
from benchmarks.suite import contenders, figures, gpu, measure, models, page

from paceline.config import parse_strategy

HAND, AGAIN, REFERENCE = contenders.BY_HAND, contenders.AGAIN, contenders.REFERENCE
NO_SOURCES = models.Sources(Path("no.zip"), Path("no.txt"))


def named(*names: str) -> list[contenders.Contender]:
    return [one for one in contenders.contenders(2) if one.name in names]


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
    assert page.ratio(ratio, control).startswith("≈") != settled


def test_an_interval_has_the_spread_of_launches_in_it() -> None:
    """Rounds that agree, in launches that do not: one launch alone would claim a difference."""
    slow, fast = [0.90, 0.91, 0.90, 0.91], [1.10, 1.11, 1.10, 1.11]
    assert figures.interval([slow])[2] < 0.92
    middle, low, high = figures.interval([slow, fast, slow, fast])
    assert middle == pytest.approx(1.005, abs=0.011)
    assert low < 0.96
    assert high > 1.05


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_contender_has_a_name_of_its_own_and_can_be_parsed(processes: int) -> None:
    every = contenders.contenders(processes)
    assert len({one.name for one in every}) == len(every)
    for one in every:
        if one.kind == "paceline":
            parse_strategy(one.strategy)
        if one.kind not in ("plain", "tensorflow"):
            assert one.processes == processes


def test_what_is_not_there_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    there = named(HAND)[0]
    assert there.missing() is None
    assert replace(there, package="no_such_library").missing() == "no_such_library is not installed"
    assert "no_such_strategy" in (replace(there, kind="paceline", strategy="no_such_strategy").missing() or "")
    monkeypatch.setenv("PACELINE_TENSORFLOW", "/no/such/python")
    assert "/no/such/python" in (named("tf.distribute")[0].missing() or "")


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


def test_the_page_in_the_docs_is_that_of_the_committed_files(tmp_path: Path) -> None:
    page.write(suite.RESULTS, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == suite.PAGE.read_text()
    for chart in (tmp_path / page.IMAGES).iterdir():
        assert chart.read_text() == (suite.PAGE.parent / page.IMAGES / chart.name).read_text()
    assert len([*(tmp_path / page.IMAGES).iterdir()]) == len([*(suite.PAGE.parent / page.IMAGES).iterdir()])


@pytest.mark.full
def test_contenders_really_take_turns() -> None:
    """One process, the hand-written step twice, and Paceline, on a model without data of its own."""
    chosen = named(REFERENCE, HAND, AGAIN, "Paceline ddp, gloo")
    found = measure.measured("layers", chosen, NO_SOURCES, 1.0, 2)
    assert found["skipped"] == {}
    assert found["contenders"].keys() == {one.name for one in chosen}
    assert found["rounds"] >= 2 * measure.LEAST_ROUNDS
    parameters, sent = found["parameters"], "sent MB a step, each process"
    for name in (HAND, "Paceline ddp, gloo"):  # a ring of two: each sends half of the gradients twice
        assert found["contenders"][name][sent] == pytest.approx(4e-6 * parameters, rel=0.1)
    assert found["contenders"][REFERENCE][sent] == 0.0


@pytest.mark.full
def test_the_part_for_a_cuda_device_runs_on_a_cpu() -> None:
    found = gpu.one("GPT-2, fp32, fused AdamW", 1.0, small=True)
    assert found["ours"]["tokens/s"] > 0
    assert found["sides"]["P"]["weights apart after the first step"] < 1e-3
