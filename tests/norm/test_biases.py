"""A bias before batch norm: its gradient is zero, where that is what it is, and nothing else is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.norm import biases
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.norm.biases import convert

X = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Job(nn.Module):
    """`use(layer, norm, x)` gives what a loss is computed from."""

    def __init__(self, layer: nn.Module, norm: nn.Module, use: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.norm, self.use = layer, norm, use

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.use(self.layer, self.norm, x)
        return (y.sin() * torch.arange(y.numel(), dtype=y.dtype).view_as(y) / y.numel()).sum()


def job(use: Callable[..., Tensor], layer: nn.Module | None = None, norm: nn.Module | None = None) -> Job:
    return Job(layer or nn.Conv2d(3, 4, 3), norm or nn.BatchNorm2d(4), use)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).backward()
    assert x.grad is not None
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compared(plain: nn.Module, x: Tensor) -> Tensor:
    """Gradients in two steps are plain PyTorch's to 2e-12, also those of x. Returns that of the layer's bias."""
    made = copy.deepcopy(plain)
    convert(made)
    for _ in range(2):
        expected, found = gradients(plain, x), gradients(made, x)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-12, msg=lambda m, n=name: f"{n}: {m}")
    for (name, own), its in zip(made.named_buffers(), plain.buffers()):
        assert torch.equal(own, its), name
    return found["layer.bias"]


def straight(layer: Any, norm: Any, x: Tensor) -> Tensor:
    return norm(layer(x))


STRAIGHT = {
    "linear": (nn.Linear(5, 4), nn.BatchNorm1d(4), (8, 5)),
    "conv1d": (nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), (8, 3, 6)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), (8, 3, 5, 5)),
    "conv3d": (nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), (4, 2, 3, 3, 3)),
    "transposed 1d": (nn.ConvTranspose1d(3, 4, 2), nn.BatchNorm1d(4), (8, 3, 6)),
    "transposed 2d": (nn.ConvTranspose2d(3, 4, 4, 2, 1, output_padding=1), nn.BatchNorm2d(4), (8, 3, 5, 5)),
    "transposed 3d": (nn.ConvTranspose3d(2, 4, 2), nn.BatchNorm3d(4), (4, 2, 3, 3, 3)),
    "instance norm": (nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), (8, 3, 5, 5)),
    "instance norm 1d": (nn.Conv1d(3, 4, 2), nn.InstanceNorm1d(4, affine=True), (8, 3, 6)),
    "no running statistics": (nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False).eval(), (8, 5)),
}


@pytest.mark.parametrize("name", STRAIGHT)
def test_where_only_a_norm_takes_it_the_gradient_is_zero_and_not_rounding(name: str) -> None:
    layer, norm, shape = STRAIGHT[name]
    x = torch.randn(shape)
    assert not compared(job(straight, layer.double(), norm.double()), x).any()


def beside(layer: Any, norm: Any, x: Tensor) -> Tensor:
    y = layer(x)
    return norm(y) + y


def in_place(layer: Any, norm: Any, x: Tensor) -> Tensor:
    y = layer(x)
    y.mul_(torch.linspace(1, 2, y.size(0)).view(-1, 1, 1, 1))
    return norm(y)


def in_place_afterwards(layer: Any, norm: Any, x: Tensor) -> Tensor:
    return F.relu(layer(x), inplace=True)


def twice(layer: Any, norm: Any, x: Tensor) -> Tensor:
    return norm(layer(x)) + norm(layer(x * 2)) + layer(x).square()


def hooked(layer: Any, norm: Any, x: Tensor) -> Tensor:
    y = layer(x)
    y.register_hook(lambda g: g * torch.linspace(1, 2, g.size(0)).view(-1, 1, 1, 1))
    return norm(y)


def through_something(layer: Any, norm: Any, x: Tensor) -> Tensor:
    return norm(layer(x).relu())


def of_the_bias_too(layer: Any, norm: Any, x: Tensor) -> Tensor:
    return norm(layer(x)) * layer.bias.view(1, -1, 1, 1)


@pytest.mark.parametrize(
    "use", [beside, in_place, in_place_afterwards, twice, hooked, through_something, of_the_bias_too]
)
def test_what_comes_by_other_ways_than_the_norm_is_counted(use: Callable[..., Tensor]) -> None:
    assert compared(job(use), X).abs().max() > 1e-3


def test_frozen_statistics_do_not_take_the_bias_away() -> None:
    plain = job(straight)
    plain.norm.eval()
    assert compared(plain, X).abs().max() > 1e-3


def test_neither_do_hooks_of_the_norm_that_change_what_passes() -> None:
    before, behind = job(straight), job(straight)
    before.norm.register_forward_pre_hook(lambda _, x: (x[0].relu(),))
    assert compared(before, X).abs().max() > 1e-3
    behind.norm.register_full_backward_hook(lambda _, dx, dy: (dx[0] * X[:, :1, :3, :3],))
    assert compared(behind, X).abs().max() > 1e-3


def test_channels_that_are_not_the_norms_keep_their_gradient() -> None:
    """A bias of each feature, and statistics of each place."""
    plain = job(straight, nn.Linear(5, 4), nn.BatchNorm1d(4))
    assert compared(plain, torch.randn(8, 4, 5)).abs().max() > 1e-3
    unbatched = job(straight, nn.Conv1d(3, 4, 2), nn.InstanceNorm2d(4))
    assert compared(unbatched, torch.randn(4, 3, 6)).abs().max() > 1e-3


def test_a_gradient_penalty_and_a_checkpoint() -> None:
    def penalty(layer: Any, norm: Any, x: Tensor) -> Tensor:
        y = norm(layer(x)).square().sum()
        (dx,) = torch.autograd.grad(y, x, create_graph=True)
        return dx * 100

    compared(job(penalty), X)

    def recomputed(layer: Any, norm: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda x: norm(layer(x)).relu() + layer(x), x, use_reentrant=False)

    plain = job(recomputed, norm=nn.BatchNorm2d(4, track_running_stats=False))
    assert compared(plain, X).abs().max() > 1e-3


def test_a_users_hook_on_the_output_sees_its_gradient() -> None:
    seen = []

    def use(layer: Any, norm: Any, x: Tensor) -> Tensor:
        y = layer(x)
        y.register_hook(lambda g: seen.append(g.clone()))
        return norm(y)

    compared(job(use), X)
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-13)


def test_a_converted_model_is_copied_and_a_pickle_needs_no_paceline() -> None:
    model = job(straight)
    convert(model)
    gradients(model, X)
    copied = copy.deepcopy(model)
    assert not gradients(copied, X)["layer.bias"].any()
    assert copied.layer.bias is not model.layer.bias
    assert repr(model) == repr(job(straight))
    file = io.BytesIO()
    torch.save(model.layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Conv2d
    assert torch.equal(loaded(X), model.layer(X))
    assert b"paceline" not in file.getvalue()


def test_the_bits_of_a_layer_whose_output_no_norm_takes_do_not_depend_on_how_long_it_has_lived() -> None:
    """A run that is resumed has new modules, and must round as one that was not stopped."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4))
    model, resumed = copy.deepcopy(plain), copy.deepcopy(plain)
    convert(model)
    convert(resumed)
    for _ in range(3):  # in a row, and without a call of train()
        model.zero_grad()
        model(X).square().sum().backward()
    for other in (resumed, plain):
        other(X).square().sum().backward()
    assert torch.equal(model[0].bias.grad, resumed[0].bias.grad)
    torch.testing.assert_close(model[0].bias.grad, plain[0].bias.grad)


def test_one_process_says_once_which_biases_have_no_effect(capfd: pytest.CaptureFixture[str]) -> None:
    torch.set_default_dtype(torch.float32)
    biases.same_as_plain(biases.under(4, progress="lines"), biases.plain(4).state_dict())
    said = capfd.readouterr().err
    assert said.count("the bias of 0, 3 has no effect, since batch norm follows") == 1
    assert "Use bias=False." in said


def test_weight_decay_still_acts_on_them() -> None:
    torch.set_default_dtype(torch.float32)
    model = biases.network()
    model[0].bias.data.fill_(1.0)
    state = biases.under(2, model, decay=0.5)
    torch.testing.assert_close(state["0.bias"], torch.full((32,), (1 - 0.01 * 0.5) ** 6), rtol=1e-6, atol=0)


def test_on_devices_of_one_process() -> None:
    torch.set_default_dtype(torch.float32)
    expected = biases.plain(4).state_dict()
    for strategy in ("data_parallel:devices=cpu+cpu", "mirrored:devices=cpu+cpu", "single"):
        biases.same_as_plain(biases.under(4, strategy=strategy), expected)
