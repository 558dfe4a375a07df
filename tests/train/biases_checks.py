"""Checks of biases before batch norm that run on two ranks at once (tests/ranks.py): against plain PyTorch on the whole
batch, with layers that have no bias."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.ranks import checks_in, run_checks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import collectives
from paceline.train.biases import convert

BIASES = ("0.bias", "3.bias")
_generator = torch.Generator().manual_seed(3)
X = torch.randn(96, 16, generator=_generator)
Y = (X @ torch.randn(16, 1, generator=_generator)).tanh() + 0.1 * torch.randn(96, 1, generator=_generator)


def network(bias: bool = True) -> nn.Sequential:
    """Linear, BatchNorm, ReLU, twice, and an output."""
    torch.manual_seed(1)
    model = nn.Sequential(
        *(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True)),
        *(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True)),
        nn.Linear(32, 1),
    )
    for layer in (model[0], model[3]):
        layer.bias.data.zero_()
        if not bias:
            layer.bias = None
    return model


def plain(epochs: int, decay: float = 0.0) -> nn.Sequential:
    """What it is to be: float32, Adam, one device, without the biases."""
    model = network(bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    for _ in range(epochs):
        for x, y in zip(X.split(32), Y.split(32)):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
    return model


def mse(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def under(epochs: int, model: nn.Module | None = None, loss_fn: Any = mse, decay: float = 0.0, **settings: Any) -> Any:
    """The model that a run makes, in evaluation mode, and its whole state."""
    with_run = paceline.start(device="cpu", progress="off", **settings)
    try:
        model = network() if model is None else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
        model, optimizer = with_run.prepare(model, optimizer)
        loader = with_run.loader(TensorDataset(X, Y), global_batch=32)
        for _ in with_run.epochs(epochs):
            for batch in loader:
                with_run.forward_backward(loss_fn, model, batch)
                with_run.step(optimizer)
        state = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
            for name, value in model.state_dict().items()
        }
    finally:
        with_run.close()
    return state


def evaluated(state: dict[str, Tensor]) -> float:
    model = network()
    model.load_state_dict(state)
    with torch.no_grad():
        return F.mse_loss(model.eval()(X), Y).item()


def same_as_plain(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in BIASES:
        assert not state[name].any(), (name, state[name].abs().max())
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def check_adam_in_float32_leaves_a_bias_without_effect_at_zero_under_every_strategy() -> None:
    expected = plain(4).state_dict()
    for strategy in ("ddp", "fsdp:stage=1", "fsdp:wrap=Linear,min_params=1"):
        state = under(4, strategy=strategy)
        same_as_plain(state, expected)
        assert abs(evaluated(state) - evaluated({**expected, **{n: torch.zeros(32) for n in BIASES}})) < 1e-6


def check_so_it_does_by_shard() -> None:
    state = under(4, strategy="ddp", batch_norm="shard")
    for name in BIASES:
        assert not state[name].any()


class Branching(nn.Module):
    """Something else between the layer and its batch norm, depending on the data, and so on the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer, self.norm, self.out = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)
        self.twice_on: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.twice_on in (None, collectives.rank_of()):
            y = torch.cat([y[:1] * 3, y[1:] * 1])  # of one example other than of the rest: not zero any more
        return self.out(self.norm(y).relu())


def check_a_rank_that_puts_something_between_has_its_gradient_counted() -> None:
    """On rank 1 alone: the gradient of the bias is that of plain PyTorch on the whole batch."""
    model = Branching().double()
    x, y = X[:32].double(), Y[:32].double()
    reference = copy.deepcopy(model)

    def whole(x: Tensor) -> Tensor:
        out = reference.layer(x)
        out = torch.cat([out[:16], out[16:17] * 3, out[17:]])
        return reference.out(reference.norm(out).relu())

    F.mse_loss(whole(x), y).backward()
    model.twice_on = 1
    run = paceline.start(device="cpu", progress="off", strategy="ddp")
    try:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for batch in run.loader(TensorDataset(x, y), global_batch=32):
            run.forward_backward(mse, model, batch)
            found = {name: p.grad.clone() for name, p in model.named_parameters()}
            run.step(optimizer)
    finally:
        run.close()
    assert reference.layer.bias.grad.abs().max() > 1e-4
    for name, p in reference.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def check_under_compile_gradients_are_torchs_own_in_one_graph() -> None:
    plain = network().double()
    made = copy.deepcopy(plain)
    convert(made)
    F.mse_loss(plain(X.double()), Y.double()).backward()
    F.mse_loss(torch.compile(made, backend="eager", fullgraph=True)(X.double()), Y.double()).backward()
    for (name, p), q in zip(made.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


def run_all() -> dict[str, str]:
    return run_checks(checks_in(globals()))
