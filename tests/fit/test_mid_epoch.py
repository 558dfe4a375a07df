"""Evaluation in mid-epoch, epochs cut short, dry runs: beside plain loops over the whole data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import (
    BATCH,
    EPOCHS,
    TEST,
    TEST_X,
    TEST_Y,
    TRAIN,
    N,
    X,
    Y,
    adamw,
    equal,
    loss_fn,
    near,
    net,
    started,
)
from tests.fit.test_fit_on_ranks import Stop, directory
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import paceline
from paceline.data.randomness import permutation
from paceline.errors import SettingError
from paceline.state.folder_lock import FILE

pytestmark = pytest.mark.timeout(240)
STEPS = 5  # of an epoch


def by_hand(steps: int = STEPS, epochs: int = EPOCHS) -> tuple[nn.Module, dict[int, float]]:
    """The weights after so many steps of each epoch, and the loss over the test data after each step."""
    model = net()
    optimizer = adamw(model)
    scores = {}
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(N, 0, "train", epoch))
        for rows in order.split(BATCH)[:steps]:
            optimizer.zero_grad()
            loss_fn(model, [X[rows], Y[rows]]).backward()
            optimizer.step()
            with torch.no_grad():
                scores[len(scores) + 1] = loss_fn(model, [TEST_X, TEST_Y]).item()
    return model, scores


def a_fit(**options: Any) -> tuple[nn.Module, paceline.History]:
    strategy = options.pop("strategy", None)
    with started(strategy=strategy) as run:
        model = net()
        given: dict[str, Any] = {"global_batch": BATCH, "epochs": EPOCHS, "evaluate_on": TEST, "run": run, **options}
        return model, paceline.fit(model, loss_fn, TRAIN, optimizer=adamw(model), **given)


def steps_of(history: paceline.History) -> list[int]:
    return [int(one["step"]) for one in history.evaluations]


@pytest.mark.ranks(1, conformance=2)
def test_evaluations_come_after_so_many_steps_and_disturb_nothing() -> None:
    expected, scores = by_hand()
    for interval, due in (
        (None, [5, 10, 15]),
        (2, [2, 4, 5, 6, 8, 10, 12, 14, 15]),  # by the steps of the run
        (7, [5, 7, 10, 14, 15]),  # longer than an epoch
        (0.5, [2, 4, 5, 7, 9, 10, 12, 14, 15]),  # by the steps of the epoch: 2 of its 5
        (1.0, [5, 10, 15]),
    ):
        model, history = a_fit(val_check_interval=interval)
        near(model, expected)
        assert steps_of(history) == due, interval
        found = [one["val_loss"] for one in history.evaluations]
        near(torch.tensor(found), torch.tensor([scores[step] for step in due]), 1e-6)
        assert history["val_loss"] == [one["val_loss"] for one in history.evaluations if one["step"] in (5, 10, 15)]


def under(strategy: str) -> None:
    _, scores = by_hand(3)
    _, history = a_fit(val_check_interval=2, limit_train_batches=3, strategy=strategy)
    due = [2, 3, 4, 6, 8, 9]
    assert steps_of(history) == due
    found = [one["val_loss"] for one in history.evaluations]
    near(torch.tensor(found), torch.tensor([scores[step] for step in due]), 1e-6)


@pytest.mark.ranks(conformance=2)
def test_under_fsdp() -> None:
    under("fsdp")


@pytest.mark.conformance
def test_under_mirrored() -> None:
    under("mirrored:devices=cpu+cpu")


@pytest.mark.ranks(conformance=(1, 2))
def test_epochs_and_evaluations_cut_short() -> None:
    for limit, steps in ((2, 2), (0.7, 3), (1.0, 5), (99, 5)):
        model, _ = a_fit(limit_train_batches=limit)
        near(model, by_hand(steps)[0])
    _, history = a_fit(limit_val_batches=2, epochs=1)
    expected = by_hand(epochs=1)[0]
    with torch.no_grad():
        near(
            torch.tensor(history["val_loss"]),
            loss_fn(expected, [TEST_X[: 2 * BATCH], TEST_Y[: 2 * BATCH]]).float()[None],
            1e-6,
        )


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Any:
        for row in zip(X, Y, strict=True):
            self.read += 1
            yield row


@pytest.mark.ranks(1, conformance=2)
def test_a_stream_is_read_no_further_than_its_limit() -> None:
    stream = Stream()
    with started() as run:
        loader = run.loader(stream, global_batch=4, limit_batches=2, train=False)
        seen = run.gather([x for batch in loader for x in batch[0][:, 0].tolist()])
        assert sorted(seen) == sorted(X[:8, 0].tolist())
        assert stream.read == 8
        with pytest.raises(SettingError, match=r"no length\. Pass a number: limit_batches=100"):
            run.loader(stream, global_batch=4, limit_batches=0.5)


@pytest.mark.ranks(conformance=(1, 2))
def test_a_fit_stopped_between_evaluations_goes_on_with_the_same_bits() -> None:
    """Evaluated every 2 steps of 4 in an epoch, a checkpoint after each third; killed at several places."""

    def train(folder: Path, *callbacks: paceline.Callback) -> tuple[nn.Module, paceline.History]:
        return a_fit(
            val_check_interval=2,
            limit_train_batches=4,
            checkpoints=paceline.Checkpoints(folder, every=3),
            best=paceline.Best(min_delta=0.02, patience=3),
            callbacks=callbacks,
        )

    with directory() as whole:
        expected, known = train(whole)
    for event, step in (("on_step", 8), ("on_evaluate", 6), ("on_epoch_end", 8)):
        with directory() as folder:
            with pytest.raises(KeyboardInterrupt):
                train(folder, Stop(event, step))
            model, history = train(folder)
            equal(model, expected)
            assert history.state_dict() == known.state_dict()


@pytest.mark.ranks(1, conformance=2)
def test_patience_counts_evaluations_and_ends_in_mid_epoch() -> None:
    class Weights(paceline.Callback):
        def __init__(self) -> None:
            self.after: dict[int, nn.Module] = {}

        def on_evaluate(self, fit: Any) -> None:
            self.after[fit.run.steps] = copy.deepcopy(fit.model)

    weights = Weights()
    scores = iter([0.5, 0.3, 0.29, 0.31, 0.1])

    def score(outputs: Any, batch: Any) -> Any:
        return current[0]

    class Next(paceline.Callback):
        def on_step(self, fit: Any) -> None:
            if fit.run.steps % 2 == 0 or fit.run.steps % STEPS == 0:
                current[0] = next(scores)

    current = [0.0]
    best = paceline.Best("val_score", patience=2, min_delta=0.05)
    model, history = a_fit(val_check_interval=2, metrics={"score": score}, best=best, callbacks=[Next(), weights])
    # 2: 0.5, 4: 0.3, 5: 0.29 (not better by 0.05), 6: 0.31, and that is the second in a row
    assert steps_of(history) == [2, 4, 5, 6]
    assert (history.best_step, history.best_epoch, history.best_value) == (4, 0, 0.3)
    assert history.stopped_early
    assert best.stop
    assert history.epochs == 2
    equal(model, weights.after[6])


@pytest.mark.ranks(1, conformance=2)
def test_a_dry_run_leaves_nothing_behind() -> None:
    with directory() as folder:
        a_fit(checkpoints=folder, epochs=1)
        before = files_of(folder)
        for few, steps in ((True, 1), (3, 3)):
            model, history = a_fit(checkpoints=folder, best=paceline.Best(), fast_dev_run=few, val_check_interval=1)
            near(model, by_hand(steps, 1)[0])
            assert (history.epochs, steps_of(history), history.best_path) == (1, [steps], None)
        assert files_of(folder) == before


def files_of(folder: Path) -> list[str]:
    """Without the lock, which rank 0 may hold now."""
    return sorted(path.name for path in folder.rglob("*") if path.name != FILE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 0}, "val_check_interval=0"),
        ({"val_check_interval": -2}, "val_check_interval=-2"),
        ({"val_check_interval": 1.5}, "val_check_interval=1.5"),
        ({"val_check_interval": True}, "val_check_interval=True"),
        ({"val_check_interval": 2, "evaluate_on": None}, "Pass evaluate_on"),
        ({"limit_train_batches": 0}, "limit_train_batches=0"),
        ({"limit_val_batches": 2.0}, "limit_val_batches=2.0"),
        ({"limit_val_batches": 0.01}, "this fraction of 4 global batches is less than one"),
        ({"limit_batches": 2}, "Did you mean 'limit_val_batches'|Did you mean 'limit_train_batches'"),
        ({"fast_dev_run": 0}, "fast_dev_run=0"),
        ({"fast_dev_run": "yes"}, "fast_dev_run='yes'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        a_fit(**options)


def test_a_loader_is_not_cut_short_from_outside() -> None:
    with started() as run:
        model = net()
        test = run.loader(TensorDataset(TEST_X, TEST_Y), global_batch=4, train=False)
        with pytest.raises(SettingError, match="limit_val_batches or fast_dev_run"):
            paceline.fit(
                model, loss_fn, TRAIN, optimizer=adamw(model), global_batch=4, epochs=1, evaluate_on=test,
                fast_dev_run=True, run=run,
            )  # fmt: skip
