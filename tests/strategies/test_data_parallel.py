"""data_parallel follows its model: buffers, layers and numbers that change after `prepare`. And it refuses, in the
closure, what would see one replica only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.strategies import checks
from torch import Tensor, nn

import paceline
from paceline.errors import UsageError

STRATEGY = "data_parallel:devices=cpu,cpu,cpu"


class Moving(nn.Module):
    """Assigns a new tensor to its buffer in each forward, of another shape in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.scale = 1.0
        self.register_buffer("center", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x) * self.scale
        self.center = self.center.expand(3) * 0.9 + torch.tensor([0.1, 0.2, 0.3])
        return output - self.center


def train(model: nn.Module, change: Callable[[nn.Module, Any, int], None], strategy: str | None) -> nn.Module:
    """3 epochs, with `change` before each. Without a strategy, in plain PyTorch."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = [[t[start : start + 5] for t in (checks.X, checks.TOKENS, checks.Y)] for start in range(0, checks.N, 5)]
    if strategy is None:
        for epoch in range(3):
            change(model, optimizer, epoch)
            for batch in batches:
                checks.sequential_loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model
    with checks.started(strategy=strategy) as run:
        run.prepare(model, optimizer)
        loader = run.loader(checks.data(), global_batch=5)
        for epoch in run.epochs(3):
            change(model, optimizer, epoch)
            if change is grown:
                run.prepare(model)
            for batch in loader:
                run.forward_backward(checks.sequential_loss, model, batch)
                run.step(optimizer)
    return model


def nothing(model: nn.Module, optimizer: Any, epoch: int) -> None:
    return None


def rescaled(model: nn.Module, optimizer: Any, epoch: int) -> None:
    model.scale = 1.0 / (1 + epoch)  # type: ignore[assignment]


def grown(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        torch.manual_seed(1)
        layer = nn.Linear(3, 3).double()
        model.append(layer)  # type: ignore[operator]
        optimizer.add_param_group({"params": layer.parameters()})


def extended(model: nn.Module, optimizer: Any, epoch: int) -> None:
    """By layers that nothing trains."""
    if epoch:
        layer = nn.Linear(3, 3, bias=False).double()
        nn.init.eye_(layer.weight)
        model.append(layer)  # type: ignore[operator]


def retied(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model[2].weight = model[0].weight  # type: ignore[operator, union-attr]


def replaced(model: nn.Module, optimizer: Any, epoch: int) -> None:
    if epoch == 1:
        model[1] = nn.ReLU()  # type: ignore[operator]


def frozen(model: nn.Module, optimizer: Any, epoch: int) -> None:
    model[0].requires_grad_(epoch != 1)  # type: ignore[operator]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("build", "change"),
    [
        (Moving, nothing),
        (Moving, rescaled),
        (mlp, grown),
        (mlp, extended),
        (mlp, replaced),
        (mlp, frozen),
        (square, retied),
    ],
    ids=lambda thing: thing.__name__,
)
def test_copies_follow_a_model_that_changes(build: Callable[[], nn.Module], change: Any) -> None:
    torch.manual_seed(0)
    model, plain = build(), build()
    plain.load_state_dict(model.state_dict())
    checks.same(train(model, change, STRATEGY), train(plain, change, None))


def test_a_forward_over_one_optimizers_parameters() -> None:
    """The copies of given parameters are found too."""

    def trained(strategy: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp().double()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[operator]
        second = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[operator]
        with checks.started(strategy=strategy) as run:
            run.prepare(model, first, second)
            for batch in run.loader(checks.data(), global_batch=5):
                for optimizer in (first, second):
                    run.forward_backward(checks.sequential_loss, model, batch, optimizer=optimizer)
                    run.step(optimizer)
        return model

    checks.same(trained(STRATEGY), trained("single"))


@pytest.mark.parametrize(
    "call",
    [
        lambda run, x: run.gather(x),
        lambda run, x: run.gather([1]),
        lambda run, x: run.sum(1),
        lambda run, x: run.mean(x),
        lambda run, x: run.ratio(1, 2),
    ],
)
def test_what_would_see_one_replica_is_refused_in_the_closure(call: Callable[[paceline.Run, Tensor], Any]) -> None:
    """`run.world.rank` is 0 in each replica, so that a script could not find its rows in what was gathered either."""
    with checks.started(strategy=STRATEGY) as run:
        model = mlp().double()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
            call(run, batch[0])
            return F.cross_entropy(model(batch[0]), batch[2])

        for batch in run.loader(checks.data(), global_batch=6):
            with pytest.raises(UsageError, match=r"run\.gather.* in the loss function.*--strategy ddp"):
                run.forward_backward(loss_fn, model, batch)
            break
        assert call(run, checks.X) is not None, "and outside it is as ever"
