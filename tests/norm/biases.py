"""A network with biases before batch norm, and the same without them in plain PyTorch, for test_biases.py and
test_biases_on_ranks.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

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
    with_run = paceline.start(device="cpu", **{"progress": "off", **settings})
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
