"""`tensor` on several processes, against plain PyTorch on the whole global batch."""

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
    make,
    plainly,
    same,
    started,
    under_paceline,
    whole,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import ModelError, SettingError


class Attention(nn.Module):
    """Written for one device: it knows nothing of parts."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.fused = heads, fused
        self.scale = nn.Parameter(torch.rand(width // heads))
        self.register_buffer("mask", torch.ones(8, 8).tril() == 0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, width // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        q = F.normalize(q, dim=-1) * self.scale  # a parameter that is whole, between cut ones
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            y = scores.masked_fill(self.mask[:t, :t], float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, width))


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention(8, 4, fused)
        self.mlp = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """The tokens and the vector of an example -> scores of 3 classes."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.embed, self.vector = nn.Embedding(12, 8), nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(fused), Block(fused)])
        self.head, self.spare = nn.Linear(8, 12), nn.Linear(8, 3)

    def features(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.vector(x).unsqueeze(1)
        for block in self.blocks:
            h = block(h)
        return h

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.features(x, tokens))


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    h = model.features(x, tokens)
    return F.cross_entropy(model.spare(h.mean(1)), y) + model.head(h).square().mean((1, 2)).mean()


def counted(model: nn.Module, batch: list[Tensor]) -> Any:
    x, tokens, y = batch
    scores = model(x, tokens)
    keep = tokens > 2
    total = F.cross_entropy(scores[keep], tokens[keep], reduction="sum")
    return paceline.Total(total, keep.sum()), F.cross_entropy(scores[:, 0], y)


def trained(model: Callable[[], nn.Module], loss: Loss, strategy: Any, **options: Any) -> nn.Module:
    return under_paceline(model, loss, strategy=strategy, **options)


def fused() -> nn.Module:
    return Transformer(fused=True)


PLAN = (
    "embed:row,vector:gather,head:gather,blocks.*.attention.[qkv]:column,blocks.*.attention.out:row,"
    "blocks.*.mlp.0:column,blocks.0.mlp.2:row"  # blocks.1's output is whole: the cut one is joined where it is needed
)


def strategies() -> list[Any]:
    size = dist.get_world_size()
    return ["tensor"] if size == 2 else ["tensor:size=2", "tensor:size=4"]


@pytest.mark.ranks(conformance=2, campaign=4)
def test_blocks_that_are_found_train_as_plain_pytorch() -> None:
    for strategy in strategies():
        for model, adam, micro, loop in (
            (Transformer, False, None, False),
            (fused, False, 2, True),
            (Transformer, True, 1, False),
        ):
            ours = trained(model, loss_fn, strategy, adam=adam, micro=micro, closure=not loop)
            same(ours, plainly(model, loss_fn, adam=adam), 1e-8 if adam else 1e-10)
    assert difference(ours, plainly(Transformer, loss_fn, adam=True, wrong=2.0)) > 1e-5


@pytest.mark.ranks(conformance=2, campaign=4)
def test_a_plan_that_is_given_trains_as_plain_pytorch() -> None:
    kinds = dict(part.rsplit(":", 1) for part in PLAN.split(","))
    for strategy in ("tensor:size=2,plan=" + PLAN, paceline.strategy("tensor", size=2, plan=kinds)):
        same(trained(Transformer, loss_fn, strategy), plainly(Transformer, loss_fn))


@pytest.mark.ranks(conformance=2, campaign=4)
def test_a_loss_with_counts_trains_as_plain_pytorch() -> None:
    for micro in (None, 1):
        ours = trained(Transformer, counted, strategies()[0], micro=micro)
        same(ours, plainly(Transformer, counted))


@pytest.mark.ranks(2, campaign=4)
def test_dropout_differs_on_the_parts_of_a_cut_activation_and_is_repeated() -> None:
    """Another mask on each part, the generators alike afterwards, and the same again in a second run."""

    def dropping() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 3))
        return model

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    first, second = (trained(dropping, loss, strategies()[0]) for _ in range(2))
    assert difference(first, second) == 0.0
    with started(strategy=strategies()[0]) as run:
        model = nn.Sequential(nn.Linear(6, 400), nn.Dropout(0.5), nn.Linear(400, 400)).double()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(1.0)
            model[2].weight.copy_(torch.eye(400))
        run.prepare(model)
        for _ in run.loader(data(), global_batch=BATCH):
            kept = (model(X[:1]) != 1.0).flatten()  # the output of the row layer is the mask, plus its bias
            after = torch.rand(4)
            break
        halves = kept.view(2, 200)
        assert 0.4 < float(kept.double().mean()) < 0.6, kept.double().mean()
        assert 0.4 < float((halves[0] == halves[1]).double().mean()) < 0.6, "the two parts drew the same mask"
        row = collected(torch.cat([kept.double(), after.double()]), run)
        assert row, "the devices of a group differ after a draw"


