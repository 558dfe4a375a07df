"""The pipeline on several processes: schedules, cuts, several pipelines beside each other, state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.strategies.checks import (
    BATCH,
    TOKENS,
    Loss,
    N,
    X,
    Y,
    compare_checkpoints,
    data,
    difference,
    layers,
    make,
    plainly,
    same,
    sequential_loss,
    started,
    under_paceline,
    whole,
)
from torch import Tensor, nn

import paceline
from paceline.errors import ModelError, SettingError, UsageError


def strategies() -> list[str]:
    return ["pipeline"] if dist.get_world_size() == 2 else ["pipeline:stages=2", "pipeline:stages=4"]


def trained(model: Callable[[], nn.Module], loss: Loss, strategy: str, **options: Any) -> nn.Module:
    return under_paceline(model, loss, strategy=strategy, **options)


def two_counts(model: nn.Module, batch: list[Tensor]) -> Any:
    """A mean over examples and two sums over other numbers of things."""
    output = model(batch[0])
    each, chosen = F.cross_entropy(output, batch[2], reduction="none"), batch[2] > 0
    tokens = (batch[1] > 4).sum()
    return (
        paceline.Total((each * chosen).sum(), chosen.sum()),
        output.square().mean(),
        paceline.Total(output.sum(), tokens),
    )


@pytest.mark.ranks(2, campaign=4)
def test_every_schedule_trains_as_plain_pytorch() -> None:
    for strategy in strategies():
        for schedule in ("gpipe", "1f1b", "naive"):
            name = f"{strategy}{',' if ':' in strategy else ':'}schedule={schedule}"
            for adam, micro in ((False, 1), (True, 2)):
                ours = trained(layers, sequential_loss, name, adam=adam, micro=micro, batch=9)
                same(ours, plainly(layers, sequential_loss, adam, batch=9), 1e-8 if adam else 1e-10)


@pytest.mark.ranks(2, campaign=4)
def test_a_loss_with_several_counts_trains_as_plain_pytorch() -> None:
    for strategy in strategies():
        for micro in (None, 2):
            same(trained(layers, two_counts, strategy, micro=micro), plainly(layers, two_counts))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Traced(nn.Module):
    """No nn.Sequential: a loop over blocks, functions, additions, an argument with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Residual() for _ in range(4)])
        self.shift = nn.Parameter(torch.zeros(8))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        x = self.first(x) * scale
        y = x + self.shift
        for block in self.blocks:
            y = block(y)
        return self.last(F.gelu(y).flatten(1))


@pytest.mark.ranks(2, campaign=4)
def test_a_model_that_is_no_sequential_trains_as_plain_pytorch() -> None:
    for strategy in strategies():
        for micro in (None, 1):
            same(trained(Traced, sequential_loss, strategy, micro=micro), plainly(Traced, sequential_loss))

    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2)

    def own() -> nn.Module:
        return Own(*layers())

    for precision in ("fp32", "bf16"):  # whose class wraps the forward
        ours = trained(own, sequential_loss, "pipeline:stages=2", precision=precision)
        if precision == "fp32":
            same(ours, plainly(own, sequential_loss))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_cuts_that_are_given_train_as_plain_pytorch_and_wrong_ones_are_refused() -> None:
    size = dist.get_world_size()
    reference = plainly(layers, sequential_loss)
    for options in ("cut=1", "cut=4", "balance=cost", "balance=parameters"):
        same(trained(layers, sequential_loss, f"pipeline:stages=2,{options}", micro=2), reference)
    same(trained(Traced, sequential_loss, "pipeline:stages=2,cut=blocks.2"), plainly(Traced, sequential_loss))
    with started(strategy="pipeline:stages=2,cut=3") as run:
        model = layers().double()
        run.prepare(model)
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(sequential_loss, model, batch)
            break
        mine = [p.numel() > 0 for p in model.parameters()]
        assert mine == (
            [True, True, False, False, False, False]
            if run.world.rank % 2 == 0
            else [False, False, True, True, True, True]
        ), mine
    for options, kind, words in (
        ("cut=9", SettingError, ["cut='9'", "from 1 to 5"]),
        ("cut=2,4", SettingError, ["2 stages need 1 split point"]),
        ("cut=nothing", SettingError, ["no layer 'nothing'", "Known: 0, 3, 5"]),
        ("schedule=1f1", SettingError, ["Did you mean '1f1b'"]),
        ("balance=time", SettingError, ["balance='time'", "cost, parameters"]),
        ("stages=3", SettingError, ["stages=3", f"number of processes, {size}"]),
    ):
        text = f"pipeline:{options}" if "stages" in options else f"pipeline:stages=2,{options}"
        refused(layers, kind, *words, strategy=text)


def refused(build: Callable[[], nn.Module], kind: type[Exception], *words: str, strategy: str) -> None:
    """At `prepare`, or at the first batch."""
    try:
        trained(build, sequential_loss, strategy)
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)


@pytest.mark.ranks(2, campaign=4)
def test_models_that_cannot_be_cut_are_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    class ByValue(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > 0 else self.b(x)

    for build in (Branches, ByValue):
        words = "has no layer call at which only a single tensor"
        refused(build, ModelError, words, strategy="pipeline:stages=2")
    refused(lambda: nn.Sequential(nn.Linear(6, 3)), ModelError, "too few for", strategy="pipeline")


@pytest.mark.ranks(2, full=4)
def test_batch_norm_over_several_pipelines_is_that_of_plain_pytorch() -> None:
    def normed() -> nn.Module:
        return layers(True)

    for strategy in strategies():
        same(trained(normed, sequential_loss, strategy), plainly(normed, sequential_loss))


@pytest.mark.ranks(2, campaign=4)
def test_frozen_stages_tokens_and_empty_shards_train_as_plain_pytorch() -> None:
    def tokens() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3))

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[1]), batch[2])

    def frozen() -> nn.Module:
        model = tokens()
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        return model

    for strategy in strategies():
        for batch in (BATCH, 3):  # 22 = 7 x 3 + 1: of two pipelines one has nothing
            same(trained(tokens, loss, strategy, batch=batch), plainly(tokens, loss, False, batch=batch))
            same(trained(layers, two_counts, strategy, batch=batch), plainly(layers, two_counts, False, batch=batch))
        same(trained(frozen, loss, strategy, micro=2), plainly(frozen, loss))


