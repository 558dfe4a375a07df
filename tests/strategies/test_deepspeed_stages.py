"""deepspeed on several processes: each stage against plain PyTorch, in float32, which is what DeepSpeed updates."""

from __future__ import annotations

import atexit
import copy
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies import checks
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
    make,
    one_head,
    plainly,
    refused,
    sgd,
    started,
    under_paceline,
    whole,
)
from torch import Tensor, nn

import paceline
from paceline.errors import ModelError, NonFiniteError, UnusedParameterError, UsageError
from paceline.strategies.deepspeed import deepspeed_config

# On a CPU DeepSpeed compiles an extension at its first use, hence the deadline.
pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
EPOCHS = 2  # of 5 steps; the last global batch has 2 examples
NEAR = 2e-5  # of float32 over 10 steps


def stages(folder: Path) -> list[str]:
    """Stage 3 with a config after which no parameter is small enough to stay whole."""
    path = folder / "sliced.json"
    small = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 50}
    path.write_text(json.dumps({"zero_optimization": small}))
    return ["deepspeed:stage=1", "deepspeed", f"deepspeed:stage=3,config={path}", "deepspeed:stage=3"]


FOLDER = Path(tempfile.mkdtemp(prefix="deepspeed-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
STAGES = stages(FOLDER)


@pytest.fixture(autouse=True)
def deepspeed_is_there() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.fail('DeepSpeed is not installed: make test-system does it, or pip install "paceline[deepspeed]"', False)


def groups(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.AdamW([{"params": every[:3]}, {"params": every[3:], "lr": 0.003, "weight_decay": 0.1}], lr=0.01)


class Tied(nn.Module):
    """Tied weights, one of a single number, one of a single row, a buffer, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.position = nn.Parameter(torch.randn(1, 4, 6))
        self.block = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.fixed = nn.Linear(6, 6).requires_grad_(False)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor([0.7]))
        self.register_buffer("shift", torch.tensor([0.1]))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position + x.unsqueeze(1)
        h = self.fixed(h + self.block(h)).mean(1) * self.scale + self.shift
        return self.out(h)


def counted_loss(model: Any, batch: list[Tensor]) -> Any:
    """A mean over things of which the rows have none to a thousand."""
    weights = batch[1].sum(1).square() * (batch[2] > 0)
    return paceline.Total(
        (F.cross_entropy(model(*batch[:2]), batch[2], reduction="none") * weights).sum(), weights.sum()
    )


def two_denominators(model: Any, batch: list[Tensor]) -> Any:
    return counted_loss(model, batch), F.cross_entropy(model(*batch[:2]), batch[2])


def with_norm() -> nn.Module:
    return Net(norm=True)


class Both(Net):
    """All parameters in one forward, as a model is that stage 3 can gather."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        features = self.features(x, tokens)
        return self.head(features) + self.spare(features).tanh()


F32: Any = {"dtype": torch.float32}
plain = partial(plainly, epochs=EPOCHS, **F32)
made = partial(make, **F32)
same = partial(checks.same, tolerance=NEAR)


def ours(kind: Callable[[], nn.Module], loss_fn: Loss, optimizer: Make, strategy: str, **options: Any) -> nn.Module:
    return under_paceline(kind, loss_fn, adam=optimizer, strategy=strategy, epochs=EPOCHS, **F32, **options)


# --- the same model


@pytest.mark.ranks(2, campaign=3)
def test_loops_and_closures_with_micro_batches_train_as_plain_pytorch() -> None:
    wrong = plain(Both, lambda m, b: one_head(m, b) * 1.01, sgd)
    assert difference(wrong, plain(Both, one_head, sgd)) > 20 * NEAR
    for optimizer in (sgd, adamw):
        reference = plain(Both, one_head, optimizer)
        for strategy in STAGES:
            for micro in (None, 1):
                same(ours(Both, one_head, optimizer, strategy, closure=micro is None, micro=micro), reference)


@pytest.mark.ranks(2, campaign=3)
def test_clipping_counted_losses_and_odd_parameters_train_as_plain_pytorch() -> None:
    for loss_fn in (counted_loss, two_denominators):
        reference = plain(Both, loss_fn, sgd, clip=0.3)
        assert difference(plain(Both, loss_fn, sgd), reference) > 20 * NEAR
        for strategy in STAGES:
            same(ours(Both, loss_fn, sgd, strategy, micro=1, clip=0.3), reference)

    def loss(model: Any, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(*batch[:2]), batch[2])

    for optimizer in (sgd, groups):
        odd = plain(Tied, loss, optimizer, clip=0.5)
        for strategy in STAGES:
            same(ours(Tied, loss, optimizer, strategy, clip=0.5), odd)


@pytest.mark.ranks(2, campaign=3)
def test_batch_norm_and_methods_beside_forward_train_as_plain_pytorch() -> None:
    norm = plain(with_norm, both_heads, sgd)
    for strategy in STAGES:
        same(ours(with_norm, both_heads, sgd, strategy), norm)


def penalty_loss(model: Any, batch: list[Tensor]) -> Tensor:
    """A gradient penalty: the graph of a gradient is differentiated again."""
    x = batch[0].detach().requires_grad_()
    out = model(x, batch[1])
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[2]) + 0.1 * slope.square().sum(1).mean()


@pytest.mark.ranks(2, campaign=3)
def test_a_gradient_penalty_in_stages_1_and_2_trains_as_plain_pytorch() -> None:
    reference = plain(Both, penalty_loss, adamw)
    for strategy in STAGES[:2]:
        same(ours(Both, penalty_loss, adamw, strategy), reference)


@pytest.mark.ranks(2, campaign=3)
def test_several_losses_schedules_evaluation_and_weights_that_a_script_writes() -> None:
    """Two backward calls in a micro-batch; a decaying rate; forwards without gradients between; weights clamped."""

    def clamp(model: Any) -> None:
        with torch.no_grad():
            model.trunk[0].weight.clamp_(-0.3, 0.3)

    model, optimizer = made(Both, sgd)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for start in range(0, N, BATCH):
        x, tokens, y = (t[start : start + BATCH] for t in (X.float(), TOKENS, Y))
        (F.cross_entropy(model(x, tokens), y) + model(x, tokens).square().mean(1).mean()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clamp(model)
    for strategy in STAGES[:2]:  # in stage 3 a script cannot write to weights
        with started(strategy=strategy) as run:
            own, own_optimizer = made(Both, sgd)
            run.prepare(own, own_optimizer, torch.optim.lr_scheduler.ExponentialLR(own_optimizer, 0.7))
            for x, tokens, y in run.loader(data(torch.float32), global_batch=BATCH, micro_batch=2):
                run.backward(F.cross_entropy(own(x, tokens), y))
                run.backward(own(x, tokens).square().mean(1).mean())
                with torch.no_grad():
                    own(X.float()[:3], TOKENS[:3])
                if run.step(own_optimizer):
                    clamp(own)
            same(own, model)
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            own, _ = run.prepare(*made(Both, sgd))
            found = run.predict(own, data(torch.float32), global_batch=4, fn=lambda m, b: m(b[0], b[1]))
            torch.testing.assert_close(found, made(Both, sgd)[0](X.float(), TOKENS).detach())


@pytest.mark.ranks(2, campaign=3)
def test_bf16_is_that_of_ddp_and_fp16_overflows_are_skipped_alike() -> None:
    near = ours(Both, one_head, sgd, "ddp", precision="bf16")
    for strategy in STAGES:
        same(ours(Both, one_head, sgd, strategy, precision="bf16"), near, tolerance=1e-3)
        with started(strategy=strategy, precision="fp16") as run:
            model, optimizer = run.prepare(*made(Both, sgd))
            loader = run.loader(data(torch.float32), global_batch=6)
            for batch in loader:
                optimizer.zero_grad()
                before = whole(run, model, Both()).head.weight.detach().clone()
                factor = 1e38 if run.world.rank == 1 and loader.step == 2 else 1.0
                run.forward_backward(lambda m, b, f=factor: one_head(m, b) * f, model, batch)
                run.step(optimizer, max_grad_norm=1.0 if loader.step == 1 else None)
                after = whole(run, model, Both()).head.weight
                assert torch.equal(before, after) == (loader.step == 2), (strategy, loader.step)
            assert (run.steps, run.skipped) == (3, 1)


@pytest.mark.ranks(2, campaign=3)
def test_a_loss_that_is_not_finite_stops_all_ranks() -> None:
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*made(Both, sgd))
            for batch in run.loader(data(torch.float32), global_batch=6):
                factor = float("nan") if run.world.rank == 1 else 1.0
                run.backward(one_head(model, batch) * factor)
                refused(NonFiniteError, "rank 1: loss nan on the examples", lambda run=run, o=optimizer: run.step(o))
                break


# --- state


@pytest.mark.ranks(2, campaign=3)
def test_checkpoints_are_read_by_other_strategies() -> None:
    """In mid-epoch."""
    for optimizer, others in ((groups, [*STAGES, "fsdp"]), (sgd, STAGES[:3])):
        compare_checkpoints(Both, one_head, others, optimizer=optimizer, tolerance=NEAR, **F32)


@pytest.mark.ranks(2, campaign=3)
def test_state_may_be_loaded_before_prepare() -> None:
    model, optimizer = made(Both, adamw)
    batch = [X.float(), TOKENS, Y]
    one_head(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    one_head(model, batch).backward()
    optimizer.step()
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            own, own_optimizer = made(Both, adamw)
            own.load_state_dict(weights)
            own_optimizer.load_state_dict(copy.deepcopy(state))
            run.prepare(own, own_optimizer)
            for given in run.loader(data(torch.float32), global_batch=N):
                run.forward_backward(one_head, own, given)
                run.step(own_optimizer)
            same(whole(run, own, Both()), model)


@pytest.mark.ranks(2, campaign=3)
def test_every_setting_of_a_json_that_is_taken_trains_as_plain_pytorch() -> None:
    """Trained, and checkpointed where flat tensors are cut otherwise: what is taken leaves the model as it is."""
    small = {"reduce_bucket_size": 50, "allgather_bucket_size": 64, "use_multi_rank_bucket_allreduce": False}
    every = {"stage3_gather_16bit_weights_on_model_save": True, "stage3_model_persistence_threshold": 100}
    zeros: list[dict[str, Any]] = [
        {"stage": 1, **small, "overlap_comm": True, "contiguous_gradients": False, "allgather_partitions": False},
        {"stage": 2, "reduce_scatter": False, "overlap_comm": True, "reduce_bucket_size": 2e8},
        {"stage": 3, **every, "sub_group_size": 100, "contiguous_gradients": False, "reduce_scatter": False},
        {"stage": 3, "sub_group_size": 40, "overlap_comm": True, "stage3_param_persistence_threshold": 0}
        | {"stage3_max_live_parameters": 20, "stage3_max_reuse_distance": 5, "stage3_prefetch_bucket_size": 10},
    ]
    said = {"steps_per_print": 1, "wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True}
    told = {"comms_logger": {"enabled": True, "verbose": True, "prof_all": True, "debug": False}}
    assert {key for zero in zeros for key in zero} == set(deepspeed_config._ZERO)
    assert {*said, *told} == set(deepspeed_config._ALLOWED)
    reference = plain(Both, one_head, groups)
    for number, zero in enumerate(zeros):
        path = FOLDER / f"{number}.json"
        path.write_text(json.dumps({"zero_optimization": zero, **(said | told if number == 1 else {})}))
        strategy = f"deepspeed:config={path}"
        same(ours(Both, one_head, groups, strategy, micro=None if number == 1 else 1), reference)
        if number in (0, 3):
            compare_checkpoints(Both, one_head, [strategy], optimizer=groups, tolerance=NEAR, **F32)


# --- misuse


def prepared(*things: Any, strategy: str = "deepspeed") -> None:
    with started(strategy=strategy) as run:
        run.prepare(*things)


@pytest.mark.ranks(2, campaign=3)
def test_what_cannot_be_is_refused_with_its_remedy() -> None:
    net, other = Both(), Both()
    refused(ModelError, "trains one model with one optimizer; 2 model(s)", lambda: prepared(net, other))
    both = sgd(net.parameters()), sgd(net.parameters())
    refused(ModelError, "1 model(s) and 2 optimizer(s)", lambda: prepared(net, *both))
    refused(ModelError, "embed.weight is torch.float64", lambda: prepared(Both().double()))
    refused(ModelError, "embed has sparse=True", lambda: prepared(Net(sparse=True)))
    single = nn.ParameterList([nn.Parameter(torch.tensor(1.0))])
    refused(ModelError, "0 is a 0-dim parameter", lambda: prepared(single))
    whole_tensors = torch.optim.Adafactor(net.parameters())
    refused(ModelError, "Adafactor may not update each", lambda: prepared(net, whole_tensors))
    refused(ModelError, "trainable, but the optimizer", lambda: prepared(net, sgd(net.head.parameters())))
    with started(strategy="deepspeed") as run:
        model = run.prepare(Both())
        for batch in run.loader(data(torch.float32), global_batch=BATCH):
            loss = one_head(model, batch)
            refused(UsageError, "prepare the optimizer together", lambda run=run, loss=loss: run.backward(loss))
            break


@pytest.mark.ranks(2, campaign=3)
def test_a_parameter_group_that_comes_later_is_refused() -> None:
    for strategy in STAGES[:3]:
        with started(strategy=strategy) as run:
            model = Both()
            model.spare.requires_grad_(False)
            model, optimizer = run.prepare(model, sgd(p for p in model.parameters() if p.requires_grad))
            optimizer.add_param_group({"params": list(model.spare.parameters())})
            for batch in run.loader(data(torch.float32), global_batch=BATCH):
                late = "a parameter group was added to the optimizer after"
                refused(UsageError, late, lambda run=run, m=model, b=batch: run.forward_backward(one_head, m, b))
                break


@pytest.mark.ranks(2, campaign=3)
def test_what_a_loss_does_not_reach_is_named() -> None:
    for strategy in STAGES[:3]:
        words = "the loss does not reach spare.weight, spare.bias"
        refused(UnusedParameterError, words, lambda strategy=strategy: ours(Net, one_head, adamw, strategy))


@pytest.mark.ranks(2, campaign=3)
def test_parameters_that_stage_3_has_put_away_are_named() -> None:
    def regularised(model: Any, batch: list[Tensor]) -> Tensor:
        return one_head(model, batch) + 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    reference = plain(Both, regularised, sgd)
    for strategy in STAGES[:2]:
        same(ours(Both, regularised, sgd, strategy), reference)
    for strategy in STAGES[2:]:
        for loss_fn in (regularised, penalty_loss):
            words = "Use strategy='deepspeed:stage=2'"
            refused(UsageError, words, lambda s=strategy, loss_fn=loss_fn: ours(Both, loss_fn, sgd, s))
        with started(strategy=strategy) as run:
            model, _ = run.prepare(*made(Both, sgd))
            refused(UsageError, "cannot be copied with copy.deepcopy", lambda model=model: copy.deepcopy(model))
            with torch.no_grad():
                model.trunk[0].weight.clamp_(-0.3, 0.3)
            for batch in run.loader(data(torch.float32), global_batch=BATCH):
                write = "the script wrote to trunk.0.weight"
                refused(UsageError, write, lambda run=run, m=model, b=batch: run.forward_backward(one_head, m, b))
                break


@pytest.mark.ranks(2, campaign=3)
def test_gradients_and_state_that_are_in_slices_are_not_looked_at_in_silence() -> None:
    for strategy in STAGES:
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*made(Both, sgd))
            for batch in run.loader(data(torch.float32), global_batch=BATCH):
                run.forward_backward(one_head, model, batch)
                clip = nn.utils.clip_grad_norm_
                refused(UsageError, "is sharded, and `.grad`", lambda m=model, clip=clip: clip(m.parameters(), 1.0))
                refused(UsageError, "run.save and run.restore", optimizer.state_dict)
                if "stage=3" in strategy:
                    refused(UsageError, "run.save and run.restore", model.state_dict)
                run.step(optimizer)
                clip(model.parameters(), 1.0)  # there are none now, as in plain PyTorch
                model.head.bias.requires_grad_(False)
                break
            for batch in run.loader(data(torch.float32), global_batch=BATCH, name="again"):
                again = "requires_grad of head.bias was changed"
                refused(UsageError, again, lambda run=run, m=model, b=batch: run.forward_backward(one_head, m, b))
                break
        with started(strategy=strategy) as run:
            model, optimizer = run.prepare(*made(Both, sgd))
            for batch in run.loader(data(torch.float32), global_batch=BATCH):
                refused(UsageError, "loss.backward() was called directly", one_head(model, batch).backward)
                break
