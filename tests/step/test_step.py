"""The step in one process: against plain PyTorch, and what it refuses."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies.checks import started
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, TensorDataset

import paceline
from paceline.errors import (
    ModelError,
    NonFiniteError,
    SettingError,
    UsageError,
    WorldError,
)

X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
DATA = TensorDataset(X, Y)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[paceline.Run]:
    made = paceline.start(device="cpu", **getattr(request, "param", {}))
    yield made
    made.close()


def prepared(run: paceline.Run, **loader: Any) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = build()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model, optimizer, run.loader(DATA, **({"global_batch": 8} | loader))


# --- gradients


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_grad_is_the_final_mean_after_the_last_backward(run: paceline.Run, micro_batch: int | None) -> None:
    model, optimizer, loader = prepared(run, micro_batch=micro_batch)
    plain = build()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        request = loader.current
        if request.final:
            rows = slice(8 * request.step, 8 * request.step + request.total)
            plain.load_state_dict(model.state_dict())
            plain.zero_grad()
            loss_fn(plain, [X[rows], Y[rows]]).backward()
            for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
        assert run.step(optimizer) == request.final
        if request.final:
            assert all(p.grad is None for p in model.parameters())
    assert run.steps == 3


@pytest.mark.parametrize("how", ["top", "model"])
def test_zero_grad_at_the_top_of_the_loop_loses_nothing(run: paceline.Run, how: str) -> None:
    """As scripts for one device have it: with micro-batches it would throw away all but the last."""
    model, optimizer, loader = prepared(run, micro_batch=3)
    plain = build()
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in loader:
        if how == "model" and loader.current.micro > 0:
            model.zero_grad()
            with pytest.raises(UsageError, match=r"for example by model\.zero_grad\(\)\. Delete that call"):
                run.backward(loss_fn(model, batch))
            return
        optimizer.zero_grad()
        run.backward(loss_fn(model, batch))
        run.step(optimizer)
    for start in range(0, 20, 8):
        by_hand.zero_grad()
        loss_fn(plain, [X[start : start + 8], Y[start : start + 8]]).backward()
        by_hand.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)
    run.close()
    assert "zero_grad" not in vars(optimizer)


def terms(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A mean over examples; a sum over things that some examples have none of; and how many these are."""
    out = model(x)
    mask = x > 0.8
    return F.mse_loss(out, y), (out.sum(1, keepdim=True).square() * mask).sum(), mask.sum()


@pytest.mark.parametrize("micro_batch", [None, 2, 3])
@pytest.mark.parametrize("form", ["closure", "calls"])
def test_terms_with_counts_of_their_own_add_exactly(run: paceline.Run, micro_batch: int | None, form: str) -> None:
    """mean over examples + sum / count: two denominators, of which only one is known beforehand."""
    model, optimizer, loader = prepared(run, micro_batch=micro_batch)
    plain = build()
    optimizer_plain = torch.optim.SGD(plain.parameters(), lr=0.1)

    def closure(model: nn.Module, batch: list[Tensor]) -> Any:
        mean, total, count = terms(model, *batch)
        return mean, paceline.Total(total, count)

    for _ in range(2):
        for batch in loader:
            if form == "closure":
                run.forward_backward(closure, model, batch)
            else:
                mean, total, count = terms(model, *batch)
                run.backward(mean, retain_graph=True)
                run.backward(total=total, count=count)
            run.step(optimizer)
        for start in range(0, 20, 8):
            mean, total, count = terms(plain, X[start : start + 8], Y[start : start + 8])
            (mean + total / count).backward()
            optimizer_plain.step()
            optimizer_plain.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


def test_three_forms_of_backward_agree(run: paceline.Run) -> None:
    model, _, loader = prepared(run)
    grads = []
    for form in ("mean", "mean over n", "sum over n"):
        for batch in loader:
            loss = loss_fn(model, batch)
            if form == "mean":
                run.backward(loss)
            elif form == "mean over n":
                run.backward(loss, count=24)
            else:
                run.backward(total=loss * 24, count=torch.tensor(24))
            grads.append(next(model.parameters()).grad.clone())
            model.zero_grad()
            break
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-13, atol=0)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-13, atol=0)


def test_a_count_that_is_no_whole_number_keeps_its_digits(run: paceline.Run) -> None:
    model, optimizer, loader = prepared(run)
    for batch in loader:
        loss = loss_fn(model, batch)
        (expected,) = torch.autograd.grad(loss / 0.3, model[0].weight, retain_graph=True)
        run.backward(total=loss, count=0.3)
        torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-14, atol=0)
        run.step(optimizer)


