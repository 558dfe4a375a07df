"""A model, its data and a plain loop over the whole data, for the tests of fit, evaluate and predict."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset

import paceline
from paceline.data.randomness import permutation

N, BATCH, EPOCHS = 22, 5, 3  # the last global batch has 2 examples: an empty shard on 3 processes
G = torch.Generator().manual_seed(7)
X = torch.randn(N, 6, generator=G, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=G)
TEST_X = torch.randn(17, 6, generator=G, dtype=torch.float64)
TEST_Y = torch.randint(3, (17,), generator=G)
TRAIN, TEST = TensorDataset(X, Y), TensorDataset(TEST_X, TEST_Y)


def net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def adamw(model: nn.Module, lr: float = 0.05) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def loss_fn(model: Any, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def weighted(model: Any, batch: list[Tensor]) -> paceline.Total:
    """A mean over something else than examples: as many things as the label says, plus one."""
    counts = batch[1] + 1
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return paceline.Total((losses * counts).sum(), counts.sum())


@contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", progress="off", **settings)
    try:
        yield run
    finally:
        run.close()


def near(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    pairs = zip(a.parameters(), b.parameters(), strict=True) if isinstance(a, nn.Module) else [(a, b)]
    for one, other in pairs:
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def equal(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


def plainly(loss: Callable[[nn.Module, list[Tensor]], Any], epochs: int = EPOCHS) -> tuple[nn.Module, list[float]]:
    """The loop by hand, on the whole global batch, with the order that Paceline draws; and each epoch's mean loss."""
    model = net()
    optimizer = adamw(model)
    schedule = CosineAnnealingLR(optimizer, 20)
    means = []
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(N, 0, "train", epoch))
        top = bottom = 0.0
        for rows in order.split(BATCH):
            result = loss(model, [X[rows], Y[rows]])
            value, count = (
                (result.sum / result.count, float(result.count))
                if isinstance(result, paceline.Total)
                else (result, len(rows))
            )
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            top, bottom = top + value.item() * count, bottom + count
        means.append(top / bottom)
    return model, means


def fitted(loss: Any = loss_fn, *, strategy: str | None = None, **options: Any) -> tuple[nn.Module, paceline.History]:
    with started(strategy=strategy) as run:
        model = net()
        optimizer = adamw(model)
        history = paceline.fit(
            model,
            loss,
            TRAIN,
            optimizer=optimizer,
            global_batch=BATCH,
            epochs=EPOCHS,
            scheduler=CosineAnnealingLR(optimizer, 20),
            max_grad_norm=0.5,
            run=run,
            **options,
        )
        return model, history


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Weights, gradients, optimizer state and random generators are after the block as they were before it."""

    def draws() -> tuple[Any, ...]:
        return torch.rand(2).tolist(), random.random(), np.random.rand()

    def seed() -> None:
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(3)

    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    seed()
    drawn = draws()
    seed()
    yield
    assert draws() == drawn
    equal(model, before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for number, own in after["state"].items():
        assert torch.equal(own["momentum_buffer"], state["state"][number]["momentum_buffer"])
