"""fsdp on several processes: each stage against plain PyTorch."""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies.checks import (
    BATCH,
    TOKENS,
    Loss,
    Make,
    N,
    Net,
    X,
    Y,
    adamw,
    both_heads,
    compare_checkpoints,
    data,
    difference,
    layers,
    make,
    named,
    one_head,
    plainly,
    refused,
    same,
    sgd,
    started,
    under_paceline,
    whole,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ModelError, NonFiniteError, SettingError, UnusedParameterError, UsageError

pytestmark = pytest.mark.timeout(300)
EPOCHS = 1  # of 5 steps; the last global batch has 2 examples
STAGES = ("fsdp:stage=1", "fsdp:stage=2,min_params=1", "fsdp:stage=3,min_params=1")


class Lamb(torch.optim.Optimizer):
    """Steps as long as the tensor: right only with the norms of whole tensors."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.mul_(0.9).add_(p.grad, alpha=0.1)
                    p.add_(mean / (mean.norm() + 1e-6) * p.norm().clamp(max=10.0), alpha=-group["lr"])


class Odd(nn.Module):
    """Tied weights, a 0-dim parameter, one of a single row, layers in a list, and a method beside forward that uses a
    parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.position = nn.Parameter(torch.randn(1, 4, 6))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)) for _ in range(2))
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))

    def features(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position + x.unsqueeze(1)
        for block in self.blocks:
            h = h + block(h)
        return h.mean(1) * self.scale

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.out(self.features(x, tokens))


def odd_loss(model: Any, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    return F.cross_entropy(model(x, tokens), y) + model.features(x, tokens).square().mean(1).mean()


def with_norm() -> nn.Module:
    return Net(norm=True)


def penalty_loss(model: Any, batch: list[Tensor]) -> Tensor:
    """A gradient penalty: the graph of a gradient is differentiated again."""
    x = batch[0].detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[2]) + 0.1 * slope.square().sum(1).mean()


def counted_loss(model: Any, batch: list[Tensor]) -> Any:
    """A mean over things of which the rows have none to a thousand: ranks' first counts are far apart."""
    weights = batch[1].sum(1).square() * (batch[2] > 0)
    return paceline.Total((F.cross_entropy(model(batch[0]), batch[2], reduction="none") * weights).sum(), weights.sum())


def freeze(model: Any, step: int) -> None:
    model.head.requires_grad_(step % 4 != 1)
    model.trunk[0].weight.requires_grad_(step not in (2, 3))


plain = partial(plainly, epochs=EPOCHS)


def ours(kind: Callable[[], nn.Module], loss_fn: Loss, optimizer: Make, strategy: str, **options: Any) -> nn.Module:
    return under_paceline(kind, loss_fn, adam=optimizer, strategy=strategy, epochs=EPOCHS, **options)


# --- the same model


@pytest.mark.ranks(2, full=3, campaign=4)
def test_loops_and_closures_with_micro_batches_train_as_plain_pytorch() -> None:
    assert difference(plain(Net, lambda m, b: both_heads(m, b) * 2, sgd), plain(Net, both_heads, sgd)) > 1e-3
    for kind, micros in ((sgd, (1,)), (adamw, (None, 1))):
        reference = plain(Net, both_heads, kind)
        for strategy in STAGES:
            for micro in micros:
                same(ours(Net, both_heads, kind, strategy, closure=micro is None, micro=micro), reference, 1e-8)


@pytest.mark.ranks(2, full=3, campaign=4)
def test_clipping_counted_losses_and_odd_parameters_train_as_plain_pytorch() -> None:
    counted = plain(layers, counted_loss, adamw, clip=0.3)
    odd = plain(Odd, odd_loss, sgd, clip=0.5)
    for strategy in STAGES:
        same(ours(layers, counted_loss, adamw, strategy, micro=1, clip=0.3), counted, 1e-8)
        same(ours(Odd, odd_loss, sgd, strategy, clip=0.5), odd, 1e-8)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_a_gradient_penalty_trains_as_plain_pytorch() -> None:
    reference = plain(layers, penalty_loss, adamw)
    for strategy in STAGES:
        same(ours(layers, penalty_loss, adamw, strategy), reference, 1e-8)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_batch_norm_unused_and_frozen_parameters_train_as_plain_pytorch() -> None:
    norm = plain(with_norm, both_heads, sgd)
    unused = plain(Net, one_head, adamw)
    frozen = plain(Net, both_heads, adamw, before=freeze)
    for strategy in STAGES:
        same(ours(with_norm, both_heads, sgd, strategy), norm, 1e-8)
        same(ours(Net, one_head, adamw, strategy), unused, 1e-8)
        options = strategy + ",find_unused=true"
        same(ours(Net, both_heads, adamw, options, before=freeze), frozen, 1e-8)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_optimizers_that_look_at_whole_tensors_are_exact_or_refused() -> None:
    reference = plain(Odd, odd_loss, Lamb)
    for strategy in STAGES[::2]:
        same(ours(Odd, odd_loss, Lamb, strategy), reference, 1e-8)
        try:
            ours(Odd, odd_loss, torch.optim.Adafactor, strategy)
        except UsageError as error:
            assert "Adafactor uses an operation" in str(error), error
        else:
            raise AssertionError("not noticed")


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def adversaries() -> tuple[Any, ...]:
    torch.manual_seed(0)
    generator, judge = Generator().double(), layers().double()
    return generator, judge, adamw(generator.parameters()), adamw(judge.parameters())


@pytest.mark.ranks(2, campaign=(3, 4))
def test_two_models_with_losses_that_go_through_both_train_as_plain_pytorch() -> None:
    generator, judge, opt_g, opt_d = adversaries()
    for start in [*range(0, N, BATCH)] * EPOCHS:
        x, y = X[start : start + BATCH], Y[start : start + BATCH]
        fake = generator(x)
        (F.cross_entropy(judge(x), y) - judge(fake.detach()).square().mean(1).mean()).backward()
        judge(fake).square().mean(1).mean().backward(inputs=list(generator.parameters()))
        opt_d.step()
        opt_g.step()
        opt_d.zero_grad()
        opt_g.zero_grad()
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            its = run.prepare(*adversaries())
            own_g, own_d, own_opt_g, own_opt_d = its
            loader = run.loader(data(), global_batch=BATCH)
            for _ in run.epochs(EPOCHS):
                for x, _, y in loader:
                    fake = own_g(x)
                    loss = F.cross_entropy(own_d(x), y) - own_d(fake.detach()).square().mean(1).mean()
                    run.backward(loss, optimizer=own_opt_d)
                    run.backward(own_d(fake).square().mean(1).mean(), optimizer=own_opt_g)
                    run.step(own_opt_d)
                    run.step(own_opt_g)
            same(whole(run, own_g, Generator().double()), generator, 1e-8)
            same(whole(run, own_d, layers().double()), judge, 1e-8)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_evaluation_between_steps_and_predictions_use_the_weights_of_the_last_update() -> None:
    """What a forward without gradients has gathered must not be used after an update."""
    reference = plain(Net, both_heads, adamw)
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*make(Net, adamw))
            for batch in run.loader(data(), global_batch=BATCH):
                with torch.no_grad():
                    model(X[:3], TOKENS[:3])
                run.forward_backward(both_heads, model, batch)
                with torch.no_grad():
                    model(X[:3], TOKENS[:3])
                run.step(optimizer)
            same(whole(run, model, Net().double()), reference, 1e-8)
        with started(strategy=strategy) as run:
            model = run.prepare(make(Net, sgd)[0])
            found = run.predict(model, data(), global_batch=4, fn=lambda m, b: m(b[0], b[1]))
            torch.testing.assert_close(found, make(Net, sgd)[0](X, TOKENS).detach())


