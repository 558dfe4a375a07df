"""A global batch that grows by epochs, beside a plain loop over whole batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import TEST, TRAIN, N, X, Y, adamw, equal, loss_fn, near, net, started
from tests.fit.test_fit_on_ranks import Stop, directory
from torch import nn

import paceline
from paceline.data.randomness import permutation
from paceline.errors import SettingError

pytestmark = pytest.mark.timeout(240)
SCHEDULE = {0: 5, 1: 8, 3: 22}


def by_hand() -> nn.Module:
    model = net()
    optimizer = adamw(model)
    for epoch, size in enumerate((5, 8, 8, 22)):
        for rows in torch.from_numpy(permutation(N, 0, "train", epoch)).split(size):
            optimizer.zero_grad()
            loss_fn(model, [X[rows], Y[rows]]).backward()
            optimizer.step()
    return model


def fitted(**options: Any) -> tuple[nn.Module, paceline.History, int]:
    with started() as run:
        model = net()
        given: dict[str, Any] = {"global_batch": SCHEDULE, "epochs": 4, "run": run, "evaluate_on": TEST, **options}
        history = paceline.fit(model, loss_fn, TRAIN, optimizer=adamw(model), **given)
        return model, history, run.steps


@pytest.mark.ranks(conformance=(1, 2))
def test_the_weights_are_those_of_a_plain_loop() -> None:
    expected = by_hand()
    for options in ({}, {"micro_batch": 2}):
        model, history, steps = fitted(**options)
        near(model, expected)
        assert (history.epochs, steps) == (4, 5 + 3 + 3 + 1)
    _, history, _ = fitted(val_check_interval=0.5)
    assert [one["step"] for one in history.evaluations] == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.ranks(conformance=(1, 2))
def test_a_fit_that_was_stopped_goes_on_with_the_epochs_batch() -> None:
    expected, known, _ = fitted()

    def train(folder: Path, *callbacks: paceline.Callback) -> Any:
        return fitted(checkpoints=paceline.Checkpoints(folder, every=1), callbacks=callbacks)

    for step in (5, 7, 12):  # at an epoch's last step, in the middle of one, and in the last one
        with directory() as folder:
            with pytest.raises(KeyboardInterrupt):
                train(folder, Stop("on_step", step))
            model, history, _ = train(folder)
            equal(model, expected)
            assert history.history == known.history


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({1: 5}, "start at 0"),
        ({}, "start at 0"),
        ({0: 5, "2": 8}, "Its epochs are integers"),
        ({0: 5, 2: 0}, "global_batch=0"),
        ({0: 5, 2: 8.0}, r"global_batch=8\.0"),
    ],
)
def test_schedules_that_cannot_be(schedule: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        fitted(global_batch=schedule)


def test_a_loader_for_evaluation_takes_none() -> None:
    with started() as run, pytest.raises(SettingError, match="for evaluation has no epochs"):
        run.loader(TEST, global_batch=SCHEDULE, train=False)
