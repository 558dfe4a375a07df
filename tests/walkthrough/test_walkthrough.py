"""The acceptance suite: every walkthrough job under Paceline, compared with the same job in plain PyTorch.

`make test` runs each job under ddp on 1, 2 and 3 processes, .ci/run some jobs under each strategy too, and `make
conformance` the whole matrix.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from .common import Case
from .harness import Outcome, plain, problems, run_cases
from .matrix import MODULES, cut, cut_of_strategies, part_of_ci, refused, under_strategies, whole
from .strategies import WAYS

pytestmark = pytest.mark.timeout(1500)  # the first test waits for all launches
CUT = {case.name: case for case in cut()}
IN_CI = {case.name for case in (*cut_of_strategies(), *part_of_ci())}
CASES = CUT | {case.name: case for case in (*whole(), *under_strategies())}
REFUSED = refused()
EXACT = [case for case in CASES.values() if case.variant == "exact"]


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]


def marks(case: Case) -> Any:
    if case.name in CUT:
        return []
    large = bool(case.strategy) and case.worlds[0] > max(3, WAYS[case.strategy].worlds[0])
    if large:
        return pytest.mark.campaign
    return pytest.mark.conformance if case.name in IN_CI else pytest.mark.full


@pytest.fixture(scope="session")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Runs the cases of all tests that were selected, once."""
    wanted: dict[str, Case] = {}
    for item in request.session.items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if isinstance(case := params.get("case"), Case):
            wanted |= {needed.name: needed for needed in needed_for(case)}
        if params.get("job") in MODULES:
            wanted |= {case.name: case for case in CUT.values() if case.job == params["job"]}
    return run_cases(list(wanted.values()), Path(tmp_path_factory.mktemp("walkthrough")))


def needed_for(case: Case) -> list[Case]:
    return [case, undisturbed(case)] if case.variant == "exact" else [case]


def undisturbed(case: Case) -> Case:
    return replace(case, worlds=case.worlds[:1], stops=())


@pytest.mark.parametrize("case", params([case for case in CASES.values() if case.variant != "exact"]))
def test_is_the_model_of_plain_pytorch(case: Case, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[case.name]
    assert not outcome.error, outcome.error
    reference = plain(case, outcome.steps)
    losses = [step.losses for step in outcome.steps]
    assert len(losses) >= 30
    for result in outcome.results:
        assert not problems(case, result, losses, reference)


@pytest.mark.conformance
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case, _ in REFUSED.values()])
def test_is_refused(case: Case, outcomes: dict[str, Outcome]) -> None:
    """What a strategy leaves out it names, with Paceline's own error, on every rank."""
    words = REFUSED[case.name][1]
    assert words in outcomes[case.name].error
    assert outcomes[case.name].error.strip().splitlines()[-1].startswith("paceline.errors."), outcomes[case.name].error


@pytest.mark.parametrize("case", params([case for case in EXACT if case.stops]))
def test_resumes_bit_for_bit(case: Case, outcomes: dict[str, Outcome]) -> None:
    """With dropout and augmentation, stopped three times: weights, buffers, EMA, optimizer, schedule, every draw."""
    stopped, straight = outcomes[case.name], outcomes[undisturbed(case).name]
    assert not stopped.error, stopped.error
    assert not straight.error, straight.error
    for ours, theirs in zip(stopped.results, straight.results, strict=True):
        for what in ("parameters", "buffers", "state"):
            mine, reference = getattr(ours, what), getattr(theirs, what)
            assert mine.keys() == reference.keys()
            assert not [name for name in mine if not torch.equal(mine[name], reference[name])], what
    assert stopped.steps == straight.steps


@pytest.mark.parametrize("job", list(MODULES))
def test_order_and_draws_are_alike_everywhere(job: str, outcomes: dict[str, Outcome]) -> None:
    """On any number of processes, with any micro-batches, in both forms, after any resume: the same examples in every
    step, and the same crops (but not the same masks: these are drawn for a shard)."""
    seen: dict[str, tuple[str, Any]] = {}
    for name, case in CUT.items():
        if case.job == job and not outcomes[name].error:
            kind = {"tiny": "tiny", "smal": "small"}.get(case.variant[:4], "")
            drawn = [(s.epoch, {k: (b.ids, {} if job == "b" else b.drawn) for k, b in s.batches.items()})
                     for s in outcomes[name].steps]  # fmt: skip
            first, reference = seen.setdefault(kind, (name, drawn))
            assert drawn == reference, f"{name} and {first} consumed or drew different things"
    assert seen, "no case of this job ended"


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("job", list(MODULES))
def test_a_gradient_wrong_by_a_factor_of_2_is_seen(job: str, optimizer: str, outcomes: dict[str, Outcome]) -> None:
    """Planted in the plain job. For AdamW in every second step: a constant factor is nothing to it."""
    cases = [c for c in CUT.values() if c.job == job and c.optimizer == optimizer and c.variant != "exact"]
    for case in cases:
        outcome = outcomes[case.name]
        if outcome.error:
            continue
        losses = [step.losses for step in outcome.steps]
        broken = replace(case, breakage="doubled" if optimizer == "sgd" else "doubled_every_second_step")
        found = problems(case, outcome.results[0], losses, plain(broken, outcome.steps))
        assert any(text.startswith("parameters differ") for text in found), f"{case.name}: {found}"
    assert any(not outcomes[case.name].error for case in cases), "no case of this job ended"
