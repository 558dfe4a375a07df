"""Whole training jobs that read alike for Paceline and for plain PyTorch: `run` is a paceline.Run, or `Plainly`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.strategies.checks import BATCH, EPOCHS, TOKENS, N, Net, X, Y, started
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

import paceline

NOISE = torch.randn(N, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = (X, TOKENS, Y, NOISE)


class Plainly:
    """What a job calls of a run, in plain PyTorch: every batch is the whole global batch."""

    def __init__(self) -> None:
        self._schedulers: list[Any] = []

    def prepare(self, *objects: Any) -> None:
        self._schedulers += [thing for thing in objects if isinstance(thing, ExponentialLR)]

    def loader(
        self, dataset: TensorDataset, *, global_batch: int, micro_batch: int | None = None
    ) -> list[list[Tensor]]:
        return [[t[at : at + global_batch] for t in dataset.tensors] for at in range(0, N, global_batch)]

    def forward_backward(self, loss_fn: Any, model: Any, batch: Any, optimizer: Any = None) -> None:
        result = loss_fn(model, batch)
        losses = [
            item.sum / item.count if isinstance(item, paceline.Total) else item
            for item in (result if isinstance(result, tuple) else (result,))
        ]
        inputs = None if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        torch.stack(losses).sum().backward(inputs=inputs)

    def step(self, optimizer: torch.optim.Optimizer, max_grad_norm: float | None = None) -> None:
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in self._schedulers:
            if scheduler.optimizer is optimizer:
                scheduler.step()


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.05)


class Tied(nn.Module):
    """Batch norm, a tied layer, and a buffer that a forward assigns to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.first.weight
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.head(self.again(self.norm(self.first(x)).tanh()))


def classes(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


def norm(run: Any, kind: str, micro: int | None) -> list[nn.Module]:
    """Batch norm over the global batch, a schedule, clipping, a layer that is frozen for an epoch."""
    torch.manual_seed(0)
    model = Tied().double()
    optimizer = optimizer_of(kind, model.parameters())
    run.prepare(model, optimizer, ExponentialLR(optimizer, 0.9))
    loader = run.loader(TensorDataset(*DATA), global_batch=BATCH)
    for epoch in range(EPOCHS):
        model.first.requires_grad_(epoch != 1)
        for batch in loader:
            run.forward_backward(classes, model, batch)
            run.step(optimizer, max_grad_norm=1.0)
    return [model]


def counts(run: Any, kind: str, micro: int | None) -> list[nn.Module]:
    """A sum over tokens beside a mean over examples, in micro-batches; two groups of options; an unreached head."""

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Any:
        x, tokens, y, _ = batch
        chosen = tokens > 4
        features = model.features(x, tokens)  # type: ignore[operator]
        each = (features.mean(1, keepdim=True) - tokens).square()
        return paceline.Total((each * chosen).sum(), chosen.sum()), F.cross_entropy(model.head(features), y)  # type: ignore[operator]

    torch.manual_seed(0)
    model = Net().double()
    groups = [{"params": model.trunk.parameters(), "lr": 0.02}, {"params": [*model.embed.parameters()]}]
    optimizer = optimizer_of(kind, [*groups, {"params": [*model.head.parameters(), *model.spare.parameters()]}])
    run.prepare(model, optimizer, ExponentialLR(optimizer, 0.9))
    loader = run.loader(TensorDataset(*DATA), global_batch=BATCH, micro_batch=micro)
    for _ in range(EPOCHS):
        for batch in loader:
            run.forward_backward(loss_fn, model, batch)
            run.step(optimizer, max_grad_norm=6.2)
    return [model]


def gan(run: Any, kind: str, micro: int | None) -> list[nn.Module]:
    """Two models in one closure, two optimizers, two backward calls for one of them."""

    def judged(model: nn.Module, pictures: Tensor, real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(pictures), torch.full((len(pictures), 1), real).to(pictures))

    def real_loss(models: Any, batch: list[Tensor]) -> Tensor:
        return judged(models["d"], batch[0], 1.0)

    def fake_loss(models: Any, batch: list[Tensor]) -> Tensor:
        return judged(models["d"], models["g"](batch[3]).detach(), 0.0)

    def fool_loss(models: Any, batch: list[Tensor]) -> Tensor:
        return judged(models["d"], models["g"](batch[3]), 1.0)

    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    models = {"g": generator, "d": critic}
    opt_g, opt_d = (optimizer_of(kind, model.parameters()) for model in (generator, critic))
    run.prepare(generator, critic, opt_g, opt_d, ExponentialLR(opt_g, 0.9))
    loader = run.loader(TensorDataset(*DATA), global_batch=BATCH)
    for _ in range(EPOCHS):
        for batch in loader:
            run.forward_backward(real_loss, models, batch, optimizer=opt_d)
            run.forward_backward(fake_loss, models, batch, optimizer=opt_d)
            run.step(opt_d)
            run.forward_backward(fool_loss, models, batch, optimizer=opt_g)
            run.step(opt_g)
    return [generator, critic]


def sparse(run: Any, kind: str, micro: int | None) -> list[nn.Module]:
    """Sparse gradients of an embedding, and dense ones."""
    torch.manual_seed(0)
    model = Net(sparse=True).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(*DATA), global_batch=BATCH)
    for _ in range(EPOCHS):
        for batch in loader:
            run.forward_backward(lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), model, batch)
            run.step(optimizer)
    return [model]


def rarely(run: Any, kind: str, micro: int | None) -> list[nn.Module]:
    """Two optimizers, one of which moves only after every second batch, with the gradients of both."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    often, seldom = optimizer_of(kind, model[0].parameters()), optimizer_of(kind, model[2].parameters())
    run.prepare(model, often, seldom)
    loader = run.loader(TensorDataset(*DATA), global_batch=BATCH, micro_batch=micro)
    for _ in range(EPOCHS):
        steps = 0
        for batch in loader:
            run.forward_backward(classes, model, batch)
            if run.step(often) is not False:
                steps += 1
                if steps % 2 == 0:
                    run.step(seldom)
    return [model]


JOBS: dict[str, Callable[[Any, str, int | None], list[nn.Module]]] = {
    job.__name__: job for job in (norm, counts, gan, sparse, rarely)
}


# --- checkpoints

FOLDERS = "PACELINE_TEST_FOLDERS"


def leg(strategy: str | None, folder: Path | None) -> tuple[nn.Module, dict[str, Any]]:
    """Three epochs, of which the seventh step saves into an empty folder and ends; else it goes on from there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = optimizer_of("adamw", model.parameters())
    with started(strategy=strategy, progress="off") as run:
        run.prepare(model, optimizer, ExponentialLR(optimizer, 0.9))
        loader = run.loader(TensorDataset(*DATA), global_batch=5, shuffle=True)
        restored = folder is not None and run.restore(folder, missing_ok=True)
        for _ in run.epochs(3):
            for batch in loader:
                run.forward_backward(classes, model, batch)
                run.step(optimizer)
                if folder is not None and not restored and run.steps == 7:
                    run.save(folder)
                    return model, {}
        return model, run._strategy.state_dict()["optimizers"][0]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([t.detach().double().flatten() for t in model.state_dict().values()])


def legs_on_ranks() -> list[list[float]]:
    """On each of several ranks, under the strategy that they have if none is named (tests/ranks.py)."""
    return [flat(leg(None, Path(folder))[0]).tolist() for folder in os.environ[FOLDERS].splitlines()]
