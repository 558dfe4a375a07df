"""A call in which all processes take part, on some of them only: an error that names both calls and lines, at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.config import parse_strategy
from paceline.errors import UsageError
from paceline.step.call_check import COMPARED, IN_EACH_STEP, CallCheck
from paceline.strategies import make
from paceline.world import World

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
    found: list[dict[str, str]] = run_ranks(2, "tests.step.test_call_check:make_all", deadline=90)
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
    compare = run.calls.same

    def counted(call: str) -> None:
        before = run.calls._left
        compare(call)
        made[0] += before > 0 or call not in IN_EACH_STEP

    run.calls.same = counted  # type: ignore[method-assign]
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
    assert run_ranks(2, "tests.step.test_call_check:count", deadline=60) == [expected] * 2


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
    assert run_ranks(2, "tests.step.test_call_check:look_alone", deadline=60) == [24, 24]


LAST_ACT = """
import sys, torch, paceline
from torch.utils.data import TensorDataset

run = paceline.start(progress="off")
model, optimizer = run.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), 0.01))
data, loss_fn = TensorDataset(torch.ones(12, 2)), lambda model, batch: model(batch[0]).mean()
for batch in (loader := run.loader(data, global_batch=4)):
    run.backward(loss_fn(model, batch))
    run.step(optimizer)
if sys.argv[1] == "background":
    run.save("checkpoints", background=True)
if run.main:
    if sys.argv[1] == "save": run.save("checkpoints")
    if sys.argv[1] == "background": run.save("checkpoints")
    if sys.argv[1] == "export": run.export("model.safetensors", model)
    if sys.argv[1] == "evaluate": paceline.evaluate(model, loss_fn, data, global_batch=4)
    if sys.argv[1] == "predict": run.predict(model, data, global_batch=4)
    if sys.argv[1] == "sum":
        for _ in range(100): run.sum(1.0)
"""
ON_RANK_0 = [
    pytest.param("save", "rank 0 is in run.save, at train.py, line 14,"),
    pytest.param("background", "line 15; rank 1: the end of the run, at the end of the script"),
    pytest.param("export", "rank 0 is in run.export, at train.py, line 16,", marks=pytest.mark.full),
    pytest.param("evaluate", "rank 0 is in paceline.evaluate, at train.py, line 17,", marks=pytest.mark.full),
    pytest.param("predict", "rank 0 is in run.predict, at train.py, line 18,", marks=pytest.mark.full),
    pytest.param("sum", "rank 0 is in run.sum, at train.py, line 20,", marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.conformance
@pytest.mark.parametrize(("what", "words"), ON_RANK_0)
def test_the_last_act_on_rank_0_alone(what: str, words: str, tmp_path: Path) -> None:
    """The other rank has ended, or is about to. The call, its line and the remedy are named, and not a connection."""
    (tmp_path / "train.py").write_text(LAST_ACT)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "2", "train.py", what],
        cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert words in done.stderr
    assert "if run.main:" in done.stderr
    assert "onnection" not in done.stderr
    assert "same number of steps" not in done.stderr


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer [127.0.0.1]:5"), RuntimeError("shapes")])
def test_only_what_tells_of_a_lost_peer_is_explained(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallCheck(make(parse_strategy("single"), World(0, 1, 0, 1, 0, 1, "start()"), torch.device("cpu")))
    with pytest.raises(RuntimeError) as caught, calls.call("run.save"):
        raise error
    lost = "peer" in str(error)
    assert caught.value is not error if lost else caught.value is error
    assert (caught.value.__cause__ is error) == lost  # by which a launcher knows that it is a consequence
    assert isinstance(caught.value, UsageError) == lost
