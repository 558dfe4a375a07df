"""The group in which layers sum, apart from that of the gradients. On accelerators only: here gloo stands for NCCL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import group, mesh, replicas, transport
from paceline.comm.group import ALONE, Group
from paceline.comm.mesh import Mesh, forget, world_group
from paceline.norm.batchnorm import convert


@contextlib.contextmanager
def as_on_an_accelerator() -> Iterator[list[Any]]:
    """Sums of layers go where they go on accelerators. Yields the groups of those under way."""
    groups: list[Any] = []

    def noting(name: str, position: int) -> Any:
        real = getattr(transport, name)

        def call(*args: Any) -> Any:
            groups.append(args[position])
            return real(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "on_accelerator", lambda self, device: self is not ALONE)
        patch.setattr(group, "MOST_BYTES", -1)  # nothing goes over sockets
        patch.setattr(transport, "all_reduce", noting("all_reduce", 2))
        patch.setattr(transport, "all_gather", noting("all_gather", 1))
        yield groups


def net(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Linear(6, 1)).double()


def trained(groups: list[Any] | None = None, norm: bool = True, strategy: str = "ddp") -> tuple[list[Tensor], Any]:
    """The weights after some steps, and the group of layers. groups: is emptied when all is prepared."""
    run = paceline.start(device="cpu", strategy=strategy, progress="off")
    model = net(norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    run.prepare()
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(14, 5, generator=generator, dtype=torch.float64))
    if groups is not None:
        groups.clear()
    for (x,) in run.loader(data, global_batch=7):
        run.backward(model(x).square().mean())
        run.step(optimizer)
    layers = mesh.current().layers
    run.close()
    return [p.detach().clone() for p in model.parameters()], layers


@pytest.mark.ranks(2)
def test_sums_of_batch_norm_go_through_a_group_of_their_own_and_give_the_same_model() -> None:
    expected, layers = trained()
    assert layers is world_group(), "on the CPU nothing queues up"
    with as_on_an_accelerator() as groups:
        found, layers = trained(groups)
    assert layers.size == 2
    assert layers is not world_group()
    assert groups.count(layers.native) == 4, "two steps, of a row and a sum each"
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    forget()


@pytest.mark.ranks(2)
def test_runs_that_follow_each_other_share_it() -> None:
    with as_on_an_accelerator():
        _, first = trained()
        made = len(distributed_c10d._world.pg_map)
        _, second = trained()
    assert first is second
    assert len(distributed_c10d._world.pg_map) == made
    forget()


@pytest.mark.ranks(2)
def test_no_group_is_made_where_no_layer_sums_over_processes() -> None:
    before = len(distributed_c10d._world.pg_map)
    with as_on_an_accelerator():
        assert trained(norm=False)[1] is world_group()
        assert trained(strategy="local_sgd")[1] is ALONE
    assert len(distributed_c10d._world.pg_map) == before


@pytest.mark.ranks(conformance=4)
def test_it_has_the_processes_of_the_data_dimensions() -> None:
    rank = dist.get_rank()
    own = Mesh(torch.device("cpu"), rank, {"replicate": 2, "tensor": 2})
    model = net()
    convert(model)
    own.replicas = own.layers
    with as_on_an_accelerator():
        replicas.separate(own, [model])
        assert own.layers is not own.gradient
        assert dist.get_process_group_ranks(own.layers.native) == [rank % 2, rank % 2 + 2]
        assert own.replicas.sum(torch.tensor(float(rank))).item() == 2 * (rank % 2) + 2
        rows = own.replicas.rows(torch.full((3,), rank, dtype=torch.float64))
        assert rows.tolist() == [[rank % 2] * 3, [rank % 2 + 2] * 3]

        inside_of_a_step_only = Mesh(torch.device("cpu"), rank, {"replicate": 2, "tensor": 2})
        inside_of_a_step_only.replicas = one = ALONE
        replicas.separate(inside_of_a_step_only, [model])
        assert inside_of_a_step_only.replicas is one
        assert inside_of_a_step_only.layers is own.layers
    own.close()
    assert own.layers is ALONE
    forget()


def test_only_a_backend_of_accelerators_makes_sums_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    for backends, carried in (("cpu:gloo,cuda:nccl", True), ("cpu:gloo,cuda:gloo", False), ("cpu:gloo", False)):
        monkeypatch.setattr(dist, "get_backend_config", lambda group, backends=backends: backends)
        native: Any = mock.Mock()
        assert Group(native).on_accelerator(gpu) is carried, backends
        assert not Group(native).on_accelerator(cpu)
