"""Jobs under the strategies of one process with several devices, against plain PyTorch with the whole global batch on
one device; and their checkpoints, each read by all.

A cut in every run of the tests; `make conformance` has all of 2, 3 and 4 replicas x strategy x reduction x optimizer x
micro-batches x job.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.checks import difference, started
from tests.strategies.replica_jobs import FOLDERS, JOBS, Plainly, flat, leg
from torch import nn

TOLERANCE = {"sgd": 1e-10, "adamw": 1e-8}
KINDS = ["data_parallel", "central_storage"] + [
    f"mirrored:reduction={reduction}" for reduction in ("native", "ring", "hierarchical", "reduce_to_one")
]
SIZES = (2, 3, 4)


def strategy_of(kind: str, size: int) -> str:
    return f"{kind}{',' if ':' in kind else ':'}devices={'+'.join(['cpu'] * size)}"


@functools.cache
def reference(job: str, optimizer: str) -> list[nn.Module]:
    return JOBS[job](Plainly(), optimizer, None)


WHOLE = [
    (job, optimizer, micro, kind, size)
    for job, optimizer, micro, kind, size in itertools.product(JOBS, TOLERANCE, (None, 1), KINDS, SIZES)
    if (job != "sparse" or optimizer == "sgd") and (job in ("counts", "rarely") or micro is None)
]
CUT = WHOLE[::7]  # prime to what each column repeats with: every value of each is there


def params(cases: list[Any]) -> list[Any]:
    return [
        pytest.param(*case, id="-".join(map(str, case)), marks=[] if case in CUT else pytest.mark.full)
        for case in cases
    ]


@pytest.mark.parametrize(("job", "optimizer", "micro", "kind", "size"), params(WHOLE))
def test_is_the_model_of_plain_pytorch(job: str, optimizer: str, micro: int | None, kind: str, size: int) -> None:
    with started(strategy=strategy_of(kind, size), progress="off") as run:
        trained = JOBS[job](run, optimizer, micro)
    for own, plain in zip(trained, reference(job, optimizer), strict=True):
        assert difference(own, plain) <= TOLERANCE[optimizer], difference(own, plain)


@pytest.mark.parametrize("job", JOBS)
def test_the_comparison_sees_a_gradient_wrong_by_a_factor(job: str) -> None:
    class Wrong(Plainly):
        """By 1%, in one parameter of each model: a common factor would be clipped away."""

        def forward_backward(self, loss_fn: Any, model: Any, batch: Any, optimizer: Any = None) -> None:
            super().forward_backward(loss_fn, model, batch, optimizer)
            for m in model.values() if isinstance(model, dict) else [model]:
                reached = [p for p in m.parameters() if p.grad is not None]
                if reached:
                    reached[0].grad *= 1.01

    for own, plain in zip(JOBS[job](Wrong(), "sgd", None), reference(job, "sgd"), strict=True):
        assert difference(own, plain) > 1e-7


# --- checkpoints

ALL = ["single", *(strategy_of(kind, 3) for kind in KINDS[:3]), "central_storage"]


@functools.cache
def straight() -> nn.Module:
    return leg("single", None)[0]


NEXT = set(zip(ALL, ALL[1:] + ALL[:1], strict=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*pair, marks=[] if pair in NEXT else pytest.mark.full) for pair in itertools.product(ALL, ALL)],
)
def test_a_checkpoint_of_one_is_gone_on_with_by_another(before: str, after: str, tmp_path: Path) -> None:
    leg(before, tmp_path)
    model, state = leg(after, tmp_path)
    assert difference(model, straight()) <= 1e-8
    assert set(state["state"]) == set(dict(model.named_parameters()))
    assert {values["exp_avg"].device.type for values in state["state"].values()} == {"cpu"}


@pytest.mark.conformance
@pytest.mark.timeout(300)
def test_checkpoints_go_to_ddp_and_come_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two processes, which go on with what each has saved here, and save what each goes on with here."""
    given = [tmp_path / "to" / str(number) for number in range(len(ALL))]
    taken = [tmp_path / "from" / str(number) for number in range(len(ALL))]
    for strategy, folder in zip(ALL, given, strict=True):
        leg(strategy, folder)
    monkeypatch.setenv(FOLDERS, "\n".join(map(str, [*given, *taken])))
    for on_rank in run_ranks(2, "tests.strategies.replica_jobs:legs_on_ranks", deadline=200):
        for weights in on_rank[: len(ALL)]:
            assert (torch.tensor(weights) - flat(straight())).norm() <= 1e-8 * flat(straight()).norm()
    for strategy, folder in zip(ALL, taken, strict=True):
        assert difference(leg(strategy, folder)[0], straight()) <= 1e-8
