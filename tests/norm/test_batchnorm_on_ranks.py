"""Batch norm over the whole global batch, on 3 processes: batchnorm_cases.py against torch's own layer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from tests.norm.batchnorm_cases import (
    CASES,
    CHANNELS,
    Case,
    close,
    float32_case,
    half_case,
    pure_half_case,
    refusals_case,
    run_case,
    same_examples_case,
    synced_case,
)
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import mesh
from paceline.comm.mesh import replicas_here as current
from paceline.comm.mesh import world_group
from paceline.errors import ModelError
from paceline.norm.batchnorm import convert
from paceline.step.messages import batch_norm_split


@contextmanager
def over_processes() -> Iterator[None]:
    with mesh.current().computing(world_group()):
        yield


@pytest.mark.ranks(3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@over_processes()
def test_outputs_gradients_and_buffers_are_those_of_the_whole_batch(case: Case) -> None:
    run_case(case)


@pytest.mark.ranks(3)
@over_processes()
def test_float32_is_as_near_to_the_exact_result_as_torchs_own_layer_is() -> None:
    float32_case()


@pytest.mark.ranks(3)
@over_processes()
def test_16_bits_have_the_dtypes_and_values_of_torchs_own_layer() -> None:
    half_case(torch.bfloat16)
    half_case(torch.float16)
    pure_half_case()


@pytest.mark.ranks(3)
@over_processes()
def test_every_rank_raises_where_an_input_cannot_be_normalised_and_none_waits() -> None:
    refusals_case()


@pytest.mark.ranks(3)
@over_processes()
def test_a_sync_batch_norm_is_that_of_the_whole_batch_on_a_cpu() -> None:
    synced_case()


@pytest.mark.ranks(3)
@over_processes()
def test_under_ddp_every_gradient_is_that_of_the_whole_batch() -> None:
    """Under DDP, whose averaging is undone: every gradient is that of the whole batch."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 2), nn.SyncBatchNorm(4), nn.ReLU()
    ).double()
    model = copy.deepcopy(plain)
    assert convert(model) == 2
    plain[4] = nn.BatchNorm2d(4).double()
    wrapped = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=0.0001)
    x = torch.randn(7, 3, 6, 6, dtype=torch.float64)
    own = Case("").cut[dist.get_rank()]
    for _ in range(2):
        plain.zero_grad(), wrapped.zero_grad()
        plain(x).square().sum().backward()
        (wrapped(x[own]).square().sum() * dist.get_world_size()).backward()
        for a, b in zip(model.parameters(), plain.parameters()):
            assert a.grad is not None
            assert b.grad is not None
            close(a.grad, b.grad)


@pytest.mark.ranks(3)
@over_processes()
def test_examples_that_are_the_same_on_all_ranks_count_once() -> None:
    same_examples_case()


@pytest.mark.ranks(conformance=3)
@over_processes()
def test_under_compile_it_is_exact() -> None:
    """Under torch.compile the layer is a break in the graph, and exact."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Tanh()).double()
    model = copy.deepcopy(plain)
    convert(model)
    compiled = torch.compile(model, backend="aot_eager")
    own = Case("").cut[dist.get_rank()]
    for number in range(2):
        x = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        expected, found = plain(x), compiled(x[own])
        close(found, expected[own])
        plain.zero_grad(), model.zero_grad()
        expected.square().sum().backward(), found.square().sum().backward()
        for a, b in zip(model.parameters(), plain.parameters()):
            assert a.grad is not None
            assert b.grad is not None
            close(current().sum(a.grad), b.grad)
    compiled.eval(), plain.eval()
    close(compiled(x), plain(x))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "local_sgd"])
def test_what_is_refused_depends_on_the_sizes_and_not_on_the_number_of_processes(strategy: str) -> None:
    """Before: one process refused global_batch=8, micro_batch=4, and two trained, so that a run could not go on with
    fewer. Replicas that train apart have statistics of their own parts anyway."""
    if strategy != "ddp" and not dist.is_initialized():
        return
    run = paceline.start(device="cpu", progress="off", strategy=strategy if dist.is_initialized() else "single")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(16, 3))
    refused = []
    for micro_batch in (None, 2, 4, 7, 8, 16):
        try:
            next(iter(run.loader(data, global_batch=8, micro_batch=micro_batch, name=str(micro_batch))))
        except ModelError as error:
            assert str(error) == batch_norm_split(str(micro_batch), 8, micro_batch or 0)
            refused.append(micro_batch)
    assert refused == ([] if strategy == "local_sgd" else [2, 4, 7])
    next(iter(run.loader(data, global_batch=8, micro_batch=2, train=False)))
    run.close()
