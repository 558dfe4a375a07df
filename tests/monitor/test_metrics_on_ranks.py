"""What several ranks log, show and compute together, beside the plain computation over the whole data in float64.

A global batch of 5 leaves unequal shards, and the last one of 22 examples
leaves a third rank without any.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError
from paceline.monitor import exchange
from paceline.run import Run

EXAMPLES, BATCH, EVERY, EPOCHS = 22, 5, 3, 2
STEPS = math.ceil(EXAMPLES / BATCH)


def data(count: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(1, 6, (count,), generator=generator))


@contextmanager
def started(**settings: Any) -> Iterator[tuple[Run, Path]]:
    """A run with a log directory that all ranks name and rank 0 has."""
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world_group().broadcast(own))
        run = paceline.start(**{"log_dir": folder, "log_every": EVERY, "progress": "off", **settings})
        try:
            yield run, folder
        finally:
            run.close()
            world_group().barrier()


def lines(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 wrote, on every rank."""
    own = folder / "metrics.jsonl"
    return [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []


def model_of(run: Run, lr: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run.prepare(model, optimizer)
    return model, optimizer


def squared(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).square().mean()


def tokens(model: nn.Module, batch: list[Tensor]) -> paceline.Total:
    """Each example has as many tokens as its second entry says."""
    return paceline.Total((model(batch[0]).squeeze(1) * batch[1]).sum(), batch[1].sum())


def close_to(a: float, b: float) -> None:
    assert math.isclose(a, b, rel_tol=1e-12), (a, b)


@pytest.mark.ranks(2, full=3)
def test_logged_means_are_those_over_the_whole_batches() -> None:
    """Every third step, and at the end what remains: (mean over the examples of those steps), micro-batches or not."""
    x, counts = data().tensors
    torch.manual_seed(1)
    plain = nn.Linear(4, 1).double()
    with torch.no_grad():
        y = plain(x).squeeze(1)
    for micro in (None, 1):
        with started() as (run, folder):
            model, optimizer = model_of(run)
            loader = run.loader(data(), global_batch=BATCH, micro_batch=micro)
            for _ in run.epochs(EPOCHS):
                for batch in loader:
                    run.log(first=batch[0][:, 0].mean())  # before the step, and after it
                    loss = run.forward_backward(tokens, model, batch)
                    run.step(optimizer)
                    run.log({"tokens/loss": loss, "seven": 7})
            if run.main:
                batches = [slice(at, at + BATCH) for at in range(0, EXAMPLES, BATCH)] * EPOCHS
                written = lines(folder)
                assert [line["step"] for line in written] == [3, 6, 9, 10], written
                for line in written:
                    last = (line["step"] - 1) % EVERY + 1 if line["step"] == 10 else EVERY
                    picked = batches[line["step"] - last : line["step"]]
                    close_to(line["first"], float(torch.cat([x[p, 0] for p in picked]).mean()))
                    total = sum(float((y[p] * counts[p]).sum()) for p in picked)
                    close_to(line["tokens/loss"], total / sum(int(counts[p].sum()) for p in picked))
                    close_to(line["loss"], line["tokens/loss"])
                    assert (line["seven"], line["lr"]) == (7, 0.0)
                assert [line["epoch"] for line in written] == [0, 1, 1, 1]


@pytest.mark.ranks(2, full=3)
def test_several_losses_of_a_loop_add() -> None:
    x, counts = data().tensors
    with started() as (run, folder):
        model, optimizer = model_of(run)
        loader = run.loader(data(), global_batch=BATCH)
        with torch.no_grad():
            y = model(x).squeeze(1)
        for x0, n in loader:
            out = model(x0).squeeze(1)
            run.backward(out.square().mean())
            run.backward(total=(model(x0).squeeze(1) * n).sum(), count=n.sum())
            run.backward((model(x0).squeeze(1) * n).sum() / n.sum().clamp(min=1), count=n.sum())
            run.step(optimizer)
        run.close()
        if run.main:
            first = lines(folder)[0]
            p = slice(0, BATCH * EVERY)
            per_token = float((y[p] * counts[p]).sum() / counts[p].sum())
            close_to(first["loss"], float(y[p].square().mean()) + 2 * per_token)


@pytest.mark.ranks(2, full=3)
def test_what_an_evaluation_pass_logs_is_written_apart_from_the_steps_metrics() -> None:
    x = data().tensors[0]
    with started() as (run, folder):
        model, optimizer = model_of(run)
        train, test = run.loader(data(), global_batch=BATCH), run.loader(data(), global_batch=7, train=False)
        for batch in train:
            run.forward_backward(squared, model, batch)
            run.step(optimizer)
            if run.steps == 2:  # in the middle of a training epoch
                for images, _ in test:
                    run.log({"test/first": images[:, 0].mean()})
                run.log(rank=run.world.rank)
        run.log(done=1)
        run.close()
        if run.main:
            found = lines(folder)
            assert [line["step"] for line in found] == [2, 2, 3, 5, 5], found
            close_to(found[0]["test/first"], float(x[:, 0].mean()))
            close_to(found[1]["rank"], (run.world.size - 1) / 2)
            assert found[3]["done"] == 1
            assert "test/first" not in found[2]


@pytest.mark.ranks(2, full=3)
def test_ranks_that_log_other_names_are_told() -> None:
    """The mistake of everyone who comes from elsewhere: run.log under `if run.main`."""
    for settings in ({}, {"log_dir": None, "progress": "lines"}):
        with started(**settings) as (run, _):
            model, optimizer = model_of(run)
            loader = run.loader(data(), global_batch=BATCH)
            try:
                for batch in loader:
                    run.forward_backward(squared, model, batch)
                    run.step(optimizer)
                    if run.main:
                        run.log(accuracy=0.5)
                raise AssertionError("nobody complained")
            except UsageError as error:
                others = ", ".join(map(str, range(1, run.world.size)))
                assert f"rank 0: accuracy\n  rank {others}: (nothing)" in str(error), str(error)
    with started() as (run, _):
        try:
            run.log({f"of rank {run.world.rank}": 1})
            raise AssertionError("nobody complained")
        except UsageError as error:
            assert "rank 1: of rank 1" in str(error), str(error)


@pytest.mark.ranks(2, full=3)
def test_without_display_and_trackers_nothing_travels() -> None:
    def collectives_of(progress: str) -> int:
        with started(log_dir=None, progress=progress) as (run, _):
            model, optimizer = model_of(run)
            loader = run.loader(data(), global_batch=BATCH)
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
                for batch in loader:
                    run.forward_backward(squared, model, batch)
                    run.step(optimizer)
                    run.log(x=1.0)
                run.log(y=1.0)
                return calls.call_count

    assert collectives_of("off") == 0
    assert collectives_of("lines") >= 2, "or this test sees nothing"


@pytest.mark.ranks(2, full=3)
def test_ranks_never_disagree_about_when_to_exchange() -> None:
    """Each rank's own clock says something else."""
    with started(log_dir=None, progress="lines") as (run, _):
        model, optimizer = model_of(run)
        loader = run.loader(data(400), global_batch=BATCH)
        sent: list[int] = []
        with mock.patch.object(exchange.Exchange, "send", autospec=True, side_effect=exchange.Exchange.send) as send:
            for batch in loader:
                run.forward_backward(squared, model, batch)
                run.step(optimizer)
                time.sleep(0.004 * run.world.rank)
                sent.append(send.call_count)
        everyone = world_group().gather(sent)
        assert all(own == sent for own in everyone)
        # It takes less than a second here; a step would have to take half of one for more exchanges.
        assert 3 <= sent[-1] <= len(sent) // 2, f"{sent[-1]} exchanges in {len(sent)} steps"


@pytest.mark.ranks(2, full=3)
def test_a_look_at_a_batch_on_one_rank_disturbs_nobody() -> None:
    with started(progress="lines") as (run, _):
        model, optimizer = model_of(run)
        loader = run.loader(data(), global_batch=BATCH)
        if run.main:
            next(iter(loader))
        for batch in loader:
            run.forward_backward(squared, model, batch)
            run.step(optimizer)


@pytest.mark.ranks(2, full=3)
def test_a_log_directory_that_cannot_be_written_is_named_on_all_ranks() -> None:
    with tempfile.NamedTemporaryFile() as file:
        folder = world_group().broadcast(f"{file.name}/logs")
        try:
            paceline.start(log_dir=folder)
            raise AssertionError("it was taken")
        except SettingError as error:
            assert f"log_dir={folder!r}: rank 0 cannot write there" in str(error), str(error)
        world_group().barrier()


@pytest.mark.ranks(2, full=3)
def test_settings_that_differ_are_named_on_all_ranks() -> None:
    try:
        paceline.start(log_dir="logs" if world_group().rank else None)
        raise AssertionError("it was taken")
    except SettingError as error:
        assert "log_dir is set: False on rank 0, True on rank 1" in str(error), str(error)


@pytest.mark.ranks(2, full=3)
def test_a_users_own_tracker_hears_on_rank_0_only() -> None:
    class Heard:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def begin(self, config: Any, step: int) -> None:
            self.calls.append(("begin", config["global_batch"], config["processes"], step))

        def log(self, values: Any, step: int, epoch: int) -> None:
            self.calls.append((step, epoch, values["x"]))

        def close(self) -> None:
            self.calls.append("close")

    with started(log_dir=None) as (run, _):
        heard = Heard()
        run.add_tracker(heard)
        model, optimizer = model_of(run)
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(squared, model, batch)
            run.step(optimizer)
            run.log(x=run.steps)
        run.close()
        begun = ("begin", BATCH, run.world.size, 0)
        assert heard.calls == ([begun, (3, 0, 2.0), (5, 0, (4 * 5 + 5 * 2) / 7), "close"] if run.main else [])


# --- torchmetrics


def predictions(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(count, 3, generator=generator)
    return scores / scores.sum(1, keepdim=True), torch.randint(3, (count,), generator=generator)


def metrics_of_all_kinds() -> dict[str, Any]:
    import torchmetrics
    from torchmetrics import classification as c

    return {
        "accuracy": c.MulticlassAccuracy(3),
        "auroc": c.MulticlassAUROC(3),
        "binned auroc": c.MulticlassAUROC(3, thresholds=10),
        "mean": torchmetrics.MeanMetric(),
        "max": torchmetrics.MaxMetric(),
        "cat": torchmetrics.CatMetric(),
        "pearson": torchmetrics.PearsonCorrCoef(),
        "collection": torchmetrics.MetricCollection([c.MulticlassPrecision(3), c.MulticlassRecall(3)], prefix="of_"),
        "minmax": torchmetrics.MinMaxMetric(c.MulticlassAccuracy(3)),
    }


def update(name: str, metric: Any, scores: Tensor, labels: Tensor) -> None:
    if name in ("mean", "max", "cat"):
        metric.update(scores[:, 0])
    elif name == "pearson":
        metric.update(scores[:, 0], labels.float())
    else:
        metric.update(scores, labels)


@pytest.mark.ranks(conformance=2, full=3)
def test_torchmetrics_are_those_of_one_process() -> None:
    """Uneven parts, and a last rank that has none, where torchmetrics' own way ends the process (AUROC)."""
    warnings.simplefilter("ignore")
    count, size, rank = 23, world_group().size, world_group().rank
    scores, labels = predictions(count)
    bounds = [count * part // (size - 1) for part in range(size)] + [count]
    mine = slice(bounds[rank], bounds[rank + 1])
    with started(log_dir=None) as (run, _):
        for name, whole in metrics_of_all_kinds().items():
            update(name, whole, scores, labels)
            for part in whole.modules():
                part._to_sync = False  # else it gathers, as this is a world of several
            expected = whole.compute()
            metric = metrics_of_all_kinds()[name]
            if mine.stop > mine.start:
                update(name, metric, scores[mine], labels[mine])
            before = metric.state_dict() if not hasattr(metric, "metric_state") else dict(metric.metric_state)
            found = run.compute(metric)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
            after = metric.state_dict() if not hasattr(metric, "metric_state") else dict(metric.metric_state)
            torch.testing.assert_close(after, before)
            torch.testing.assert_close(run.compute(metric), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.ranks(2, full=3)
def test_torchmetrics_in_an_evaluation_loop_are_those_of_the_whole_data() -> None:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    scores, labels = predictions(EXAMPLES)
    with started(log_dir=None) as (run, _):
        found = {"accuracy": MulticlassAccuracy(3, average="micro"), "auroc": MulticlassAUROC(3)}
        for part, truth in run.loader(TensorDataset(scores, labels), global_batch=BATCH, train=False):
            found["auroc"].update(part, truth)
            if len(truth):  # accuracy cannot take a batch of none
                found["accuracy"].update(part, truth)
        right = float((scores.argmax(1) == labels).double().mean())
        close_to(round(float(run.compute(found["accuracy"])), 6), round(right, 6))
        whole = MulticlassAUROC(3)
        whole.update(scores, labels)
        torch.testing.assert_close(run.compute(found["auroc"]), whole.compute())
