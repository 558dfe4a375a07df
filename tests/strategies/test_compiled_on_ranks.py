"""torch.compile under ddp: where the backward is cut, so that buckets are sent before it has ended."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

import paceline

WIDTH, LAYERS = 512, 6  # the weight of one layer is 1 MB
X, Y = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), torch.zeros(8, WIDTH)
SENT, CUT = "gloo:all_reduce", "CompiledFunctionBackward"


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def wrapped() -> Any:
    torch._dynamo.reset()
    return torch.compile(Layers(), backend="aot_eager")


def with_a_layer_wrapped() -> nn.Module:
    """Only a part of the model is compiled, by its script."""
    torch._dynamo.reset()
    model = nn.Sequential(Layers(), nn.Linear(WIDTH, WIDTH))
    model[0].compile(backend="aot_eager")
    return model


def order_in_last_backward(trained: Generator[None], steps: int = 3) -> list[str]:
    """Of the last step: the pieces of the backward and the sent buckets, in the order in which they began."""
    for _ in range(steps):
        next(trained)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        next(trained)
    events = [(e.time_range.start, e.name) for e in profiler.events() if e.name in (SENT, CUT)]
    return [name for _, name in sorted(events)]


def under_ddp(model: nn.Module) -> Generator[None]:
    parallel = DistributedDataParallel(model, bucket_cap_mb_list=[1, 2])
    while True:
        F.mse_loss(parallel(X), Y).backward()
        parallel.zero_grad()
        yield


def under_paceline(model: Any) -> Generator[None]:
    """Trains, a step at a time; at the end the weights are those of a plain loop over the whole batch."""
    run = paceline.start(device="cpu", strategy="ddp:reducer=native,bucket_mb=2", progress="off")
    plain = copy.deepcopy(run.prepare(model))
    try:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(X, Y), global_batch=8)
        for _ in run.epochs(8):
            for x, y in loader:
                run.backward(F.mse_loss(model(x), y))
                run.step(optimizer)
                yield
    finally:
        steps = run.steps
        run.close()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(plain(X), Y).backward()
        optimizer.step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@pytest.mark.ranks(conformance=2)
def test_a_compiled_backward_is_cut_at_buckets_and_sends_the_first_before_it_ends() -> None:
    theirs = order_in_last_backward(under_ddp(wrapped()))
    pieces = theirs.count(CUT)
    assert pieces == 4  # of 1, 2, 2 and 1 layers, the last one first
    for made in (wrapped, with_a_layer_wrapped):
        trained = under_paceline(made())
        order = order_in_last_backward(trained)
        assert order.count(CUT) == pieces, order
        assert SENT in order[: len(order) - 1 - order[::-1].index(CUT)], order
        trained.close()
    assert DistributedDataParallel._get_active_ddp_module() is None  # type: ignore[attr-defined]
