"""Models and data of the tests of strategies, trained under Paceline and in plain PyTorch on the whole global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.step import call_check

N, BATCH, EPOCHS = 22, 5, 3  # the last global batch has 2 examples: an empty shard on 3 processes
G = torch.Generator().manual_seed(7)
X = torch.randn(N, 6, generator=G, dtype=torch.float64)
TOKENS = torch.randint(9, (N, 4), generator=G)
Y = torch.randint(3, (N,), generator=G)
Loss = Callable[[nn.Module, list[Tensor]], Any]


class Net(nn.Module):
    """A trunk, two heads, an embedding."""

    def __init__(self, sparse: bool = False, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6, sparse=sparse)
        self.trunk = nn.Sequential(
            nn.Linear(6, 8, bias=not norm), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Tanh(), nn.Linear(8, 8)
        )
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.head(self.features(x, tokens))

    def features(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.trunk(x + self.embed(tokens).mean(1)).tanh()


def data() -> TensorDataset:
    return TensorDataset(X, TOKENS, Y)


def both_heads(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    features = model.features(x, tokens)  # another method than forward
    return F.cross_entropy(model.head(features), y) + F.cross_entropy(model.spare(features), y)


def one_head(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, tokens, y = batch
    return F.cross_entropy(model(x, tokens), y)


def make(model: Callable[[], nn.Module], adam: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    built = model().double()
    if adam:
        return built, torch.optim.AdamW(built.parameters(), lr=0.01)
    return built, torch.optim.SGD(built.parameters(), lr=0.05, momentum=0.9)


def plainly(model: Callable[[], nn.Module], loss_fn: Loss, adam: bool = False, wrong: float = 1.0) -> nn.Module:
    built, optimizer = make(model, adam)
    for _ in range(EPOCHS):
        for start in range(0, N, BATCH):
            (loss_fn(built, [t[start : start + BATCH] for t in (X, TOKENS, Y)]) * wrong).backward()
            optimizer.step()
            optimizer.zero_grad()
    return built


@contextmanager
def calls_not_compared() -> Iterator[None]:
    """A run that is started within makes no comparison of the calls of its steps: as in all but the first of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_check, "COMPARED", 0)
        yield


@contextmanager
def started(**settings: Any) -> Iterator[paceline.Run]:
    run = paceline.start(device="cpu", **settings)
    try:
        yield run
    finally:
        run.close()


def under_paceline(
    model: Callable[[], nn.Module],
    loss_fn: Loss,
    *,
    adam: bool = False,
    closure: bool = True,
    micro: int | None = None,
    **settings: Any,
) -> nn.Module:
    with started(**settings) as run:
        built, optimizer = run.prepare(*make(model, adam))
        loader = run.loader(data(), global_batch=BATCH, micro_batch=micro)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                if closure:
                    run.forward_backward(loss_fn, built, batch)
                else:
                    run.backward(loss_fn(built, batch))
                run.step(optimizer)
        if run._strategy.plan.whole_shards:
            run._strategy.state_dict()  # a process of a pipeline has a part of the model: now it has all
    return built


def difference(one: nn.Module, other: nn.Module) -> float:
    a = torch.cat([t.detach().double().flatten() for t in one.state_dict().values()])
    b = torch.cat([t.detach().double().flatten() for t in other.state_dict().values()])
    return float((a - b).norm() / b.norm())


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-10) -> None:
    assert difference(one, other) <= tolerance, difference(one, other)


def named(function: Callable[[], object], error: type[Exception], *words: str) -> None:
    try:
        function()
    except error as raised:
        assert all(word in str(raised) for word in words), str(raised)
    else:
        raise AssertionError(f"not noticed: {words}")


def by_data(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Which head a loss reaches depends on the examples: rows with y = 0 go to the spare one."""
    x, tokens, y = batch
    features = model.features(x, tokens)
    total = features.sum() * 0
    for head, chosen in ((model.head, y > 0), (model.spare, y == 0)):
        if chosen.any():
            total = total + F.cross_entropy(head(features[chosen]), y[chosen], reduction="sum")
    return total / max(len(y), 1)


# --- models and losses that a pipeline can cut


def layers(norm: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8, bias=not norm),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 3),
    )


def sequential_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[2])


def counted_loss(model: nn.Module, batch: list[Tensor]) -> Any:
    """A sum over the rows whose label is not 0: another number in every micro-batch, sometimes none."""
    chosen = batch[2] > 0
    total = (F.cross_entropy(model(batch[0]), batch[2], reduction="none") * chosen).sum()
    return paceline.Total(total, chosen.sum())