def test_nothing_to_count_is_a_gradient_of_zero(run: paceline.Run) -> None:
    model, optimizer, loader = prepared(run)
    before = copy.deepcopy(model.state_dict())
    for batch in loader:
        run.backward(total=(model(batch[0]) * 0).sum(), count=0)
        run.step(optimizer)
        break
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_is_torchs(run: paceline.Run, max_norm: float) -> None:
    model, optimizer, loader = prepared(run, micro_batch=3)
    plain = build()
    by_hand = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in loader:
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer, max_grad_norm=max_norm)
    for start in range(0, 20, 8):
        loss_fn(plain, [X[start : start + 8], Y[start : start + 8]]).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
        by_hand.step()
        by_hand.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_schedule_moves_once_per_optimizer_step(run: paceline.Run) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.9**step)
    run.prepare(model, optimizer, scheduler)
    rates = []
    for _ in range(2):
        for batch in run.loader(DATA, global_batch=8, micro_batch=3, name=f"loader {len(rates)}"):
            run.forward_backward(loss_fn, model, batch)
            if run.step():
                rates.append(scheduler.get_last_lr()[0])
    assert rates == pytest.approx([0.9**i for i in range(1, 7)])
    assert type(scheduler).__name__ == "LambdaLR"
    assert isinstance(scheduler, LambdaLR)
    assert "step" not in scheduler.state_dict()


def test_step_touches_only_its_own_optimizer(run: paceline.Run) -> None:
    one, two = build(), build()
    first = torch.optim.SGD(one.parameters(), lr=0.1)
    second = torch.optim.SGD(two.parameters(), lr=0.1)
    run.prepare(one, first)
    run.prepare(two, second)  # a second call adds
    for batch in run.loader(DATA, global_batch=8):
        run.backward(loss_fn(nn.Sequential(one, nn.Linear(3, 6).double(), two), batch), optimizer=first)
        assert all(p.grad is None for p in two.parameters())
        run.backward(loss_fn(two, batch), optimizer=second)
        run.step(first)
        assert all(p.grad is not None for p in two.parameters())
        assert all(p.grad is None for p in one.parameters())
        run.step(second)
    with pytest.raises(UsageError, match=r"2 optimizers are prepared\. Name one"):
        run.step()


# --- what it refuses


def test_direct_calls_are_refused(run: paceline.Run) -> None:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = LambdaLR(optimizer, lambda _: 1.0)
    run.prepare(model, optimizer, scheduler)
    for batch in run.loader(DATA, global_batch=8):
        with pytest.raises(UsageError, match=r"run\.step without backward"):
            run.step(optimizer)
        loss_fn(model, batch).backward()
        with pytest.raises(UsageError, match=r"loss\.backward\(\) was called directly.*Call run\.backward\(loss\)"):
            run.step(optimizer)
        with pytest.raises(UsageError, match=r"Adam\.step\(\) was called directly.*Call run\.step\(optimizer\)"):
            optimizer.step()
        with pytest.raises(UsageError, match=r"LambdaLR\.step\(\) was called directly"):
            scheduler.step()
        break
    run.close()
    optimizer.step()  # after the run they are plain again
    scheduler.step()
    assert type(scheduler) is LambdaLR


def test_what_cannot_be_prepared(run: paceline.Run) -> None:
    model = build()
    with pytest.raises(UsageError, match=r"updates 4 parameter\(s\) \(shapes \(5, 6\)"):
        run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"run\.track\(plateau=scheduler\)"):
        run.prepare(model, optimizer, ReduceLROnPlateau(optimizer))
    with pytest.raises(UsageError, match="belongs to an optimizer that is not prepared"):
        run.prepare(LambdaLR(torch.optim.SGD(build().parameters(), lr=0.1), lambda _: 1.0))
    with pytest.raises(UsageError, match="not int"):
        run.prepare(3)


def test_a_parameter_that_an_optimizer_gets_late(run: paceline.Run, tmp_path: Path) -> None:
    """Is named by the step, and by a checkpoint that comes before it."""
    model, late = build(), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    optimizer.param_groups[0]["params"].append(late)
    words = (
        r"SGD has 1 parameter\(s\) \(shapes \(4,\)\) that the prepared models did not have.*run.prepare\(model\) again"
    )
    with pytest.raises(UsageError, match=words):
        run.save(tmp_path)
    for batch in run.loader(DATA, global_batch=20):
        run.forward_backward(loss_fn, model, batch)
        with pytest.raises(UsageError, match=words):
            run.step()


def test_losses_that_are_none(run: paceline.Run) -> None:
    model, _, loader = prepared(run)
    for batch in loader:
        with pytest.raises(UsageError, match=r"has the shape \(8, 3\)"):
            run.backward(model(batch[0]))
        with pytest.raises(UsageError, match="not float"):
            run.forward_backward(lambda *_: 1.5, model, batch)
        with pytest.raises(UsageError, match=r"count=-1"):
            run.backward(loss_fn(model, batch), count=-1)
        with pytest.raises(UsageError, match="but not both"):
            run.backward()
        break
    with pytest.raises(UsageError, match="outside a loop over a training loader"):
        run.backward(loss_fn(model, [X, Y]))