def collected(value: Tensor, run: paceline.Run) -> bool:
    """Whether it is the same on all processes of a group."""
    everyone = [torch.zeros_like(value) for _ in range(run.world.size)]
    dist.all_gather(everyone, value)
    size = run.world.size // run._strategy.plan.shards
    start = run.world.rank // size * size
    return all(torch.equal(other, value) for other in everyone[start : start + size])


@pytest.mark.ranks(2, full=4)
def test_evaluation_counts_each_example_once() -> None:
    for strategy in strategies():
        with started(strategy=strategy) as run:
            model, _ = run.prepare(*make(Transformer, False))
            reference = make(Transformer, False)[0]
            seen, total = 0, 0.0
            with torch.no_grad():
                for batch in run.loader(data(), global_batch=BATCH, train=False):
                    seen += len(batch[0])
                    total += float(model(batch[0], batch[1]).sum())
                expected = reference(X, TOKENS)
            assert run.sum(seen) == N
            assert abs(run.sum(total) - float(expected.sum())) < 1e-9
            assert abs(run.ratio(total, seen) - float(expected.sum()) / N) < 1e-9
            found = run.predict(model, data(), global_batch=BATCH, fn=lambda m, b: m(b[0], b[1]))
            assert found.shape == expected.shape
            assert float((found - expected).abs().max()) < 1e-12
            assert len(run.gather([1])) == run._strategy.plan.shards


@pytest.mark.ranks(conformance=2, campaign=4)
def test_clipping_and_values_that_are_not_finite_look_at_all_parts() -> None:
    strategy = strategies()[0]
    for skip in (False, True):
        settings = {"nonfinite": "skip"} if skip else {}
        same(trained(Transformer, loss_fn, strategy, clip=0.1, **settings), plainly(Transformer, loss_fn, clip=0.1))
    with started(strategy=strategy, nonfinite="skip") as run:
        model, optimizer = run.prepare(*make(Transformer, False))
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(loss_fn, model, batch)
            if run.skipped + run.steps == 1 and run.world.rank % 2 == 1:
                model.blocks[0].mlp[0].weight.grad.to_local().view(-1)[0] = float("inf")  # in one part only
            run.step(optimizer)
        assert (run.skipped, run.steps) == (1, len(range(0, N, BATCH)) - 1)
        assert all(bool(t.isfinite().all()) for t in whole(run, model, Transformer().double()).state_dict().values())


@pytest.mark.ranks(2, campaign=4)
def test_a_checkpoint_is_read_by_other_strategies_and_sizes() -> None:
    compare_checkpoints(Transformer, loss_fn, strategies())


@pytest.mark.ranks(conformance=2, campaign=4)
def test_optimizers_see_the_whole_parameter() -> None:
    """Fused kernels, and the slow and the fast path, on parameters of which some are cut and some are not. A norm over
    a parameter (LARS) is that of all of it."""

    class Lars(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.01})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-9)), alpha=-group["lr"])

    for make_one in (
        Lars,
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    ):
        ours = trained(Transformer, loss_fn, strategies()[0], adam=make_one, epochs=1)
        same(ours, plainly(Transformer, loss_fn, make_one, epochs=1), 1e-8)


@pytest.mark.ranks(2, campaign=4)
def test_an_operation_that_torch_cannot_cut_is_named() -> None:
    with started(strategy=strategies()[0]) as run:
        model, optimizer = make(lambda: Transformer(), False)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
        run.prepare(model, optimizer)
        for batch in run.loader(data(), global_batch=BATCH):
            run.forward_backward(loss_fn, model, batch)
            try:
                run.step(optimizer)
            except ModelError as error:
                assert "torch does not support" in str(error), error
                assert "Adafactor" in str(error), error
            else:
                raise AssertionError
            break


@pytest.mark.ranks(2, campaign=4)
def test_batch_norm_behind_cut_layers_is_that_of_plain_pytorch() -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[2])

    def normed() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
        )

    for strategy in strategies():
        same(trained(normed, loss, strategy), plainly(normed, loss))


