"""`paceline verify` on scripts with a fault planted in user code, and on their healthy twins (planted.py).

What the command adds, its processes and its output, is in test_verify_command.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.verify.prepared import PLANTED, Case, Left, Prepared, answers, begun

from paceline.verify.answer import DIFFERENT, SAME, UNKNOWN, Answer, Claim
from paceline.verify.comparison import without_kinks
from paceline.verify.decision import decide
from paceline.verify.evidence import linear_combination, scalar_multiple
from paceline.verify.tolerances import Difference, Tolerances

FAULTS = [line.split()[0] for line in PLANTED.read_text().split('"""')[1].splitlines() if " | " in line]
TWINS = ("bad", "healthy")
QUICK = [
    "mean-of-means", "mean-of-means/batch-norm", "control-by-rank/gradient", "in-batch-loss",
    "changed-outside/size", "examples-overlap-or-miss", "other-random-numbers", "not-deterministic",
]  # fmt: skip
MORE = [
    "mean-of-means", "batch-norm-per-shard", "mean-of-means/reproducible", "clipped-early/by-hand",
    "in-batch-loss/norm", "scheduler-steps/micro-batch", "not-in-the-model", "other-random-numbers/model",
    "control-by-rank/loss", "overflow-on-some-ranks",
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


@pytest.fixture(
    scope="module",
    params=[pytest.param(QUICK, id="quick"), pytest.param(MORE, id="more", marks=pytest.mark.full)],
)
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Prepared]:
    """The questions of these faults and of their twins, with the runs that all need."""
    cases = [(fault, twin) for fault in (*request.param, "noise/loop") for twin in TWINS]
    return begun(tmp_path_factory.mktemp("asked"), cases, 2, "fp32", 3)


def test_faults_are_named_and_healthy_twins_are_the_same(asked: dict[Case, Prepared]) -> None:
    assert {*QUICK, *MORE} <= set(FAULTS)
    found = {case: decide(runs) for case, runs in asked.items() if case[0] != "noise/loop"}
    assert wrong(found) == {}
    answer = found["mean-of-means", "bad"]
    assert (answer.quantity, answer.step) == ("loss", 0)
    assert answer.difference is not None
    assert answer.tolerance is not None
    assert answer.difference > 100 * answer.tolerance  # a fault is far from what rounding does
    assert answer.remedy in answer.text
    assert found["mean-of-means", "healthy"].steps == 3


SPOKEN_OF = {  # words of a sentence -> runs of which one at least shows it
    "one process": {"B", "B0", "B1", "B2", "C", "C2", "C4"},
    "same shards": {"B", "B0", "B1", "LD", "D"},
    "whole batch": {"C"},
    "rank 0 of 1": {"D", "LD"},
    "dropout off": {"A0", "C"},
    "run twice": {"B2", "C2", "C4", "B"},
    "another rank's shard": {"T"},
    "parts": {"B", "B0", "P0"},
}


def unfounded(claim: Claim) -> bool:
    """Whether it speaks of a run that it is not bound to."""
    about = {*claim.runs, *claim.without}
    if claim.text.startswith("\nRemedy") or (not claim.runs and not claim.without and "your run failed" in claim.text):
        return False
    return any(words in claim.text and not about & runs for words, runs in SPOKEN_OF.items())


def test_no_sentence_speaks_of_a_run_that_was_not_made(asked: dict[Case, Prepared]) -> None:
    """Each question again, with each run missing that may be."""
    judged = 0
    for runs in asked.values():
        made = [path.parent.name for path in Path(runs._folder).glob("*/rank-0.json")]
        for absent in [(), *((name,) for name in made if name != "A"), ("C", "B"), ("B", "D"), ("B", "B1", "C", "D")]:
            left = Left(runs, absent)
            answer = decide(left)  # which checks that a claim's runs have left records
            assert not left.recorded & set(absent)
            for claim in (*answer.claims, *answer.notes):
                assert set(claim.runs) <= left.recorded, claim
                assert not set(claim.without) & left.recorded, claim
                assert not unfounded(claim), (runs.options.script.args, absent, claim)
            judged += 1
    assert judged > 5 * len(asked)


def test_a_claim_of_a_run_without_records_is_refused() -> None:
    made = {"A", "B"}
    Claim("one process that computes the same shards gives the same result", ("A", "B")).check(made)
    with pytest.raises(AssertionError, match="no records"):
        Claim("one process that computes the same shards gives the same result", ("A", "B")).check({"A"})
    with pytest.raises(AssertionError, match="missing"):
        Claim("B could not be run", without=("B",)).check(made)


@pytest.mark.conformance
def test_a_rank_that_does_otherwise_is_found_where_no_process_can_compute_the_shards(
    asked: dict[Case, Prepared],
) -> None:
    """In a loop with batch norm and noise, where it was said that distribution changes nothing."""
    assert wrong({("control-by-rank", "bad"): decide(asked["noise/loop", "bad"])}) == {}
    answer = decide(asked["noise/loop", "healthy"])
    assert (answer.code, answer.cause) == (UNKNOWN, None)
    assert "each process sees rank 0 of 1" in answer.text


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "precision"),
    [
        (2, "fp32"),
        pytest.param(3, "bf16", marks=pytest.mark.full),
        pytest.param(2, "bf16", marks=pytest.mark.campaign),
        pytest.param(3, "fp32", marks=pytest.mark.campaign),
    ],
)
def test_every_fault(processes: int, precision: str, tmp_path: Path) -> None:
    assert len(FAULTS) == len(set(FAULTS)) == 45
    assert wrong(answers(tmp_path, [(f, twin) for f in FAULTS for twin in TWINS], processes, precision)) == {}