@pytest.mark.ranks(2, campaign=(3, 4))
def test_a_steady_step_of_stage_1_makes_no_dtensor() -> None:
    made: list[int] = []
    steps: list[int] = []
    from_local = DTensor.from_local

    def counted(*args: Any, **kwargs: Any) -> DTensor:
        made.append(len(steps))
        return from_local(*args, **kwargs)

    with started(strategy="fsdp:stage=1") as run, mock.patch.object(DTensor, "from_local", counted):
        model, optimizer = run.prepare(*make(Net, adamw))
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(both_heads, model, batch)
            steps.append(run.step(optimizer))
        assert len(steps) > 2
        assert set(made) == {0}


# --- options


@pytest.mark.ranks(2, campaign=(3, 4))
def test_checkpointing_offload_and_wrap_train_as_plain_pytorch() -> None:
    reference = plain(Odd, odd_loss, adamw, clip=0.5)
    ways = ("stage=1,min_params=1,checkpointing=true", "stage=3,min_params=1,checkpointing=true", "stage=3,wrap=none")
    for options in (*ways, "stage=2,wrap=Sequential,min_params=1", "stage=3,min_params=1,offload=true"):
        same(ours(Odd, odd_loss, adamw, f"fsdp:{options}", clip=0.5), reference, 1e-8)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_mixed_computes_in_bf16_and_updates_in_fp32() -> None:
    """Near to plain PyTorch, and not the same; parameters, gradients and optimizer state are fp32."""
    seen: list[torch.dtype] = []
    for strategy in ("fsdp:stage=2,mixed=bf16", "fsdp:stage=3,min_params=1,mixed=bf16"):
        with started(strategy=strategy) as run:
            torch.manual_seed(0)
            model = layers()
            model, optimizer = run.prepare(model, sgd(model.parameters()))
            model[2].register_forward_hook(lambda m, i, o: seen.append(i[0].dtype))
            for batch in run.loader(TensorDataset(X.float(), Y), global_batch=11):
                output = model(batch[0])
                assert output.dtype == torch.float32
                run.backward(F.cross_entropy(output, batch[1]))
                for p in optimizer.param_groups[0]["params"]:
                    assert p.dtype == p.grad.dtype == torch.float32
                run.step(optimizer)
            trained = whole(run, model, layers())
        torch.manual_seed(0)
        reference = layers()
        plain_optimizer = sgd(reference.parameters())
        for start in (0, 11):
            F.cross_entropy(reference(X.float()[start : start + 11]), Y[start : start + 11]).backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        assert 1e-6 < difference(trained, reference) < 1e-2, difference(trained, reference)
    assert set(seen) == {torch.bfloat16}


