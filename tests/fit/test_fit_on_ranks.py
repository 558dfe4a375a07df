"""fit, evaluate and predict beside plain PyTorch loops over the whole data: on one process and on several."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.fit.problem import (
    BATCH,
    EPOCHS,
    TEST,
    TEST_X,
    TEST_Y,
    TRAIN,
    X,
    adamw,
    equal,
    fitted,
    loss_fn,
    near,
    net,
    plainly,
    started,
    weighted,
)
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ReduceLROnPlateau
from torch.utils.data import Dataset, IterableDataset
from torchmetrics.classification import MulticlassAccuracy

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import UsageError

pytestmark = pytest.mark.timeout(240)

SCORES = [0.5, 0.7, 0.7, 0.6, float("nan"), 0.9, 0.2]


@contextmanager
def directory() -> Iterator[Path]:
    """One folder for all ranks."""
    name = world_group().broadcast(tempfile.mkdtemp())
    try:
        yield Path(name)
    finally:
        world_group().barrier()
        if world_group().rank == 0:
            shutil.rmtree(name)


@pytest.mark.ranks(1, conformance=(2, 3))
def test_the_weights_and_losses_of_fit_are_those_of_a_plain_loop() -> None:
    for loss in (loss_fn, weighted):
        expected, means = plainly(loss)
        for micro_batch in (None, 2):
            model, history = fitted(loss, micro_batch=micro_batch)
            near(model, expected)
            near(torch.tensor(history["loss"]), torch.tensor(means))


@pytest.mark.ranks(1, conformance=3)
def test_evaluate_counts_each_example_once() -> None:
    model = net(dropout=0.5)
    model[1].eval()
    with torch.no_grad():
        outputs = copy.deepcopy(model).eval()(TEST_X)
    right = outputs.argmax(1) == TEST_Y
    seen = []

    def top_1(outputs: Tensor, batch: list[Tensor]) -> Tensor:
        seen.append(len(batch[1]))
        return outputs.argmax(1) == batch[1]

    metrics = {
        "accuracy": top_1,
        "accuracy of class 0": lambda out, b: paceline.Total(
            (out.argmax(1) == b[1])[b[1] == 0].sum(), (b[1] == 0).sum()
        ),
        "mean": lambda out, b: out.double().mean(),
        "three": lambda out, b: 3,
        "top 2": MulticlassAccuracy(3, top_k=2, average="micro"),
    }
    with started() as run:
        run.prepare(model)
        for options in ({}, {"micro_batch": 1}):
            seen.clear()
            found = paceline.evaluate(model, loss_fn, TEST, global_batch=5, metrics=metrics, **options)
            assert run.sum(sum(seen)) == len(TEST)
            assert found["accuracy"] == right.sum().item() / len(TEST)
            assert found["accuracy of class 0"] == right[TEST_Y == 0].sum().item() / (TEST_Y == 0).sum().item()
            assert found["three"] == 3.0
            best_two = (outputs.topk(2).indices == TEST_Y[:, None]).any(1)
            assert found["top 2"] == (best_two.sum() / len(TEST)).item()
            assert list(found) == ["loss", *metrics]
            near(torch.tensor(found["mean"]), outputs.mean().to(torch.float32), 1e-6)
            near(torch.tensor(found["loss"]).double(), F.cross_entropy(outputs, TEST_Y), 1e-7)
        by_count = paceline.evaluate(model, weighted, TEST, global_batch=5)
        total = weighted(lambda _: outputs, [TEST_X, TEST_Y])
        near(torch.tensor(by_count["loss"], dtype=torch.float64), total.sum / total.count)
        own = run.loader(TEST, global_batch=4, train=False)
        assert paceline.evaluate(model, loss_fn, own, metrics=metrics)["accuracy"] == found["accuracy"]
    assert [module.training for module in model] == [True, False, True, True]
    assert torch.is_grad_enabled()


class Words(Dataset[Tensor]):
    """Sequences of unequal length."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index % 4 + 1,), float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


@pytest.mark.ranks(1, conformance=3)
def test_predict_gives_each_result_once_and_in_order() -> None:
    model = net(dropout=0.5)
    expected = copy.deepcopy(model).eval()(TEST_X).detach()
    with started() as run:
        run.prepare(model)
        for options in ({"global_batch": 5}, {"global_batch": 7, "micro_batch": 2}, {"global_batch": 100}):
            near(run.predict(model, TEST, **options), expected)
        assert not run.predict(model, TEST, global_batch=5).requires_grad
        near(run.predict(model, Stream(), global_batch=4), copy.deepcopy(model).eval()(X))
        both = run.predict(
            model,
            TEST,
            global_batch=5,
            fn=lambda model, b: {
                "class": (model(b[0]).argmax(1), b[1].bool()),
                "name": [f"{x:.3f}" for x in b[0][:, 0]],
            },
        )
        assert both["class"][0].equal(expected.argmax(1))
        assert both["class"][1].equal(TEST_Y.bool())
        assert both["name"] == [f"{x:.3f}" for x in TEST_X[:, 0]]
        rows = run.predict(nn.Identity(), Words(), global_batch=4, collate_fn=list, fn=lambda _, b: [w * 2 for w in b])
        assert [row.tolist() for row in rows] == [[2.0 * i] * (i % 4 + 1) for i in range(11)]
        padded = run.predict(
            nn.Identity(),
            Words(),
            global_batch=4,
            collate_fn=lambda words: nn.utils.rnn.pad_sequence(words, batch_first=True),
        )
        assert isinstance(padded, list)
        assert [row[: i % 4 + 1].tolist() for i, row in enumerate(padded)] == [
            [float(i)] * (i % 4 + 1) for i in range(11)
        ]
        with pytest.raises(UsageError, match=r"run\.predict: the data set has no examples"):
            run.predict(model, TEST_X[:0], global_batch=4)
    assert model.training


