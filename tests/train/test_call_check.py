"""A call in which all processes take part, on some of them only: an error that names both calls and lines, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.train.call_check import COMPARED, IN_EACH_STEP

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2))


def prepared() -> tuple[paceline.Run, Any, Any, Any]:
    run = paceline.start(seed=1, strategy="ddp", progress="off")
    model = nn.Linear(2, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    return run, model, optimizer, run.loader(DATA, global_batch=4)


def train(run: paceline.Run, model: Any, optimizer: Any, loader: Any, after: Callable[[int], None]) -> None:
    for step, (x,) in enumerate(loader):
        run.backward(model(x).pow(2).mean())
        run.step(optimizer)
        after(step)


def mean_on_rank_0_after_a_step(run: paceline.Run, *rest: Any) -> None:
    train(run, *rest, lambda step: run.mean(1.0) if run.main else None)  # and the other goes on to its next batch


def sum_beside_mean(run: paceline.Run, *rest: Any) -> None:
    run.sum(1.0) if run.main else run.ratio(1.0, 2.0)


def ratio_beside_mean(run: paceline.Run, *rest: Any) -> None:
    """The same tensors and collectives: nothing would hang, and the value would be another."""
    train(run, *rest, lambda step: run.mean(1.0) if run.main else run.ratio(1.0, 2.0))


def gather_beside_broadcast(run: paceline.Run, *rest: Any) -> None:
    run.gather([1]) if run.main else run.broadcast([1])


def save_on_rank_0(run: paceline.Run, *rest: Any) -> None:
    run.save("/nonexistent") if run.main else run.wait()


def evaluation_on_rank_0(run: paceline.Run, model: Any, optimizer: Any, loader: Any) -> None:
    train(run, model, optimizer, loader, lambda step: None)
    if run.main:
        for (x,) in run.loader(DATA, global_batch=4, train=False):
            run.mean(model(x)[:, 0])
    train(run, model, optimizer, loader, lambda step: None)


def left_the_loop(run: paceline.Run, model: Any, optimizer: Any, loader: Any) -> None:
    for step, (x,) in enumerate(loader):
        run.backward(model(x).pow(2).mean())
        run.step(optimizer)
        if step == 1 and not run.main:
            break
    run.wait()


MISTAKES: dict[str, tuple[Callable[..., None], str, str]] = {
    "mean": (mean_on_rank_0_after_a_step, "rank 0: run.mean, at ", "rank 1: the backward of a batch, at "),
    "sum": (sum_beside_mean, "rank 0: run.sum", "rank 1: run.ratio"),
    "ratio": (ratio_beside_mean, "rank 0: run.mean", "rank 1: run.ratio"),
    "gather": (gather_beside_broadcast, "rank 0: run.gather", "rank 1: run.broadcast"),
    "save": (save_on_rank_0, "rank 0: run.save", "rank 1: run.wait"),
    "evaluation": (evaluation_on_rank_0, "rank 0: run.mean", "rank 1: the backward of a batch"),
    "loop": (left_the_loop, "rank 0: the backward of a batch", "rank 1: run.wait"),
}


def make_all() -> dict[str, str]:
    """What the process says of each mistake."""
    told = {}
    for name, (mistake, *_) in MISTAKES.items():
        run, *rest = prepared()
        told[name] = "nothing"
        try:
            mistake(run, *rest)
        except UsageError as error:
            told[name] = str(error)
        run.close()
    return told


@pytest.fixture(scope="module")
def told() -> list[dict[str, str]]:
    found: list[dict[str, str]] = run_ranks(2, "tests.train.test_call_check:make_all", deadline=90)
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_both_calls_and_lines_are_named_on_both_ranks_before_anything_hangs(
    name: str, told: list[dict[str, str]]
) -> None:
    _, first, second = MISTAKES[name]
    for text in (of_rank[name] for of_rank in told):
        assert "the processes make different calls" in text, text
        assert first in text
        assert second in text
        assert text.count("test_call_check.py, line ") == 2, text
        assert "if run.main:" in text


def count() -> list[int]:
    """Comparisons in each of two epochs with a call in each step, and in a call outside of them."""
    run, model, optimizer, loader = prepared()
    made = [0]
    compare = run._call_check.same

    def counted(call: str) -> None:
        before = run._call_check._left
        compare(call)
        made[0] += before > 0 or call not in IN_EACH_STEP

    run._call_check.same = counted  # type: ignore[method-assign]
    found = []
    for _ in range(8):
        made[0] = 0
        train(run, model, optimizer, loader, lambda step: run.mean(1.0) and None)
        found.append(made[0])
    made[0] = 0
    run.wait()
    return [*found, made[0]]


def test_the_first_calls_of_steps_are_compared_and_all_others() -> None:
    per_epoch = 2 * 3
    whole, rest = divmod(COMPARED, per_epoch)
    expected = [per_epoch] * whole + [rest] + [0] * (7 - whole) + [1]
    assert run_ranks(2, "tests.train.test_call_check:count", deadline=60) == [expected] * 2


def look_alone() -> int:
    """One process looks at batches of all loaders, and keeps an iterator. Returns how many steps all made."""
    run, model, optimizer, loader = prepared()
    held, other = run.loader(DATA, global_batch=4, train=False), run.loader(DATA, global_batch=4, name="other")
    looks = []
    for _ in range(8):
        for (x,) in loader:
            if run.main:
                next(iter(held))
                next(iter(other))
            run.backward(model(x).pow(2).mean())
            run.step(optimizer)
            run.mean(1.0)
    if run.main:
        looks.append(iter(loader))
        next(looks[0])
    run.mean(torch.ones(2))
    run.wait()
    return run.steps


def test_a_process_may_look_at_batches_by_itself() -> None:
    assert run_ranks(2, "tests.train.test_call_check:look_alone", deadline=60) == [24, 24]
