"""`paceline verify` on scripts with a fault planted in user code, and on their healthy twins (planted.py).

What the command adds, its processes and its output, is in test_verify_command.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.verify.prepared import PLANTED, Case, Prepared, answers

from paceline.tools.evidence import multiple, span
from paceline.tools.judge import but_kinks, judge
from paceline.tools.runs import DIFFERENT, SAME, UNKNOWN, Answer
from paceline.tools.sides import Difference, Tolerances

FAULTS = [line.split()[0] for line in PLANTED.read_text().split('"""')[1].splitlines() if " | " in line]
TWINS = ("bad", "healthy")
QUICK = [
    "batch-norm-per-shard", "mean-of-means", "mean-of-means/reproducible", "mean-of-means/batch-norm",
    "clipped-early/by-hand",
    "in-batch-loss/norm", "control-by-rank/gradient", "in-batch-loss", "scheduler-steps/micro-batch",
    "not-in-the-model", "changed-outside/size", "examples-overlap-or-miss", "other-random-numbers",
    "other-random-numbers/model", "control-by-rank/loss", "overflow-on-some-ranks", "not-deterministic",
]  # fmt: skip


def wrong(found: Mapping[Case, Answer]) -> dict[Case, str]:
    """Of the answers those that are not what planted.py's table says."""
    faults = {}
    for (fault, twin), answer in found.items():
        code = SAME if twin == "healthy" else UNKNOWN if fault == "not-deterministic" else DIFFERENT
        cause = None if twin == "healthy" else fault.partition("/")[0]
        if (answer.code, answer.cause) != (code, cause):
            faults[fault, twin] = f"{answer.code} {answer.cause}: {answer.text} {answer.notes}"
    return faults


def test_faults_are_named_and_healthy_twins_are_the_same(tmp_path: Path) -> None:
    assert set(QUICK) <= set(FAULTS)
    found = answers(tmp_path, [(fault, twin) for fault in QUICK for twin in TWINS], 2, "fp32", 3)
    assert wrong(found) == {}
    answer = found["mean-of-means", "bad"]
    assert (answer.quantity, answer.step) == ("loss", 0)
    assert answer.difference is not None
    assert answer.tolerance is not None
    assert answer.difference > 100 * answer.tolerance  # a fault is far from what rounding does
    assert answer.remedy in answer.text
    assert found["mean-of-means", "healthy"].steps == 3


@pytest.mark.conformance
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("processes", [2, 3])
def test_every_fault(processes: int, precision: str, tmp_path: Path) -> None:
    assert len(FAULTS) == len(set(FAULTS)) == 45
    assert wrong(answers(tmp_path, [(f, twin) for f in FAULTS for twin in TWINS], processes, precision)) == {}


def ask(folder: Path, strategy: str, case: Case = ("mean-of-means", "healthy"), steps: int = 2) -> Answer:
    folder.mkdir()
    return judge(Prepared(folder, case, 2, strategy, "fp32", steps))


def test_what_changes_the_mathematics_on_purpose_is_no_fault(tmp_path: Path) -> None:
    answer = ask(tmp_path / "local", "local_sgd:every=2")
    assert (answer.code, answer.cause) == (DIFFERENT, "by-design")
    assert "on purpose" in answer.text
    assert answer.difference is not None
    assert 0 < answer.difference < 0.5  # of the way that one process has gone
    answer = ask(tmp_path / "codec", "ddp:codec=bf16")
    assert (answer.code, answer.cause, answer.quantity) == (DIFFERENT, "by-design", "gradient")


@pytest.mark.conformance
@pytest.mark.parametrize(
    "strategy", ["fsdp:stage=1", "fsdp:stage=2", "fsdp:stage=3", "data_parallel", "mirrored", "central_storage"]
)
def test_other_strategies(strategy: str, tmp_path: Path) -> None:
    assert ask(tmp_path / "healthy", strategy).code == SAME
    answer = ask(tmp_path / "bad", strategy, ("mean-of-means", "bad"))
    assert (answer.code, answer.cause) == (DIFFERENT, "mean-of-means")


VERDICTS = {  # planted.py's last paragraph: code, cause, words
    "order": (SAME, None, "depends on the order of its examples"),
    "chaos": (SAME, None, "this model enlarges rounding"),
    "noise": (UNKNOWN, None, "random numbers that cannot be turned off"),
    "alone": (UNKNOWN, None, "there is nothing to compare with"),
    "memory": (UNKNOWN, None, "there is no run of whole batches"),
    "tied": (SAME, None, "the same, within rounding"),
    "of-two": (SAME, None, "the same, within rounding"),
    "no-turns": (UNKNOWN, None, "the same with dropout off; with it on there is nothing to compare with"),
}
FAILURES = {
    "nan": (UNKNOWN, "not-finite", "the run in question failed: NonFiniteError"),
    "path": (UNKNOWN, "unused-parameters", "the run in question failed: UnusedParameterError"),
}


def unlike(expected: Mapping[str, tuple[int, str | None, str]], found: Mapping[Case, Answer]) -> dict[str, str]:
    faults = {}
    for name, (code, cause, words) in expected.items():
        answer = found[name, "healthy"]
        text = " ".join([answer.text, *answer.notes])
        if (answer.code, answer.cause) != (code, cause) or words not in text:
            faults[name] = f"{answer.code} {answer.cause}: {text}"
    return faults


def test_what_is_no_fault_or_cannot_be_told(tmp_path: Path) -> None:
    assert unlike(VERDICTS, answers(tmp_path, [(name, "healthy") for name in VERDICTS], 2, "fp32", 2)) == {}


@pytest.mark.conformance
@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails(name: str, tmp_path: Path) -> None:
    found = {(name, "healthy"): ask(tmp_path / name, "ddp", (name, "healthy"))}
    assert unlike({name: FAILURES[name]}, found) == {}


def test_rounding_at_a_kink_is_rare_and_small() -> None:
    def gradient(difference: float) -> list[Difference]:
        return [Difference(0, "gradient", "w", difference, 1e-7, 1.0)]

    tolerances = Tolerances(None, None, "fp32")
    assert tolerances.of_kinks(gradient(1e-4))
    assert not tolerances.of_kinks(gradient(1e-3))
    assert not tolerances.of_kinks([*gradient(1e-4), Difference(0, "loss", None, 1e-4, 1e-7)])
    assert but_kinks([[], gradient(1e-4), [], []], tolerances) == ([[], [], []], 1)
    assert but_kinks([gradient(1e-4), [], gradient(1e-4), []], tolerances) == (
        [gradient(1e-4), [], gradient(1e-4), []],
        0,
    )


def test_evidence_from_gradients() -> None:
    first, second = ({"w": torch.randn(3, 4, dtype=torch.float64)} for _ in range(2))
    assert multiple({"w": 2 * first["w"]}, first) == pytest.approx(2)
    assert multiple(second, first) is None
    found = span({"w": 0.3 * first["w"] + 0.9 * second["w"]}, [first, second])
    assert found is not None
    assert found[0] == pytest.approx([0.3, 0.9])
    assert found[1] < 1e-12
    assert span({"w": torch.randn(3, 4, dtype=torch.float64)}, [first, second]) is None