@pytest.mark.ranks(2, campaign=(3, 4))
def test_fp16_overflows_are_skipped_and_a_loss_that_is_not_finite_is_told_by_all() -> None:
    for strategy in STAGES:
        with started(strategy=strategy, precision="fp16") as run:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            run.prepare(model, optimizer)
            loader = run.loader(TensorDataset(X.float(), TOKENS, Y), global_batch=6)
            for batch in loader:
                before = whole(run, model, Net()).head.weight.detach().clone()
                factor = 1e38 if run.world.rank == 1 and loader.step == 2 else 1.0
                run.forward_backward(lambda m, b, f=factor: both_heads(m, b) * f, model, batch)
                run.step(optimizer, max_grad_norm=1.0 if loader.step == 1 else None)
                assert torch.equal(before, whole(run, model, Net()).head.weight) == (loader.step == 2), loader.step
            assert (run.steps, run.skipped) == (3, 1)
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*make(Net, sgd))
            for batch in run.loader(data(), global_batch=6):
                loss = both_heads(model, batch)
                if run.world.rank == 1:  # reaches one row of one parameter, which one rank has in its slice
                    loss = loss + model.embed(torch.zeros(1, dtype=torch.long)).sum() * float("nan")
                run.backward(loss)
                try:
                    run.step(optimizer)
                except NonFiniteError as error:
                    assert "rank 1: loss nan on the examples" in str(error), error
                    break
                raise AssertionError("not noticed")


# --- state


@pytest.mark.ranks(2, full=3, campaign=4)
def test_checkpoints_of_odd_parameters_are_read_by_other_strategies() -> None:
    compare_checkpoints(Odd, odd_loss, STAGES)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_weights_and_optimizer_state_may_be_loaded_before_or_after_prepare() -> None:
    """As plain PyTorch's state_dict has them, whole."""
    model, optimizer = make(Net, adamw)
    both_heads(model, [X, TOKENS, Y]).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    both_heads(model, [X, TOKENS, Y]).backward()
    optimizer.step()
    for strategy in STAGES:
        for late in (False, True):
            with started(strategy=strategy) as run:
                own, own_optimizer = make(Net, adamw)
                if late:
                    run.prepare(own, own_optimizer)
                own.load_state_dict(weights)
                own_optimizer.load_state_dict(copy.deepcopy(state))
                if not late:
                    run.prepare(own, own_optimizer)
                for batch in run.loader(data(), global_batch=N):
                    run.forward_backward(both_heads, own, batch)
                    run.step(own_optimizer)
                same(whole(run, own, Net().double()), model, 1e-8)


# --- misuse


@pytest.mark.ranks(2, campaign=(3, 4))
def test_what_cannot_be_is_refused_with_its_remedy() -> None:
    def start(strategy: str, model: nn.Module | None = None) -> None:
        with started(strategy=strategy) as run:
            if model is not None:
                run.prepare(model)

    refused(SettingError, "stage=4: use 1 (shards optimizer state", lambda: start("fsdp:stage=4"))
    refused(SettingError, "mixed='bf61' is not known. Did you mean 'bf16'", lambda: start("fsdp:mixed=bf61"))
    refused(SettingError, "needs stage=2 or stage=3", lambda: start("fsdp:stage=1,offload=true"))
    refused(SettingError, "It has Embedding, Linear", lambda: start("fsdp:wrap=Block", nn.Sequential(Odd())))
    refused(ModelError, "embed has sparse=True", lambda: start("fsdp", Net(sparse=True)))
    deep = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 3))
    refused(ModelError, "twice in its running statistics", lambda: start("fsdp:checkpointing=true,min_params=1", deep))