class Keep(paceline.Callback):
    """The weights after each epoch, and a script for the metric."""

    def __init__(self) -> None:
        self.epoch, self.weights = 0, list[nn.Module]()

    def on_epoch_start(self, fit: Any) -> None:
        self.epoch = fit.epoch

    def on_epoch_end(self, fit: Any) -> None:
        self.weights.append(copy.deepcopy(fit.model))

    def score(self, outputs: Tensor, batch: list[Tensor]) -> float:
        return SCORES[self.epoch]


@pytest.mark.ranks(1, conformance=3)
def test_the_best_model_is_kept_and_training_stops_early() -> None:
    for patience, epochs in ((2, 4), (3, 5), (4, 7), (None, 7)):
        with directory() as folder, started() as run:
            model, keep = net(), Keep()
            history = paceline.fit(
                model,
                loss_fn,
                TRAIN,
                optimizer=adamw(model),
                global_batch=BATCH,
                epochs=7,
                evaluate_on=TEST,
                metrics={"score": keep.score},
                best=paceline.Best("val_score", "max", patience, folder / "best.safetensors"),
                callbacks=[keep],
                run=run,
            )
            best = 5 if epochs == 7 else 1
            assert (history.epochs, history.best_epoch) == (epochs, best), (patience, history)
            assert history.best_value == history["val_score"][best]
            assert history.stopped_early == (patience is not None and patience < 4)
            assert history.best_path == folder / "best.safetensors"
            world_group().barrier()
            saved = net()
            saved.load_state_dict(load_file(history.best_path))
            equal(saved, keep.weights[best])


class Stop(paceline.Callback):
    """As a run that is killed at an event."""

    def __init__(self, event: str, step: int) -> None:
        def stop(fit: Any) -> None:
            if fit.run.steps == step:
                raise KeyboardInterrupt

        setattr(self, event, stop)


@pytest.mark.ranks(1, conformance=3)
def test_a_fit_that_was_stopped_goes_on_with_the_same_bits() -> None:
    """15 steps, 5 in an epoch, a checkpoint every 2; stopped in an epoch, and between a mid-epoch checkpoint at its
    last step and its end."""

    def train(folder: Path, schedule: str, callbacks: Any = ()) -> tuple[nn.Module, paceline.History]:
        with started(seed=4) as run:
            model = net(dropout=0.2)
            optimizer = adamw(model)
            scheduler: Any = {
                "step": lambda: paceline.warmup(optimizer, 4, then=CosineAnnealingLR(optimizer, 11)),
                "plateau": lambda: ReduceLROnPlateau(optimizer, patience=0, threshold_mode="abs", threshold=1e9),
            }[schedule]()
            history = paceline.fit(
                model,
                loss_fn,
                TRAIN,
                optimizer=optimizer,
                global_batch=BATCH,
                epochs=EPOCHS,
                scheduler=scheduler,
                evaluate_on=TEST,
                checkpoints=paceline.Checkpoints(folder, every=2),
                best=paceline.Best(),
                callbacks=callbacks,
                run=run,
            )
            return model, history

    for schedule in ("step", "plateau"):
        with directory() as whole:
            expected, known = train(whole, schedule)
        for event, step in (("on_step", 8), ("on_evaluate", 10)) if schedule == "step" else (("on_step", 8),):
            with directory() as folder:
                try:
                    train(folder, schedule, [Stop(event, step)])
                except KeyboardInterrupt:
                    pass
                else:
                    raise AssertionError("it was not stopped")
                model, history = train(folder, schedule)
                equal(model, expected)
                assert history.history == known.history
                assert (history.best_epoch, history.best_value) == (known.best_epoch, known.best_value)
                if event == "on_evaluate":  # and once more, when nothing is left to do
                    again, complete = train(folder, schedule)
                    equal(again, expected)
                    assert complete.history == known.history


@pytest.mark.ranks(1, conformance=3)
def test_one_process_may_stop_all() -> None:
    class Ask(paceline.Callback):
        def on_step(self, fit: Any) -> None:
            if fit.run.world.rank == fit.run.world.size - 1 and fit.epoch == 1:
                fit.stop()

    assert fitted(callbacks=[Ask()])[1].epochs == 2


@pytest.mark.ranks(conformance=2)
def test_a_fit_in_a_pipeline_is_that_of_a_plain_loop() -> None:
    expected, means = plainly(loss_fn)
    model, history = fitted(strategy="pipeline", micro_batch=2, evaluate_on=TEST)
    near(model, expected)
    near(torch.tensor(history["loss"]), torch.tensor(means))
    assert len(history["val_loss"]) == EPOCHS
