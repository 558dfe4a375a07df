"""EMA and SWA beside torch.optim.swa_utils in plain loops over whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fit.problem import BATCH, TEST, TEST_X, TEST_Y, TRAIN, N, X, Y, adamw, equal, loss_fn, near, net, started
from tests.fit.test_fit_on_ranks import Stop, directory
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

import paceline
from paceline.comm import same_bits
from paceline.comm.mesh import world_group
from paceline.data.randomness import permutation
from paceline.errors import SettingError

pytestmark = pytest.mark.timeout(240)
EPOCHS = 4


def normed() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()


def schedule(optimizer: Any) -> Any:
    """A constant rate, and from epoch 2 on SWALR's: as torch's page on SWA does it."""
    parts = [ConstantLR(optimizer, 1.0), SWALR(optimizer, swa_lr=0.01, anneal_epochs=1)]
    return SequentialLR(optimizer, parts, milestones=[2])


def by_hand(kind: str) -> tuple[nn.Module, nn.Module, list[float]]:
    """The trained model, the averaged one, and the loss of the latter over the test data after each epoch."""
    model = net() if kind == "EMA" else normed()
    optimizer = adamw(model)
    rate = schedule(optimizer) if kind == "SWA" else None
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if kind == "EMA" else AveragedModel(model)
    losses = []
    for epoch in range(EPOCHS):
        for rows in torch.from_numpy(permutation(N, 0, "train", epoch)).split(BATCH):
            optimizer.zero_grad()
            loss_fn(model, [X[rows], Y[rows]]).backward()
            optimizer.step()
            if kind == "EMA":
                averaged.update_parameters(model)
        if rate is not None and epoch >= 2:
            averaged.update_parameters(model)
            update_bn([X[rows] for rows in torch.arange(N).split(BATCH)], averaged)
        if rate is not None:
            rate.step()
        judged = averaged if kind == "EMA" or epoch >= 2 else model
        with torch.no_grad():
            judged.eval()
            losses.append(loss_fn(judged, [TEST_X, TEST_Y]).item())
            judged.train()
    return model, averaged.module, losses


class Seen(paceline.Callback):
    """The trained weights when the last epoch ends, and the final ones."""

    def on_epoch_end(self, fit: Any) -> None:
        self.trained = [whole(p) for p in fit.model.parameters()]

    def on_end(self, fit: Any) -> None:
        self.final = [whole(p) for p in fit.model.parameters()]


def whole(parameter: Any) -> torch.Tensor:
    found = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return found.detach().clone()


def fitted(
    kind: str,
    folder: Path | None = None,
    *,
    model: nn.Module | None = None,
    strategy: str | None = None,
    batch_norm: str = "global",
    callbacks: Sequence[paceline.Callback] = (),
    **options: Any,
) -> tuple[nn.Module, paceline.History, Seen]:
    own, seen = (paceline.EMA(decay=0.8) if kind == "EMA" else paceline.SWA(start_epoch=2)), Seen()
    with started(strategy=strategy, batch_norm=batch_norm) as run:
        if model is None:
            model = net() if kind == "EMA" else normed()
        optimizer = adamw(model)
        history = paceline.fit(
            model, loss_fn, TRAIN, optimizer=optimizer, epochs=EPOCHS, evaluate_on=TEST, run=run,
            scheduler=paceline.PerEpoch(schedule(optimizer)) if kind == "SWA" else None, checkpoints=folder,
            callbacks=[own, seen, *callbacks], **{"global_batch": BATCH, **options},
        )  # fmt: skip
        return model, history, seen


def check(kind: str, **options: Any) -> None:
    trained, averaged, losses = by_hand(kind)
    _, history, seen = fitted(kind, **options)
    near(torch.tensor(history["val_loss"]), torch.tensor(losses), 1e-6)
    for own, wanted in zip(seen.trained, trained.parameters(), strict=True):
        near(own, wanted.detach(), 1e-7)
    for own, wanted in zip(seen.final, averaged.parameters(), strict=True):
        near(own, wanted.detach(), 1e-7)


@pytest.mark.ranks(1, conformance=2)
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
def test_the_average_is_that_of_torch(kind: str) -> None:
    check(kind)


@pytest.mark.ranks(1, conformance=2)
def test_the_statistics_of_batch_norm_are_those_of_the_average() -> None:
    _, averaged, _ = by_hand("SWA")
    model, _, _ = fitted("SWA")
    for own, wanted in zip(model.buffers(), averaged.buffers(), strict=True):
        near(own.double(), wanted.double(), 1e-6)  # AdamW makes steps of the rounding of a bias before the norm
    assert model[1].momentum == 0.1


def norm_first(*rest: nn.Module) -> nn.Sequential:
    """Batch norm comes first, so that its statistics are those of the data, whatever the weights are. Each example has
    three values for a channel: enough where a shard has one example."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), *rest, nn.Flatten(), nn.Linear(6, 3)).double()


