"""fit, evaluate and predict under other strategies, and what they refuse. Several processes: test_fit_on_ranks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import BATCH, EPOCHS, TEST, TRAIN, X, adamw, fitted, loss_fn, near, net, plainly, started
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import paceline
from paceline.errors import SettingError, UsageError


def test_under_data_parallel() -> None:
    expected, means = plainly(loss_fn)
    model, history = fitted(strategy="data_parallel:devices=cpu+cpu+cpu", evaluate_on=TEST)
    near(model, expected)
    near(torch.tensor(history["loss"]), torch.tensor(means))
    assert len(history["val_loss"]) == EPOCHS


def a_fit(run: paceline.Run | None = None, **options: Any) -> paceline.History:
    model = options.pop("model", None) or net()
    optimizer = options.pop("optimizer", None) or adamw(model)
    given: dict[str, Any] = {"optimizer": optimizer, "global_batch": BATCH, "epochs": 2, "run": run, **options}
    return paceline.fit(model, loss_fn, TRAIN, **given)


class Log(paceline.Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_start(self, fit: Any) -> None:
        self.events.append("start")

    def on_epoch_start(self, fit: Any) -> None:
        self.events.append(f"epoch {fit.epoch}")

    def on_step(self, fit: Any) -> None:
        assert fit.loss.dim() == 0
        assert not fit.loss.requires_grad
        self.events.append(f"step {fit.run.steps}")

    def on_evaluate(self, fit: Any) -> None:
        assert set(fit.values) == {"loss", "val_loss"}
        self.events.append("evaluate")

    def on_epoch_end(self, fit: Any) -> None:
        assert fit.history.epochs == fit.epoch + 1
        self.events.append("epoch end")

    def on_end(self, fit: Any) -> None:
        self.events.append("end")


def test_the_events_come_in_order() -> None:
    log = Log()
    with started() as run:
        history = a_fit(run, global_batch=11, evaluate_on=TEST, callbacks=[log])
    first, second = ([f"epoch {e}", f"step {2 * e + 1}", f"step {2 * e + 2}", "evaluate", "epoch end"] for e in (0, 1))
    assert log.events == ["start", *first, *second, "end"]
    assert [name for name in vars(paceline.Callback) if name.startswith("on_")] == [
        "on_start", "on_epoch_start", "on_step", "on_evaluate", "on_epoch_end", "on_end",
    ]  # fmt: skip
    assert list(history) == ["loss", "val_loss"]
    assert history.history == {"loss": history["loss"], "val_loss": history["val_loss"]}


def test_schedules_by_epoch_and_by_value() -> None:
    class Rates(paceline.Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_step(self, fit: Any) -> None:
            self.rates.append(fit.optimizer.param_groups[0]["lr"])

    for scheduler, expected in (
        (lambda o: paceline.PerEpoch(StepLR(o, 1, gamma=0.5)), [0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125]),
        (
            lambda o: ReduceLROnPlateau(o, patience=0, threshold_mode="abs", threshold=1e9),
            [0.05, 0.05, 0.05, 0.05, 0.005, 0.005],
        ),
    ):
        model, rates = net(), Rates()
        optimizer = adamw(model)
        with started() as run:
            a_fit(
                run,
                model=model,
                optimizer=optimizer,
                global_batch=11,
                epochs=3,
                scheduler=scheduler(optimizer),
                callbacks=[rates],
            )
        assert rates.rates == pytest.approx(expected)


def test_a_sampler_of_the_users_own_decides_the_order() -> None:
    seen: list[float] = []

    def noting(model: nn.Module, batch: list[Tensor]) -> Tensor:
        seen.extend(batch[0][:, 0].tolist())
        return loss_fn(model, batch)

    order = [*range(21, 0, -2), *range(0, 22, 2)]
    with started() as run:
        model = net()
        options: dict[str, Any] = {"optimizer": adamw(model), "global_batch": 4, "epochs": 1, "run": run}
        paceline.fit(model, noting, TRAIN, sampler=order, **options)
        assert seen == X[order, 0].tolist()
        seen.clear()
        batches = [order[:3], order[3:10], order[10:]]
        options["epochs"] = 2  # that of the first fit included
        paceline.fit(model, noting, TRAIN, batch_sampler=batches, name="second", evaluate_on=TEST, **options)
        assert seen[: len(order)] == X[order, 0].tolist()


def test_modes_of_the_model() -> None:
    model = net()
    model.eval()
    with started() as run:
        a_fit(run, model=model, evaluate_on=TEST)
        assert all(module.training for module in model.modules())
    model = net()
    model[1].eval()  # as a frozen batch norm
    with started() as run:
        a_fit(run, model=model, evaluate_on=TEST)
        assert [module.training for module in model] == [True, False, True, True]


def test_without_a_run_the_open_one_is_used_and_a_second_fit_begins_anew() -> None:
    model = net()
    optimizer = adamw(model)
    first = a_fit(model=model, optimizer=optimizer)
    scores = paceline.evaluate(model, loss_fn, TRAIN, global_batch=8)
    assert paceline.predict(model, TEST, global_batch=8).shape == (17, 3)
    second = a_fit(model=model, optimizer=optimizer)
    assert second["loss"][0] < first["loss"][1]
    assert second["loss"][1] < scores["loss"]
    with started(seed=5) as run:
        a_fit(model=model, optimizer=optimizer)
        assert run.steps == 10, "the run that the script started"
        with pytest.raises(UsageError, match=r"another training loader has this name. Use different names"):
            a_fit(model=model, optimizer=optimizer)


def test_evaluate_alone_starts_a_run() -> None:
    from paceline import session

    session._close_all()
    assert set(paceline.evaluate(net(), loss_fn, TEST, global_batch=8)) == {"loss"}
    session._close_all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, r"fit\(epochs=0\)"),
        ({"callback": []}, "no argument 'callback'. Did you mean 'callbacks'"),
        ({"batch_size": 4}, "use global_batch"),
        ({"scheduler": 3}, r"scheduler=int"),
        ({"best": "val_loss"}, r"pass best=paceline.Best"),
        ({"best": paceline.Best("val_loss")}, "Nothing is evaluated: pass evaluate_on"),
        (
            {"best": paceline.Best("val_acc"), "evaluate_on": TEST, "metrics": {"accuracy": max}},
            "Did you mean 'val_acc",
        ),
        ({"metrics": [max]}, "metrics: pass a dict"),
        ({"metrics": {"loss": max}}, 'the name "loss"'),
        ({"model": [net()], "optimizer": adamw(net())}, "one torch.nn.Module"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with started() as run, pytest.raises(SettingError, match=message):
        a_fit(run, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paceline.Best(mode="maximum"), "mode='maximum'"),
        (lambda: paceline.Best(patience=0), "patience=0"),
        (lambda: paceline.Checkpoints("x", keep=0), "keep=0"),
        (lambda: paceline.Checkpoints("x", every=1.5), "every=1.5"),  # type: ignore[arg-type]
    ],
)
def test_options_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make()


def test_metrics_and_results_that_cannot_be() -> None:
    with started() as run:
        model = run.prepare(net())
        with pytest.raises(UsageError, match="the metric 'm' returned a str"):
            paceline.evaluate(model, loss_fn, TEST, global_batch=4, metrics={"m": lambda o, b: "high"})
        with pytest.raises(UsageError, match="did not call model"):
            paceline.evaluate(
                model, lambda m, b: m[0](b[0]).mean(), TEST, global_batch=4, metrics={"m": lambda o, b: o}
            )
        assert model.training
        loader = run.loader(TRAIN, global_batch=4)
        with pytest.raises(SettingError, match="is for training"):
            paceline.evaluate(model, loss_fn, loader)
        for fn, told in (
            (lambda m, b: m(b[0]).mean(), r"has \(\) for a batch of 4"),
            (lambda m, b: {"p": m(b[0])[:2]}, r"result\['p'\] has \(2, 3\) for a batch of 4"),
            (lambda m, b: "high", "is a str"),
            (lambda m, b: None, "is a NoneType"),
        ):
            with pytest.raises(UsageError, match=told):
                run.predict(model, TEST, global_batch=4, fn=fn)
        with pytest.raises(SettingError, match="shuffle"):
            run.predict(model, TEST, global_batch=4, shuffle=True)


def test_a_checkpoint_directory_beside_a_best_model_is_one_to_restore(tmp_path: Path) -> None:
    with started() as run:
        history = a_fit(run, checkpoints=tmp_path, best=paceline.Best())
        assert history.best_path == tmp_path / "best.safetensors"
    with started() as run:
        assert a_fit(run, checkpoints=tmp_path, best=paceline.Best(), epochs=3).epochs == 3
        assert run.steps == 15


def test_a_step_of_fit_waits_no_more_than_a_step_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the device reads a number from a tensor: counted from the first step of an epoch to its last, as
    on a device whose tensors are not read at once."""
    monkeypatch.setattr("paceline.metrics.weighted_sum.readable", lambda tensor: False)
    reads: list[int] = []
    for name in ("item", "tolist", "__float__", "__bool__"):
        own = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, own=own: reads.append(1) or own(self))

    class Count(paceline.Callback):
        def on_step(self, fit: Any) -> None:
            if fit.run.steps == 1:
                reads.clear()
            self.found = len(reads)

    count = Count()
    with started() as run:
        a_fit(run, epochs=1, callbacks=[count])
    with started() as run:
        model = net()
        model, optimizer = run.prepare(model, adamw(model))
        for batch in run.loader(TRAIN, global_batch=BATCH, shuffle=True):
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer)
            if run.steps == 1:
                reads.clear()
            by_hand = len(reads)
    assert count.found == by_hand