def test_two_loaders_need_of(run: paceline.Run) -> None:
    model, optimizer, loader = prepared(run)
    other = run.loader(DATA, global_batch=4, name="other")
    for a, b in zip(loader, other, strict=False):
        with pytest.raises(UsageError, match=r"several training loaders are being iterated \('train', 'other'\)"):
            run.backward(loss_fn(model, a))
        run.backward(loss_fn(model, a), of=loader)
        run.backward(loss_fn(model, b), of=other)
        run.step(optimizer)
    with pytest.raises(UsageError, match="another training loader has this name"):
        run.loader(DATA, global_batch=4)


@pytest.mark.parametrize("run", [{}, {"strategy": "data_parallel:devices=cpu,cpu"}], indirect=True, ids=["one", "two"])
@pytest.mark.parametrize("how", ["loop", "kept output", "carried state", "checkpoint"])
def test_a_second_backward_over_one_forward_names_what_keeps_the_graph(run: paceline.Run, how: str) -> None:
    """Torch says "a second time". Every strategy runs backward calls through the step, one in threads of its own."""
    if how == "loop" and run._strategy.plan.bundled:
        return
    model, optimizer, loader = prepared(run)
    kept: dict[Any, Tensor] = {}

    def keeps(model: nn.Module, batch: list[Tensor]) -> Tensor:
        here = threading.get_ident()
        x = batch[0]
        if how == "checkpoint":
            out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=False)
        else:
            out = model(x + (kept[here].mean() if how == "carried state" and here in kept else 0))
        kept[here] = out
        return F.mse_loss(out, batch[1])

    def uses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return kept[threading.get_ident()].square().mean()

    def train() -> None:
        for batch in loader:
            if how == "loop":
                out = model(batch[0])
                run.backward(F.mse_loss(out, batch[1]))
                run.backward(out.square().mean())
            run.forward_backward(keeps, model, batch)
            if how != "carried state":
                run.forward_backward(uses, model, batch)
            run.step(optimizer)

    remedy = (
        "retain_graph=True in all calls but the last, or add the losses"
        if how == "loop"
        else "one closure, which may return a tuple"
    )
    with pytest.raises(UsageError, match=f"already had its backward.*{remedy}.*detach"):
        train()


def test_batch_norm_with_micro_batches_is_refused(run: paceline.Run) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    refused = r"loader 'train': micro_batch=3 splits a global batch of 8 .*the model has batch norm"
    with pytest.raises(ModelError, match=refused):
        next(iter(run.loader(DATA, global_batch=8, micro_batch=3)))
    with pytest.raises(ModelError, match="micro_batch=4 splits a global batch of 8"):  # at once, and not in epoch 5
        next(iter(run.loader(DATA, global_batch={0: 4, 5: 8}, micro_batch=4, name="grows")))
    sampler = BatchSampler(range(20), 5, False)
    with pytest.raises(ModelError, match="micro_batch=3 splits a global batch of 5"):
        next(iter(run.loader(DATA, batch_sampler=sampler, micro_batch=3, name="sampled")))
    next(iter(run.loader(DATA, global_batch=8, micro_batch=8, name="whole")))
    model.eval()  # frozen statistics depend on nothing
    next(iter(run.loader(DATA, global_batch=8, micro_batch=3, name="frozen")))


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_stops_with_step_and_examples(run: paceline.Run, poison: str) -> None:
    model, optimizer, loader = prepared(run)
    weights = copy.deepcopy(model.state_dict())
    for batch in loader:
        if loader.step == 1:
            break
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
    weights = copy.deepcopy(model.state_dict())
    for batch in run.loader(DATA, global_batch=8, name="again"):
        # The square root's slope at 0 is infinite, and its value is not.
        bad = model[0].weight.sum()
        run.backward(
            loss_fn(model, batch) + (bad * math.nan if poison == "loss" else (bad - bad.detach()).abs().sqrt())
        )
        with pytest.raises(NonFiniteError) as caught:
            run.step(optimizer)
        break
    message = str(caught.value)
    assert message.startswith("step 1:")
    assert "rank 0" in message
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in message
    assert "the loss is not finite" in message if poison == "loss" else "first in 0.weight" in message
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items()), "weights were ruined"


