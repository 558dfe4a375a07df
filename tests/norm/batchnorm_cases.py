"""Batch norm over replicas against plain torch on the whole batch: what every replica does, in a process or a thread.

Each replica has its own converted copy of the model and its part of the batch, and compares with the plain model, which
it computes by itself on the whole batch. Gradients of weight and bias are parts, and are added over replicas first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.mesh import replicas_here as current
from paceline.errors import ModelError
from paceline.norm.batchnorm import GlobalSyncBatchNorm, convert

LAYERS: dict[int, Callable[..., nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
CHANNELS = 4


@dataclass(frozen=True)
class Case:
    """One layer, one batch, one way to cut it over three replicas, one loss."""

    name: str
    shape: tuple[int, ...] = (7, CHANNELS, 3, 2)
    lengths: tuple[int, ...] = (3, 0, 4)
    layer: dict[str, Any] = field(default_factory=dict)
    needs: str = "xwb"  # which of x, weight and bias require a gradient
    loss: str = "weighted"
    order: int = 1
    layout: str = "plain"
    training: bool = True
    batches: int = 2
    offset: float = 0.5

    @property
    def cut(self) -> list[slice]:
        ends = [sum(self.lengths[: n + 1]) for n in range(len(self.lengths))]
        return [slice(end - length, end) for end, length in zip(ends, self.lengths)]


CASES = [
    Case("even", lengths=(2, 3, 2)),
    Case("empty"),
    Case("two empty", lengths=(0, 7, 0)),
    Case("1d", shape=(7, CHANNELS)),
    Case("1d, one example in all of two shards", shape=(2, CHANNELS), lengths=(1, 1, 0)),
    Case("1d long", shape=(7, CHANNELS, 9)),
    Case("3d", shape=(7, CHANNELS, 2, 3, 2)),
    Case("all empty", shape=(0, CHANNELS, 3, 2), lengths=(0, 0, 0)),
    Case("not affine", layer={"affine": False}, needs="x"),
    Case("cumulative", layer={"momentum": None}, batches=3),
    Case("no momentum", layer={"momentum": 0.0}),
    Case("untracked", layer={"track_running_stats": False}),
    Case("untracked in eval", layer={"track_running_stats": False}, training=False),
    Case("eval", training=False),
    Case("big eps", layer={"eps": 0.5}),
    Case("far from zero", offset=100.0),
    Case("only x", needs="x"),
    Case("only weight", needs="w"),
    Case("only bias", needs="b"),
    Case("x and bias", needs="xb"),
    Case("weight and bias", needs="wb"),
    Case("channels last", layout="channels_last"),
    Case("strided", layout="strided"),
    Case("expanded gradient", loss="sum"),
    Case("penalty", order=2),
    Case("penalty, 1d", order=2, shape=(9, CHANNELS), lengths=(4, 0, 5)),
    Case("penalty, 1d long", order=2, shape=(7, CHANNELS, 5)),
    Case("penalty, 3d", order=2, shape=(4, CHANNELS, 2, 2, 2), lengths=(1, 2, 1)),
    Case("penalty, not affine", order=2, layer={"affine": False}, needs="x"),
    Case("penalty, only x", order=2, needs="x"),
    Case("penalty, x and bias", order=2, needs="xb"),
    Case("penalty, x and weight", order=2, needs="xw"),
    Case("penalty, weight and bias", order=2, needs="wb"),
    Case("penalty, channels last", order=2, layout="channels_last"),
    Case("penalty, eval", order=2, training=False),
    Case("third order", order=3, layer={"track_running_stats": False}),
]


def whole_batch(case: Case, number: int) -> Tensor:
    """Batch `number`, of normal values, float64. Some of it depends on the channel, so that channels differ."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.5, 3, CHANNELS, dtype=torch.float64).view(1, -1, *[1] * (x.dim() - 2))
    return x * scale + case.offset * scale.flip(1)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """A leaf with the same values in another memory layout."""
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.detach().clone(memory_format=torch.preserve_format)


def loss_of(case: Case, y: Tensor, weights: Tensor) -> Tensor:
    """A sum over the examples, not linear in y, so that the second derivative is not zero."""
    return y.sum() if case.loss == "sum" else (weights * y + 0.1 * y**3).sum()