@pytest.mark.ranks(2, campaign=4)
def test_clipping_looks_at_all_stages() -> None:
    for strategy in strategies():
        ours = trained(layers, sequential_loss, strategy, micro=2, clip=0.3, nonfinite="skip")
        same(ours, plainly(layers, sequential_loss, clip=0.3))
    with started(strategy=strategies()[0], nonfinite="skip") as run:
        model, optimizer = run.prepare(*make(layers, False))
        for batch in run.loader(data(), global_batch=BATCH):
            bad = run.steps + run.skipped == 1
            run.forward_backward(lambda m, b, bad=bad: sequential_loss(m, b) * (1e400 if bad else 1.0), model, batch)
            if not bad and run.steps == 2 and run.world.rank % 2 == 0:
                next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = float("nan")
            run.step(optimizer)
        assert (run.skipped, run.steps) == (3, 2), (run.skipped, run.steps)  # the second of five, and the last two


@pytest.mark.ranks(2, campaign=4)
def test_a_stage_keeps_only_its_own() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 3))

    with started(strategy="pipeline") as run:
        model, optimizer = run.prepare(*make(wide, True))
        elements = sum(p.numel() for p in wide().parameters())
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(sequential_loss, model, batch)
            grads = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
            run.step(optimizer)
            held = sum(p.numel() for p in model.parameters())
            state = sum(s["exp_avg"].numel() for s in optimizer.state.values())
            assert held == grads == state <= 0.6 * elements, (held, grads, state, elements)
        try:
            model.state_dict()
        except UsageError as error:
            assert "run.export" in str(error)
        else:
            raise AssertionError
        with torch.no_grad():
            first = model(X)
        assert sum(p.numel() for p in model.parameters()) == elements
        for batch in run.loader(data(), global_batch=BATCH, name="again"):
            run.forward_backward(sequential_loss, model, batch)
            with torch.no_grad():
                assert float((model(X) - first).abs().max()) < 1e-12  # evaluated between a backward and its step
            run.step(optimizer)
            break
        with torch.no_grad():
            assert float((model(X) - first).abs().max()) > 1e-4


@pytest.mark.ranks(2, campaign=4)
def test_evaluation_counts_each_example_once() -> None:
    for strategy in strategies():
        with started(strategy=strategy) as run:
            model, _ = run.prepare(*make(layers, False))
            expected = make(layers, False)[0](X)
            seen = sum(len(batch[0]) for batch in run.loader(data(), global_batch=BATCH, train=False))
            assert run.sum(seen) == N
            found = run.predict(model, data(), global_batch=BATCH)
            assert float((found - expected).abs().max()) < 1e-12


@pytest.mark.ranks(2, campaign=4)
def test_two_optimizers_one_of_which_a_stage_has_nothing_of() -> None:
    def train(run: paceline.Run | None) -> Any:
        model = make(layers, False)[0]
        one = torch.optim.SGD([*model[0].parameters()], lr=0.05)
        two = torch.optim.AdamW([*model[3].parameters(), *model[5].parameters()], lr=0.01)
        if run is None:
            for start in range(0, N, BATCH):
                rows = [t[start : start + BATCH] for t in (X, TOKENS, Y)]
                sequential_loss(model, rows).backward()
                two.step()
                two.zero_grad()
                one.step()
                one.zero_grad()
            return model
        run.prepare(model, one, two)
        for batch in run.loader(data(), global_batch=BATCH, micro_batch=2):
            run.forward_backward(sequential_loss, model, batch, optimizer=two)
            run.forward_backward(sequential_loss, model, batch, optimizer=one)
            run.step(two)
            run.step(one)
        return whole(run, model, layers().double())

    for strategy in strategies():
        with started(strategy=strategy) as run:
            same(train(run), train(None), 1e-8)


@pytest.mark.ranks(2, campaign=4)
def test_a_checkpoint_is_read_by_other_strategies_and_sizes() -> None:
    others = [f"{name}{',' if ':' in name else ':'}balance=cost" for name in strategies()]
    compare_checkpoints(layers, sequential_loss, others)


@pytest.mark.ranks(2, campaign=4)
def test_dropout_differs_from_stage_to_stage_and_is_repeated() -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    name = "pipeline:stages=2,cut=2"
    first, second = (trained(dropping, sequential_loss, name, micro=2) for _ in range(2))
    assert difference(first, second) == 0.0
    with started(strategy=name) as run:
        masks: list[Tensor] = []
        model = dropping().double()
        for place in (1, 3):
            model[place].register_forward_hook(
                lambda m, inputs, output: masks.append((output != 0) | (inputs[0] == 0)) if m.training else None
            )
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.loader(data(), global_batch=8):
            run.forward_backward(sequential_loss, model, batch)
            break
        everyone: list[Any] = [None] * run.world.size
        dist.all_gather_object(everyone, masks[-1])
        assert 0.4 < float((everyone[0] == everyone[1]).double().mean()) < 0.6, "both stages drew the same mask"