def statistics(batches: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) of each channel, means over these batches: by torch's update_bn."""
    model = norm_first()
    update_bn(batches, model)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def assert_statistics(model: Any, batches: Sequence[torch.Tensor]) -> None:
    for own, wanted in zip((model[1].running_mean, model[1].running_var), statistics(batches), strict=True):
        near(own, wanted)


@pytest.mark.ranks(2, conformance=3)
@pytest.mark.parametrize("strategy", ["ddp", "local_sgd:every=3"])
def test_statistics_over_shards_are_means_over_those_of_all_replicas(strategy: str) -> None:
    """The last global batch has one example, so that all shards but one are empty."""
    model, history, _ = fitted("SWA", model=norm_first(), strategy=strategy, batch_norm="shard", global_batch=7)
    ranks = world_group().size
    cut = [part for rows in torch.arange(N).split(7) for part in rows.tensor_split(ranks) if len(part)]
    assert_statistics(model, [X[part] for part in cut])
    with torch.no_grad():
        assert history["val_loss"][-1] == pytest.approx(loss_fn(model.eval(), [TEST_X, TEST_Y]).item(), rel=1e-6)


FEW = range(3, 17)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        pytest.param({"drop_last": True}, [range(7), range(7, 14), range(14, 21)], id="drop_last"),
        pytest.param({"sampler": list(FEW)}, [FEW[:7], FEW[7:]], id="sampler"),
        pytest.param({"batch_sampler": [list(FEW[:10]), list(FEW[10:])]}, [FEW[:10], FEW[10:]], id="batch_sampler"),
        pytest.param({"limit_train_batches": 2}, [range(7), range(7, 14)], id="limit"),
    ],
)
def test_the_statistics_are_those_of_what_an_epoch_trains_on(options: dict[str, Any], batches: list[range]) -> None:
    model, _, _ = fitted("SWA", model=norm_first(), global_batch=7, **options)
    assert_statistics(model, [X[list(rows)] for rows in batches])


def test_frozen_batch_norms_and_other_modules_keep_their_buffers() -> None:
    """When the statistics of the average are computed, training is not disturbed."""
    frozen, instance = nn.BatchNorm1d(2), nn.InstanceNorm1d(2, track_running_stats=True)
    model = norm_first(instance, frozen)
    frozen.eval()
    before = [buffer.clone() for buffer in frozen.buffers()]
    trained = []

    class Trained(paceline.Callback):
        def on_step(self, fit: Any) -> None:
            trained[:] = [buffer.clone() for buffer in instance.buffers()]

    fitted("SWA", model=model, callbacks=[Trained()])
    for own, wanted in zip((*frozen.buffers(), *instance.buffers()), (*before, *trained), strict=True):
        assert torch.equal(own, wanted)


@pytest.mark.ranks(conformance=2)
@pytest.mark.parametrize("strategy", ["shared", "fsdp", "fsdp:stage=1", "fsdp:stage=2"])
def test_under_strategies_with_slices(strategy: str) -> None:
    check("EMA", strategy=strategy)
    check("SWA", strategy=strategy)