@pytest.mark.parametrize("run", [{"nonfinite": "skip"}], indirect=True)
def test_skip_leaves_the_step_out_and_counts(run: paceline.Run) -> None:
    model, optimizer, loader = prepared(run)
    for batch in loader:
        before = copy.deepcopy(model.state_dict())
        run.backward(loss_fn(model, batch) * (float("inf") if loader.step == 1 else 1.0))
        assert run.step(optimizer)
        same = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert same == (loader.step == 1)
    assert (run.steps, run.skipped) == (2, 1)


# --- settings


START = [
    ({"strategy": "dpp"}, SettingError, "strategy='dpp' is not known. Did you mean 'ddp'"),
    ({"strategy": "ddp:buckets=3"}, SettingError, "no option 'buckets'. Did you mean 'bucket_mb'"),
    ({"strategy": "ddp:bucket_mb=x"}, SettingError, "bucket_mb='x': use a number"),
    ({"strategy": "ddp:static_graph=maybe"}, SettingError, "use true or false"),
    ({"strategy": "ddp:25"}, SettingError, "the option '25' has no value"),
    ({"strategy": "ddp:bucket_mb=0"}, SettingError, "a size above 0"),
    ({"strategy": "single:x=1"}, SettingError, "Known: shards"),
    ({"strategy": "data_parallel:devices=cpu,gpu"}, SettingError, "devices='cpu,gpu'"),
    ({"strategy": "pipeline:stages=2"}, SettingError, "this run has 1 process"),
    ({"precision": "bf15"}, SettingError, "precision='bf15' is not known. Known: bf16, bf16-params, fp16, fp32"),
    ({"batch_norm": "globl"}, SettingError, "Did you mean 'global'"),
    ({"nonfinite": "ignore"}, SettingError, "Known: skip, stop"),
    ({"seed": -1}, SettingError, "seed=-1"),
    ({"device": "gpu"}, SettingError, "device='gpu' is not a device"),
    ({"device": "xpu:3"}, SettingError, "device='xpu:3': this machine has"),
    ({"rank": 1}, WorldError, "give all three, with 0 <= rank < world_size"),
    ({"rank": 2, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}, WorldError, "0 <= rank < world_size"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), START)
def test_bad_settings_are_named(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as caught:
        paceline.start(**arguments)
    assert message in str(caught.value)


def test_the_command_line_overrides_the_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_SETTINGS", '{"precision": "bf16", "seed": 5}')
    run = paceline.start(precision="fp32", device="cpu")
    try:
        assert (run.settings.precision, run.seed) == ("bf16", 5)
        assert "precision=bf16 from the command line overrides fp32 from the script" in capsys.readouterr().err
    finally:
        run.close()


# --- numbers


def test_numbers_of_one_process(run: paceline.Run) -> None:
    assert run.mean(torch.tensor([1.0, 2.0, 6.0])) == 3.0
    assert math.isnan(run.mean(torch.zeros(0)))
    assert run.mean({"a": torch.tensor([1, 2]), "b": torch.tensor([True, False])}) == {"a": 1.5, "b": 0.5}
    assert run.ratio(3, 4) == 0.75
    assert run.sum(3) == 3
    assert isinstance(run.sum(3), int)
    assert run.sum(torch.tensor([True, True])).tolist() == [1, 1]
    assert run.gather([1, 2]) == [1, 2]
    assert run.gather("x") == ["x"]
    with pytest.raises(UsageError, match="not str"):
        run.sum("x")
    with run.main_first():
        pass


def test_export_is_what_the_plain_class_loads(run: paceline.Run, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _, _ = prepared(run)
    run.export(tmp_path / "weights.safetensors")
    plain = build()
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    plain.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    with pytest.raises(UsageError, match="was not prepared"):
        run.export(tmp_path / "other", plain)


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_zero_grad_after_a_global_batch_that_was_left_clears_what_was_there_before_it(how: str) -> None:
    """One optimizer's gradients are left over, then a loop is left in mid global batch. zero_grad at the top of the
    next loop clears them, as in plain PyTorch: they are not added to the next update's."""
    x = torch.arange(8.0, dtype=torch.float64)[:, None]
    with started() as run:
        first, second = nn.Linear(1, 1).double(), nn.Linear(1, 1).double()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second)]
        run.prepare(first, second, *optimizers)
        loader = run.loader(TensorDataset(x), global_batch=2, micro_batch=1)
        for step, (batch,) in enumerate(loader):
            run.backward((first(batch) * second(batch)).mean())
            if step == 2:
                break  # the first micro-batch of the second global batch
            run.step(optimizers[0])
        seen = []
        for _, (batch,) in zip(range(2), loader, strict=False):
            if how == "optimizer":
                optimizers[1].zero_grad()
            elif not seen:
                second.zero_grad()
            run.backward(second(batch).mean())
            seen += batch.flatten().tolist()
        assert second.weight.grad is not None
        assert second.weight.grad.item() == sum(seen) / 2