def differentiated(case: Case, layer: nn.Module, x: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients after `order` differentiations, each of a sum of squares of the ones before."""
    x = laid_out(x, case.layout).requires_grad_("x" in case.needs)
    wanted = {"x": x} if x.requires_grad else {}
    wanted |= {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    # One operation before the layer: the gradient also has to travel on.
    y = layer(x * 1.0 if x.requires_grad else x)
    value = loss_of(case, y, weights)
    for order in range(case.order):
        found = torch.autograd.grad(
            value, list(wanted.values()), create_graph=order + 1 < case.order, allow_unused=True
        )
        found = tuple(torch.zeros_like(a) if g is None else g for a, g in zip(wanted.values(), found))
        gradients = dict(zip(wanted, found))
        # Gradients of parameters are parts on each replica: their squares would not add up. A linear form does.
        value = sum(
            ((g.square() if name == "x" else g * torch.arange(1.0, 1 + len(g))).sum() for name, g in gradients.items()),
            start=torch.zeros(()),
        )
    return y, gradients


class Composite(nn.BatchNorm2d):
    """Batch norm in training, of differentiable operations: torch's own has a wrong third derivative (2.13)."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean((0, 2, 3), keepdim=True)
        scale = (centred.square().mean((0, 2, 3), keepdim=True) + self.eps).rsqrt()
        return centred * scale * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def make_layer(case: Case) -> nn.Module:
    layer = LAYERS[len(case.shape)](CHANNELS, dtype=torch.float64, **case.layer)
    generator = torch.Generator().manual_seed(17)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(torch.randn(CHANNELS, generator=generator, dtype=torch.float64))
        parameter.requires_grad_(name[0] in case.needs)
    return layer.train(case.training)


def run_case(case: Case) -> None:
    """Compare this replica's outputs, gradients and buffers with plain torch on the whole batch, to 1e-12."""
    replicas = current()
    assert replicas.size == len(case.lengths)
    plain = make_layer(case)
    layer = copy.deepcopy(plain)
    assert convert(layer) == 1
    if case.order > 2:
        plain.__class__ = Composite
    own = case.cut[replicas.rank]
    pairs = []  # compared at the end: a replica that fails in the middle would leave the others waiting
    for number in range(case.batches):
        x = whole_batch(case, number)
        weights = torch.randn(case.shape, generator=torch.Generator().manual_seed(50), dtype=torch.float64)
        expected, expected_gradients = differentiated(case, plain, x, weights)
        y, gradients = differentiated(case, layer, x[own], weights[own])
        pairs.append((y, expected[own]))
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            wanted = expected_gradients[name]
            whole = gradient if name == "x" else replicas.sum(gradient)
            pairs.append((whole, wanted[own] if name == "x" else wanted))
        for name, buffer in layer.named_buffers():
            pairs.append((buffer.clone(), plain.get_buffer(name).clone()))
            first = replicas.sum(buffer if replicas.rank == 0 else torch.zeros_like(buffer))
            pairs.append(((first != buffer).sum(), torch.tensor(0)))  # the same bits on every replica
    for found, wanted in pairs:
        close(found, wanted, case.offset)
    assert y.stride() == expected[own].stride() or 0 in y.shape


def close(found: Tensor, expected: Tensor, offset: float = 1.0) -> None:
    """To 1e-12 of the largest value, or what remains of that behind the subtraction of a large mean."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * scale * max(1.0, offset))


def float32_case() -> None:
    """Float32: as near to the float64 result as plain torch in float32 is, also far from zero."""
    for layout in ("plain", "channels_last"):
        for offset in (0.0, 300.0):
            case = Case("", shape=(9, CHANNELS, 16, 16), lengths=(4, 0, 5), offset=offset, layout=layout)
            exact, plain = make_layer(case), make_layer(case).float()
            layer = copy.deepcopy(plain)
            convert(layer)
            x = whole_batch(case, 0).float()
            weights = torch.randn(case.shape, generator=torch.Generator().manual_seed(50))
            y0, g0 = differentiated(case, exact, x.double(), weights.double())
            y1, g1 = differentiated(case, plain, x, weights)
            own = case.cut[current().rank]
            y2, g2 = differentiated(case, layer, x[own], weights[own])
            g2 = {name: g if name == "x" else current().sum(g) for name, g in g2.items()}
            near(y2, y1[own], y0[own])
            near(g2.pop("x"), g1.pop("x")[own], g0.pop("x")[own])
            for name in g2:
                near(g2[name], g1[name], g0[name])
            for name in ("running_mean", "running_var"):
                near(layer.get_buffer(name), plain.get_buffer(name), exact.get_buffer(name))


def near(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    if exact.numel():
        error, allowed = (found - exact).abs().max(), (plain - exact).abs().max()
        assert error <= 2 * allowed + 1e-6 * exact.abs().max(), (error, allowed)


def half_case(dtype: torch.dtype) -> None:
    """A layer with float32 parameters behind a convolution in autocast: dtypes and values as in plain torch."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, bias=False), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, 2, 3)
    )
    layer = copy.deepcopy(plain)
    convert(layer)
    x = torch.randn(9, 3, 12, 12) + 1
    own = Case("", lengths=(4, 0, 5)).cut[current().rank]

    def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = model(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        return y, x.grad

    (y1, g1), (y2, g2) = run(plain, x), run(layer, x[own])
    assert y1.dtype == y2.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(y2, y1[own], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(g2, g1[own], rtol=tolerance, atol=tolerance * g1.abs().max().item())
    for a, b in zip(layer.parameters(), plain.parameters()):
        assert a.grad is not None
        assert a.grad.dtype == torch.float32
        total = current().sum(a.grad)
        assert b.grad is not None
        assert (total - b.grad).norm() <= tolerance * b.grad.norm() + 1e-3, (total, b.grad)
    # The statistics themselves are in float32: far nearer than one rounding of the dtype.
    torch.testing.assert_close(layer[1].running_var, plain[1].running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer[1].running_mean, plain[1].running_mean, rtol=1e-5, atol=1e-6)


def pure_half_case() -> None:
    """Parameters and buffers in bf16 as well."""
    case = Case("", shape=(9, CHANNELS, 5, 5), lengths=(4, 0, 5))
    plain = make_layer(case).bfloat16()
    layer = copy.deepcopy(plain)
    convert(layer)
    x, weights = whole_batch(case, 0).bfloat16(), torch.ones(case.shape, dtype=torch.bfloat16)
    own = case.cut[current().rank]
    for order in (1, 2):
        y1, g1 = differentiated(Case("", order=order), plain, x, weights)
        y2, g2 = differentiated(Case("", order=order), layer, x[own], weights[own])
        assert y2.dtype == torch.bfloat16
        assert {g.dtype for g in g2.values()} == {torch.bfloat16}
        torch.testing.assert_close(y2, y1[own], rtol=0.02, atol=0.02)
        if order == 1:
            torch.testing.assert_close(g2["x"], g1["x"][own], rtol=0.05, atol=0.05)
    assert layer.get_buffer("running_mean").dtype == torch.bfloat16


def refusals_case() -> None:
    """Every replica raises, so that none waits; and the layer works afterwards."""
    rank = current().rank
    layer = nn.BatchNorm1d(CHANNELS)
    convert(layer)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(torch.randn(1 if rank == 1 else 0, CHANNELS))
    with pytest.raises(ModelError, match=r"4 channels|GlobalBatchNorm1d.*\(2, 5\)"):
        layer(torch.randn(2, 5))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        layer(torch.randn(2, 4, 1, 1))
    assert layer(torch.randn(1 if rank else 0, CHANNELS)).shape == (min(rank, 1), CHANNELS)


def synced_case() -> None:
    """An nn.SyncBatchNorm, which alone refuses the CPU."""
    case = Case("")
    layer, plain = nn.SyncBatchNorm(CHANNELS, dtype=torch.float64), nn.BatchNorm2d(CHANNELS, dtype=torch.float64)
    assert convert(layer) == 1
    assert type(layer) is GlobalSyncBatchNorm
    x, own = whole_batch(case, 0), case.cut[current().rank]
    close(layer(x[own]), plain(x)[own])
    with pytest.raises(ValueError, match="at least 2D"):
        layer(torch.zeros(3))
    layer.eval(), plain.eval()
    close(layer(x), plain(x))


def same_examples_case() -> None:
    """What is the same on all replicas counts once, as one device sees it: also its gradient, whose parts have weights
    that add to one. A shard's own examples come before it and after it."""
    weights = (0.5, 0.2, 0.3)
    rank = current().rank
    for layer in (nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS, momentum=None)):
        plain = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 1), layer).double()
        for p in plain.parameters():
            p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype))
        model = copy.deepcopy(plain)
        convert(model)
        for number, own in enumerate((Case("").cut[rank], slice(0, 2), slice(0, 7), Case("").cut[rank])):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(7, CHANNELS, 3, 2, dtype=torch.float64, generator=generator)
            one = x[own] if number in (1, 2) else x
            plain.zero_grad(), model.zero_grad()
            plain(one).pow(3).sum().backward()
            (model(x[own]).pow(3).sum() * (weights[rank] if number in (1, 2) else 1.0)).backward()
            for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values()):
                assert "running" not in name or torch.allclose(a, b, rtol=1e-13, atol=1e-14), (number, name)
            for a, b in zip(model.parameters(), plain.parameters()):
                assert a.grad is not None
                assert b.grad is not None
                close(current().sum(a.grad), b.grad)
