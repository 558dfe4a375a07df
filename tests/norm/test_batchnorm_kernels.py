"""Batch norm by CUDA's kernels, for which stand-ins compute on the CPU: on processes, and what it launches and sends.
The cases on threads are in test_batchnorm.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from tests.norm.batchnorm_cases import (
    CHANNELS,
    Case,
    close,
    half_case,
    run_case,
)
from tests.norm.batchnorm_stand_ins import (
    NAMES,
    calls,
    in_place_of_the_kernels,
    reproducible_hashes,
)
from tests.ranks import run_ranks
from torch import Tensor, nn

from paceline.comm import mesh
from paceline.comm.mesh import Replicas, world_group
from paceline.norm import batchnorm, batchnorm_kernels, biases
from paceline.norm.batchnorm import convert


@contextlib.contextmanager
def over_processes() -> Iterator[None]:
    with mesh.current().computing(world_group()), in_place_of_the_kernels():
        yield


@pytest.fixture
def kernels() -> Iterator[None]:
    with in_place_of_the_kernels():
        yield


# --- against torch's own layer on the whole batch


@pytest.mark.ranks(conformance=3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@over_processes()
def test_inputs_of_16_bits_have_statistics_in_float32(dtype: torch.dtype) -> None:
    half_case(dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("order", [1, 2])
@over_processes()
def test_two_processes_have_the_outputs_gradients_and_buffers_of_the_whole_batch(order: int) -> None:
    for lengths in ((3, 4), (0, 7), (7, 0)):
        for layer in ({}, {"affine": False}):
            run_case(Case("", lengths=lengths, order=order, layer=layer, needs="xwb" if not layer else "x"))
    for needs in ("w", "xb"):
        run_case(Case("", lengths=(5, 2), order=order, needs=needs, layout="channels_last"))


@pytest.mark.conformance
def test_a_reproducible_run_has_the_same_bits_on_one_process_and_on_two() -> None:
    alone = reproducible_hashes()
    where = "tests.norm.batchnorm_stand_ins:reproducible_hashes"
    assert run_ranks(2, where) == [alone] * 2


# --- which kernels


class Both(Replicas):
    """Two replicas, of which the other one has what this one has, a little larger."""

    size, rank = 2, 0

    def rows(self, row: Tensor) -> Tensor:
        return torch.stack((row, row * (1 + 2**-20)))

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor * 2


def model_of(x: Tensor) -> nn.Module:
    layer = nn.BatchNorm2d(x.size(1))
    convert(layer)
    return layer


def test_a_second_derivative_takes_differentiable_operations(kernels: None) -> None:
    x = torch.randn(6, CHANNELS, 3, 3, requires_grad=True)
    with mesh.current().computing(Both()):
        (gradient,) = torch.autograd.grad(model_of(x)(x).pow(3).sum(), x, create_graph=True)
    assert calls == dict.fromkeys(NAMES[:3], 1)
    assert gradient.requires_grad
    gradient.square().sum().backward()
    assert calls == dict.fromkeys(NAMES, 1), "the gradient depends on the output too, by a first derivative"


def test_frozen_parameters_and_inputs_exchange_and_compute_no_more_than_they_need(kernels: None) -> None:
    x = torch.randn(6, CHANNELS, 3, 3)
    layer = model_of(x)
    with mesh.current().computing(Both()):
        layer(x).square().sum().backward()
    assert calls == dict.fromkeys(NAMES[:4], 1), "nobody asks for dx"


# --- precision


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_the_statistics_are_as_near_to_the_exact_ones_whatever_the_number_of_replicas(
    replicas: int, kernels: None
) -> None:
    """The rows are rounded to float32, and their combination once more: to 1e-7. The kernel in float32 would be 1e-6
    off with 64 replicas."""
    x = torch.randn(replicas, 32, 512, generator=torch.Generator().manual_seed(0)) + 3

    class Many(Replicas):
        size, rank = replicas, 0

        def rows(self, row: Tensor) -> Tensor:
            return torch.stack([batchnorm_kernels._row(part, 32, 1e-5, False) for part in x])

        def sum(self, tensor: Tensor) -> Tensor:
            raise AssertionError

    found = batchnorm_kernels.statistics(x[0], 1e-5, Many(), False)
    exact = x.double().view(-1, 512)
    assert found.mean.dtype == torch.float32
    torch.testing.assert_close(found.mean.double(), exact.mean(0), rtol=1.5e-7, atol=0)
    torch.testing.assert_close(found.unbiased_var.double(), exact.var(0), rtol=6e-7, atol=0)


# --- what it tells others


@pytest.mark.parametrize("deaf", [False, True])
def test_a_bias_before_it_is_left_out_where_all_replicas_leave_it_out(deaf: bool, kernels: None) -> None:
    class Others(Both):
        def rows(self, row: Tensor) -> Tensor:
            other = row.clone()
            other[1] = float(deaf)
            return torch.stack((row, other))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), nn.BatchNorm2d(CHANNELS))
    convert(net), biases.convert(net)
    with mesh.current().computing(Others()):
        net(torch.randn(5, 3, 2, 2)).pow(3).sum().backward()
    assert net[0].bias.grad is not None
    assert bool((net[0].bias.grad == 0).all()) is not deaf


# --- running statistics of accelerators, without reading a number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mean_over_all_batches_has_the_same_bits_without_reading_their_number(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for number in (*range(1, 300), 2**20 + 1, 2**24 + 1):
        counted = torch.tensor(number)
        start, value = (torch.randn(64, dtype=dtype, generator=generator) for _ in range(2))
        read, unread = start.clone(), start.clone()
        batchnorm._move(read, value, 1.0 / float(counted))
        batchnorm._move(unread, value, batchnorm._one_over(counted))
        assert torch.equal(read, unread), number


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_mean_over_all_batches_is_that_of_torchs_own_layer(dtype: torch.dtype, kernels: None) -> None:
    class Half(Both):
        """The other replica has the other half of the batch."""

        def rows(self, row: Tensor) -> Tensor:
            return torch.stack((row, batchnorm_kernels._row(x[4:], 4, 1e-5, False)))

    plain = nn.BatchNorm1d(CHANNELS, momentum=None, dtype=dtype)
    layer = copy.deepcopy(plain)
    convert(layer)
    for number in range(4):
        x = torch.randn(8, CHANNELS, dtype=dtype, generator=torch.Generator().manual_seed(number))
        plain(x)
        with mesh.current().computing(Half()):
            layer(x[:4])
    for name, buffer in plain.named_buffers():
        close(layer.get_buffer(name).double(), buffer.double(), 1.0 if dtype == torch.float64 else 1e6)


@pytest.mark.parametrize(
    ("shape", "cpu", "elsewhere"),
    [((4, 3), False, False), ((1, 3, 2), False, False), ((1, 3), True, False), ((0, 3), True, True)],
)
def test_only_an_empty_shard_waits_for_the_count_of_an_accelerator(
    shape: tuple[int, ...], cpu: bool, elsewhere: bool
) -> None:
    assert batchnorm._reads_count(torch.empty(shape)) is cpu
    assert batchnorm._reads_count(torch.empty(shape, device="meta")) is elsewhere


# --- torch's kernels


def test_torch_has_the_kernels_with_these_arguments() -> None:
    expected = {
        "batch_norm_stats": "(Tensor input, float eps) -> (Tensor, Tensor)",
        "batch_norm_gather_stats_with_counts": "(Tensor input, Tensor mean, Tensor invstd, Tensor? running_mean, "
        "Tensor? running_var, float momentum, float eps, Tensor counts) -> (Tensor, Tensor)",
        "batch_norm_elemt": "(Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, float eps) "
        "-> Tensor",
        "batch_norm_backward_reduce": "(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
        "bool input_g, bool weight_g, bool bias_g) -> (Tensor, Tensor, Tensor, Tensor)",
        "batch_norm_backward_elemt": "(Tensor grad_out, Tensor input, Tensor mean, Tensor invstd, Tensor? weight, "
        "Tensor sum_dy, Tensor sum_dy_xmu, Tensor count) -> Tensor",
    }
    for name, arguments in expected.items():
        assert str(getattr(torch.ops.aten, name).default._schema) == f"aten::{name}{arguments}"
        assert callable(getattr(torch, name))
