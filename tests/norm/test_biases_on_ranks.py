"""Biases before batch norm on two processes, against plain PyTorch on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.norm.biases import BIASES, X, Y, evaluated, mse, network, plain, same_as_plain, under
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.norm.biases import convert


@pytest.mark.ranks(2)
def test_adam_in_float32_leaves_a_bias_without_effect_at_zero_under_every_strategy() -> None:
    expected = plain(4).state_dict()
    for strategy in ("ddp", "shared", "fsdp:stage=1", "fsdp:wrap=Linear,min_params=1"):
        state = under(4, strategy=strategy)
        same_as_plain(state, expected)
        assert abs(evaluated(state) - evaluated({**expected, **{n: torch.zeros(32) for n in BIASES}})) < 1e-6


@pytest.mark.ranks(2)
def test_adam_in_float32_leaves_a_bias_at_zero_with_batch_norm_by_shard() -> None:
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
        if self.twice_on in (None, world_group().rank):
            y = torch.cat([y[:1] * 3, y[1:] * 1])  # of one example other than of the rest: not zero any more
        return self.out(self.norm(y).relu())


@pytest.mark.ranks(2)
def test_a_rank_that_puts_something_between_layer_and_norm_has_its_gradient_counted() -> None:
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


@pytest.mark.ranks(2)
def test_under_compile_gradients_are_torchs_own_in_one_graph() -> None:
    plain = network().double()
    made = copy.deepcopy(plain)
    convert(made)
    F.mse_loss(plain(X.double()), Y.double()).backward()
    F.mse_loss(torch.compile(made, backend="eager", fullgraph=True)(X.double()), Y.double()).backward()
    for (name, p), q in zip(made.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")