@pytest.mark.ranks(2, campaign=4)
def test_parameters_are_frozen_and_unfrozen() -> None:
    def train(run: paceline.Run | None) -> Any:
        model, optimizer = make(Transformer, True)
        batches: Any = [[t[start : start + BATCH] for t in (X, TOKENS, Y)] for start in range(0, N, BATCH)]
        model.blocks[1].requires_grad_(False)
        if run is not None:
            run.prepare(model, optimizer)
            batches = run.loader(data(), global_batch=BATCH)
        for number, batch in enumerate(batches):
            if number == 2:
                model.blocks[1].requires_grad_(True)
                model.blocks[0].attention.requires_grad_(False)
            if run is None:
                loss_fn(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                run.backward(loss_fn(model, batch))
                run.step(optimizer)
        return model if run is None else whole(run, model, Transformer().double())

    for strategy in strategies():
        with started(strategy=strategy) as run:
            same(train(run), train(None), 1e-8)


@pytest.mark.ranks(conformance=2, campaign=4)
def test_16_bits_train_as_under_ddp() -> None:
    """As ddp computes it, up to the rounding of 16 bits."""

    def train(strategy: str, precision: str) -> Tensor:
        torch.manual_seed(0)
        with started(strategy=strategy, precision=precision) as run:
            model = Transformer()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            run.prepare(model, optimizer)
            if run._precision.scaler is not None:
                run._precision.scaler.scale = 2.0**8  # of which nothing overflows, however the shards are cut
            for batch in run.loader(TensorDataset(X.float(), TOKENS, Y), global_batch=BATCH):
                run.forward_backward(loss_fn, model, batch)
                run.step(optimizer, max_grad_norm=1.0)
            assert run.skipped == 0
            return nn.utils.parameters_to_vector(whole(run, model, Transformer()).parameters()).double()

    for precision in ("bf16", "fp16", "bf16-params"):
        ours, theirs = train(strategies()[0], precision), train("ddp", precision)
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2, precision


@pytest.mark.ranks(2, campaign=4)
def test_a_layer_added_later_is_alike_on_all_ranks() -> None:
    with started(strategy=strategies()[0]) as run:
        model, _ = run.prepare(*make(Transformer, False))
        torch.manual_seed(run.world.rank)
        model.extra = nn.Linear(8, 3).double()
        run.prepare(model)
        everyone = [torch.zeros_like(model.extra.weight) for _ in range(run.world.size)]
        dist.all_gather(everyone, model.extra.weight.detach())
        assert all(torch.equal(other, everyone[0]) for other in everyone)


@pytest.mark.ranks(2, campaign=4)
def test_memory_is_shared_out() -> None:
    with started(strategy="tensor") as run:
        model, optimizer = make(lambda: nn.Sequential(nn.Linear(6, 480), nn.Tanh(), nn.Linear(480, 6)), True)
        elements = sum(p.numel() for p in model.parameters())
        run.prepare(model, optimizer)
        for batch in run.loader(TensorDataset(X, Y), global_batch=BATCH):
            run.forward_backward(lambda m, b: F.cross_entropy(m(b[0]), b[1]), model, batch)
            run.step(optimizer)
        tensors = [*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())]
        held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors)
        assert held <= 2 * (elements / run.world.size + 6)


def tied() -> nn.Module:
    model = Transformer()
    with torch.no_grad():
        model.embed.weight.mul_(0.2)  # as large as a Linear's are
    model.head.weight = model.embed.weight
    return model


@pytest.mark.ranks(conformance=2, campaign=4)
def test_tied_weights_are_cut_together() -> None:
    """By a plan for both layers, or for one of them, which the other follows."""
    for plan in ("embed:row,head:column", "embed:row,head:gather", "head:gather", "embed:row", "embed:column"):
        same(trained(tied, loss_fn, f"tensor:size=2,plan={plan}"), plainly(tied, loss_fn))
    same(trained(tied, loss_fn, strategies()[0], adam=True), plainly(tied, loss_fn, adam=True), 1e-8)


def refused(build: Callable[[], Any], kind: type[Exception], *words: str, strategy: Any = None) -> None:
    try:
        with started(strategy=strategy or strategies()[0]) as run:
            run.prepare(build())
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(words)


@pytest.mark.ranks(2, campaign=4)
def test_what_cannot_be_cut_is_refused() -> None:
    size = dist.get_world_size()
    refused(lambda: nn.Linear(4, 4), ModelError, "found nothing in Linear to split", "plan=", "strategy='ddp'")
    refused(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), ModelError, "out_features=5", "2 devices"
    )
    refused(lambda: nn.ModuleDict({"a": Attention(12, 3, False)}), ModelError, "has 3 heads", "2 devices")
    for plan, words in (
        ("blocks.*.mlp.7:column", ["blocks.*.mlp.7 fits no layer", "blocks.0.mlp.0"]),
        ("spare:column", ["the layer spare has out_features=3"]),
        ("blocks.0.norm1:row", ["blocks.0.norm1 is a LayerNorm"]),
    ):
        spec = paceline.strategy("tensor", size=2, plan=plan)
        refused(Transformer, ModelError, *words, strategy=spec)

    refused(
        tied, ModelError, "embed:column and head:gather share", strategy="tensor:size=2,plan=embed:column,head:gather"
    )
    for strategy, words in (
        ("tensor:plan=up", ["pattern:kind"]),
        ("tensor:plan=up:colum", ["Did you mean 'column'"]),
        ("tensor:size=3", ["size=3", f"number of processes, {size}"]),
        ("tensor:size=1", ["size=1"]),
    ):
        refused(Transformer, SettingError, *words, strategy=strategy)