@pytest.mark.conformance
@pytest.mark.parametrize("strategy", ["mirrored", "data_parallel", "central_storage"])
def test_under_strategies_of_one_process(strategy: str) -> None:
    check("EMA", strategy=f"{strategy}:devices=cpu+cpu")


@pytest.mark.ranks(conformance=(1, 2))
def test_a_stopped_fit_goes_on_with_its_average() -> None:
    stopped(None)


@pytest.mark.ranks(conformance=2)
def test_a_stopped_fit_under_fsdp_goes_on_with_its_average() -> None:
    stopped("fsdp")


@pytest.mark.ranks(1)
def test_dropout_before_a_batch_norm_draws_the_same_in_a_fit_that_was_stopped() -> None:
    """When the statistics of the average are computed, too."""

    def dropped() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Dropout(0.5), *normed())

    stopped(None, dropped)


def stopped(strategy: str | None, made: Callable[[], nn.Module | None] = lambda: None) -> None:
    for kind in ("EMA", "SWA"):
        _, known, expected = fitted(kind, model=made(), strategy=strategy)
        with directory() as folder:
            options: dict[str, Any] = {"strategy": strategy, "best": paceline.Best()}
            checkpoints: Any = paceline.Checkpoints(folder, every=2)
            with pytest.raises(KeyboardInterrupt):
                fitted(kind, checkpoints, model=made(), callbacks=[Stop("on_step", 17)], **options)
            _, history, seen = fitted(kind, checkpoints, model=made(), **options)
            assert history["val_loss"] == known["val_loss"]
            for own, wanted in zip(seen.final, expected.final, strict=True):
                assert torch.equal(own, wanted)


@pytest.mark.ranks(1, conformance=2)
def test_the_best_model_has_the_average() -> None:
    with directory() as folder:
        model, history, _ = fitted("EMA", best=paceline.Best(mode="max", path=folder / "best.safetensors"))
        saved = net()
        saved.load_state_dict(load_file(str(history.best_path)))
        with torch.no_grad():
            loss = loss_fn(saved, [TEST_X, TEST_Y]).item()
        assert loss == pytest.approx(history.best_value, rel=1e-6)
        if history.best_epoch == EPOCHS - 1:
            equal(saved, model)


class Alike(paceline.Callback):
    """Whether all replicas have the same buffers at the ends of the epochs, when they have just been evaluated."""

    def on_start(self, fit: Any) -> None:
        self.unlike: list[str] = []

    def on_epoch_end(self, fit: Any) -> None:
        self.unlike += same_bits.digest_mismatch(fit.model.named_buffers(), world_group())


@pytest.mark.ranks(2, conformance=3)
@pytest.mark.parametrize("kind", ["EMA", "SWA"])
@pytest.mark.parametrize("strategy", ["local_sgd:every=3", "diloco:every=3"])
def test_independent_replicas_have_the_mean_of_their_averages(strategy: str, kind: str) -> None:
    """Which tests/state/test_ema.py compares with that of one model. Each shard has several examples: batch norm cannot
    train on one."""
    alike = Alike()
    model, history, _ = fitted(kind, strategy=strategy, global_batch=11, callbacks=[alike])
    assert not alike.unlike
    assert not same_bits.digest_mismatch([*model.named_parameters(), *model.named_buffers()], world_group())
    with torch.no_grad():
        assert history["val_loss"][-1] == pytest.approx(loss_fn(model.eval(), [TEST_X, TEST_Y]).item(), rel=1e-6)


@pytest.mark.ranks(conformance=2)
def test_under_a_pipeline() -> None:
    check("EMA", strategy="pipeline")


@pytest.mark.parametrize("value", [1, 1.0, -0.1, "0.9", True])
def test_a_decay_that_cannot_be(value: Any) -> None:
    with pytest.raises(SettingError, match="decay="):
        paceline.EMA(value)


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_a_start_that_cannot_be(value: Any) -> None:
    with pytest.raises(SettingError, match="start_epoch="):
        paceline.SWA(value)