@pytest.mark.ranks(2, campaign=(3, 4))
def test_slices_used_as_if_they_were_whole_are_named() -> None:
    def regularised(model: nn.Module, batch: list[Tensor]) -> Tensor:
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        return one_head(model, batch) + penalty

    for strategy in STAGES[1:]:
        with started(strategy=strategy) as run:
            model, optimizer = make(Net, sgd)
            old = list(model.parameters())
            run.prepare(model, optimizer)
            refused(UsageError, "taken before run.prepare", lambda old=old: nn.utils.clip_grad_norm_(old, 1.0))
            for batch in run.loader(data(), global_batch=BATCH):
                refused(
                    UsageError,
                    "outside of any forward",
                    lambda batch=batch, model=model, run=run: run.forward_backward(regularised, model, batch),
                )
                break


@pytest.mark.ranks(2, campaign=(3, 4))
def test_a_path_that_differs_is_named() -> None:
    def by_rank(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return one_head(model, batch) if dist.get_rank() == 1 else both_heads(model, batch)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(
            UnusedParameterError, "spare.weight, spare.bias", lambda: ours(Net, by_rank, sgd, "fsdp:wrap=none,stage=2")
        )


@pytest.mark.ranks(2, campaign=(3, 4))
def test_a_copy_of_slices_is_refused() -> None:
    with started(strategy="fsdp") as run:
        model = run.prepare(Net())
        refused(ModelError, "use ema = run.ema(model, decay)", lambda: copy.deepcopy(model))


@pytest.mark.ranks(2, campaign=(3, 4))
def test_rank_0_alone_may_ask_for_the_state_after_an_evaluation() -> None:
    """What is gathered stays alike on all ranks; a copy of slices, kept by all, brings the best model back."""
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*make(Net, adamw))
            loader = run.loader(data(), global_batch=BATCH)
            best: dict[str, Any] = {}
            for epoch in run.epochs(2):
                for batch in loader:
                    run.backward(both_heads(model, batch))
                    run.step(optimizer)
                with torch.no_grad():
                    both_heads(model, [X, TOKENS, Y])
                if run.main:
                    copy.deepcopy(model.state_dict())
                if epoch == 0:
                    best = copy.deepcopy(model.state_dict())
                    whole = {name: _whole(value).clone() for name, value in best.items()}
            assert any((_whole(value) != whole[name]).any() for name, value in model.state_dict().items())
            model.load_state_dict(best)
            for name, value in model.state_dict().items():
                assert torch.equal(_whole(value), whole[name]), (strategy, name)


@pytest.mark.ranks(2, campaign=(3, 4))
def test_a_pickle_of_slices_is_refused_and_nobody_waits() -> None:
    for strategy in STAGES[1:]:
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*make(Net, adamw))
            for batch in run.loader(data(), global_batch=BATCH):
                run.backward(both_heads(model, batch))
                run.step(optimizer)
            for what in (model.state_dict(), model, {"state": optimizer.state_dict()}, {"model": model}):
                if run.main:
                    named(
                        lambda it=what: torch.save(it, io.BytesIO()), UsageError, "run.export(path, model)", "run.save"
                    )
            whole = {name: _whole(p) for name, p in model.state_dict().items()}
            torch.save(whole, io.BytesIO())
    pickle.dumps(DTensor.from_local(torch.ones(1), _mesh(), [Replicate()]))  # as ever, when the run is over


def _whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def _mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


class Saving(nn.Module):
    """With the method by which Hugging Face's models, PEFT's and others write themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def generates(self) -> bool:
        return False

    def save_pretrained(self, path: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        assert not self.generates()
        torch.save(self.state_dict() if state_dict is None else state_dict, path)


@pytest.mark.ranks(2)
def test_save_pretrained_on_rank_0_writes_what_it_is_given_and_nobody_waits() -> None:
    """Each public method gathers the parameters, which one rank alone would wait for."""
    for strategy in STAGES[1:]:
        with started(strategy=strategy) as run:
            torch.manual_seed(0)
            model = run.prepare(Saving().double())
            plain = {name: _whole(p) for name, p in model.state_dict().items()}
            path = Path(tempfile.gettempdir()) / f"saving-{os.getpid()}.pt"
            if run.main:
                with pytest.raises(UsageError, match=r"save_pretrained.*run\.export\(path\).*state_dict="):
                    model.save_pretrained(path)
                model.save_pretrained(path, state_dict=plain)
                for name, value in torch.load(path).items():
                    assert torch.equal(value, plain[name])
                path.unlink()
            model(torch.ones(1, 4).double())  # and the model computes as before
