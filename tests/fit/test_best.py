"""Best in a loop of one's own, and the best checkpoints beside the newest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import BATCH, TEST, TRAIN, adamw, equal, loss_fn, net, started
from tests.fit.test_fit_on_ranks import Stop, directory
from torch import nn

import paceline
from paceline.errors import SettingError, UsageError
from paceline.state.checkpoint import ranking

pytestmark = pytest.mark.timeout(240)
SCORES = [0.5, 0.7, 0.2, 0.6, 0.2, math.nan, 0.4, 0.9]


def test_better_by_min_delta() -> None:
    for mode, sign in (("min", 1), ("max", -1)):
        best = paceline.Best("val_loss", mode=mode, min_delta=0.1, patience=2)
        # By the rule of Keras and Lightning: better is what passes the best value by more than min_delta.
        found = [best.update(sign * value) for value in (1.0, 0.95, 0.89, math.nan, 0.8)]
        assert found == [True, False, True, False, False]
        assert (best.value, best.waited, best.stop) == (sign * 0.89, 2, True)
        assert best.update(torch.tensor(sign * 0.5))
        assert not best.stop
    for value in ("0.3", None, torch.ones(2), True):
        with pytest.raises(UsageError, match=r"Best\.update"):
            best.update(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, "0.1", None, True])
def test_a_min_delta_that_cannot_be(value: Any) -> None:
    with pytest.raises(SettingError, match="min_delta="):
        paceline.Best(min_delta=value)


@pytest.mark.parametrize("value", [-1, 0, 1.5, True])
def test_a_patience_that_cannot_be(value: Any) -> None:
    with pytest.raises(SettingError, match="patience="):
        paceline.Best(patience=value)


def own_loop(folder: Path, stop_at: int | None = None) -> tuple[list[bool], paceline.Best, nn.Module]:
    """A loop that keeps the 2 best checkpoints, and stops early. stop_at: it is killed before this epoch's update."""
    improved = []
    with started() as run:
        model = net()
        model, optimizer = run.prepare(model, adamw(model))
        best = paceline.Best(patience=3)
        run.track(best=best)
        loader = run.loader(TRAIN, global_batch=BATCH, shuffle=True)
        run.restore(folder, missing_ok=True)
        for epoch in run.epochs(8):
            for batch in loader:
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer)
            if epoch == stop_at:
                raise KeyboardInterrupt
            score = SCORES[epoch] if run.main else -99.0  # rank 0's counts
            improved.append(best.update(score))
            run.save(folder, keep=1, keep_best=2, score=SCORES[epoch])
            if best.stop:
                break
    return improved, best, model


@pytest.mark.ranks(1, conformance=2)
def test_in_a_loop_of_ones_own() -> None:
    with directory() as folder:
        improved, best, model = own_loop(folder)
        assert improved == [True, False, True, False, False, False]  # and the third in a row stops
        kept = sorted(path.name for path in folder.iterdir() if path.is_dir())
        assert kept == ["step-00000015", "step-00000025", "step-00000030"]  # 0.2, 0.2, and the newest
        assert [(one.score, one.step) for one in ranking(folder)] == [(0.2, 15), (0.2, 25)]
        assert [one.step for one in ranking(folder, "max")] == [15, 25]
    with directory() as folder:
        with pytest.raises(KeyboardInterrupt):
            own_loop(folder, stop_at=3)
        again, resumed, same = own_loop(folder)
        assert again == improved[3:]
        assert resumed.state_dict() == best.state_dict()
        equal(same, model)
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == kept


@pytest.mark.ranks(1, conformance=2)
def test_fit_keeps_the_best_checkpoints_on_resume_too() -> None:
    def train(folder: Path, *callbacks: paceline.Callback) -> paceline.History:
        current = [0.0]

        class Next(paceline.Callback):
            def on_epoch_start(self, fit: Any) -> None:
                current[0] = SCORES[fit.epoch]

        with started() as run:
            model = net()
            return paceline.fit(
                model, loss_fn, TRAIN, optimizer=adamw(model), global_batch=11, epochs=5, evaluate_on=TEST,
                metrics={"score": lambda outputs, batch: current[0]}, run=run, callbacks=[Next(), *callbacks],
                best=paceline.Best("val_score", mode="max"),
                checkpoints=paceline.Checkpoints(folder, keep=1, every=1, keep_best=2),
            )  # fmt: skip

    for stop in ((), (Stop("on_step", 7),)):
        with directory() as folder:
            if stop:
                with pytest.raises(KeyboardInterrupt):
                    train(folder, *stop)
            train(folder)
            found = paceline.Checkpoints(folder).ranking("max")
            assert [(one.score, one.step) for one in found][:2] == [(0.7, 4), (0.6, 8)], stop
            left = {path.name for path in folder.iterdir() if path.is_dir()}
            assert left == {found[0].path.name, found[1].path.name, "step-00000010-2"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_best": 2}, r"keep_best=2\): without keep="),
        ({"keep": 1, "keep_best": -1}, "keep_best=-1"),
        ({"keep": 1, "mode": "maximum"}, "mode='maximum'"),
        ({"keep": 1, "score": "0.3"}, "score='0.3'"),
    ],
)
def test_what_cannot_be_kept(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with started() as run:
        run.prepare(net())
        with pytest.raises(SettingError, match=message):
            run.save(tmp_path, **options)
    assert not list(tmp_path.iterdir())
    with pytest.raises(SettingError, match="keep_best=0"):
        paceline.Checkpoints(tmp_path, keep_best=0)