def ask(folder: Path, strategy: str, case: Case = ("mean-of-means", "healthy"), steps: int = 2) -> Answer:
    folder.mkdir()
    return decide(Prepared(folder, case, 2, strategy, "fp32", steps))


@pytest.mark.conformance
def test_what_changes_the_mathematics_on_purpose_is_no_fault(tmp_path: Path) -> None:
    answer = ask(tmp_path / "local", "local_sgd:every=2")
    assert (answer.code, answer.cause) == (DIFFERENT, "by-design")
    assert "on purpose" in answer.text
    assert answer.difference is not None
    assert 0 < answer.difference < 0.5  # of the way that one process has gone
    answer = ask(tmp_path / "codec", "ddp:codec=bf16")
    assert (answer.code, answer.cause, answer.quantity) == (DIFFERENT, "by-design", "gradient")


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [
        "shared",
        "fsdp:stage=3",
        "data_parallel",
        pytest.param("fsdp:stage=1", marks=pytest.mark.full),
        pytest.param("fsdp:stage=2", marks=pytest.mark.full),
        pytest.param("mirrored", marks=pytest.mark.full),
        pytest.param("central_storage", marks=pytest.mark.full),
    ],
)
def test_other_strategies(strategy: str, tmp_path: Path) -> None:
    assert ask(tmp_path / "healthy", strategy).code == SAME
    answer = ask(tmp_path / "bad", strategy, ("mean-of-means", "bad"))
    assert (answer.code, answer.cause) == (DIFFERENT, "mean-of-means")


VERDICTS = {  # planted.py's last paragraph: code, cause, words
    "order": (SAME, None, "depends on the order of its examples"),
    "chaos": (SAME, None, "this model amplifies rounding"),
    "noise": (UNKNOWN, None, "random numbers that cannot be turned off"),
    "alone": (UNKNOWN, None, "there is no run to compare with"),
    "memory": (UNKNOWN, None, "there is no run of whole batches"),
    "pickled": (SAME, None, "the same, within rounding"),
    "tied": (SAME, None, "the same, within rounding"),
    "of-two": (SAME, None, "the same, within rounding"),
    "no-turns": (SAME, None, "in place of B: your run is the same when each process sees rank 0 of 1"),
}
FAILURES = {
    "nan": (UNKNOWN, "not-finite", "your run failed: NonFiniteError"),
    "path": (UNKNOWN, "unused-parameters", "your run failed: UnusedParameterError"),
}


def unlike(expected: Mapping[str, tuple[int, str | None, str]], found: Mapping[Case, Answer]) -> dict[str, str]:
    faults = {}
    for name, (code, cause, words) in expected.items():
        answer = found[name, "healthy"]
        text = " ".join([answer.text, *(note.text for note in answer.notes)])
        if (answer.code, answer.cause) != (code, cause) or words not in text:
            faults[name] = f"{answer.code} {answer.cause}: {text}"
    return faults


@pytest.mark.full
def test_what_is_no_fault_or_cannot_be_told(tmp_path: Path) -> None:
    assert unlike(VERDICTS, answers(tmp_path, [(name, "healthy") for name in VERDICTS], 2, "fp32", 2)) == {}


@pytest.mark.full
@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails(name: str, tmp_path: Path) -> None:
    found = {(name, "healthy"): ask(tmp_path / name, "ddp", (name, "healthy"))}
    assert unlike({name: FAILURES[name]}, found) == {}


def test_rounding_at_a_kink_is_rare_and_small() -> None:
    def gradient(difference: float) -> list[Difference]:
        return [Difference(0, "gradient", "w", difference, 1e-7, 1.0)]

    tolerances = Tolerances(None, None, "fp32")
    assert tolerances.may_be_kinks(gradient(1e-4))
    assert not tolerances.may_be_kinks(gradient(1e-3))
    assert not tolerances.may_be_kinks([*gradient(1e-4), Difference(0, "loss", None, 1e-4, 1e-7)])
    assert without_kinks([[], gradient(1e-4), [], []], tolerances) == ([[], [], []], 1)
    assert without_kinks([gradient(1e-4), [], gradient(1e-4), []], tolerances) == (
        [gradient(1e-4), [], gradient(1e-4), []],
        0,
    )


def test_evidence_from_gradients() -> None:
    first, second = ({"w": torch.randn(3, 4, dtype=torch.float64)} for _ in range(2))
    assert scalar_multiple({"w": 2 * first["w"]}, first) == pytest.approx(2)
    assert scalar_multiple(second, first) is None
    found = linear_combination({"w": 0.3 * first["w"] + 0.9 * second["w"]}, [first, second])
    assert found is not None
    assert found[0] == pytest.approx([0.3, 0.9])
    assert found[1] < 1e-12
    assert linear_combination({"w": torch.randn(3, 4, dtype=torch.float64)}, [first, second]) is None
