"""Collectives of one process alone (on several: test_collectives_on_ranks.py), and what a failing rank leaves."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

from paceline.comm import gathering, same_bits
from paceline.comm.group import ALONE, Group
from paceline.comm.mesh import world_group
from paceline.comm.replicas import differentiable_sum
from paceline.errors import UsageError, WorldError


def test_alone_nothing_travels() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert world_group().all_reduce(tensor).tolist() == [1, 2]
    assert world_group().all_reduce(tensor, async_op=True).wait().tolist() == [1, 2]
    assert world_group().gather("x") == ["x"]
    assert world_group().broadcast("x", src=0) == "x"
    assert same_bits.digest_mismatch([("a", tensor)], world_group()) == []
    world_group().broadcast_tensors([tensor])
    world_group().barrier()
    assert world_group().device() == torch.device("cpu")
    assert (world_group().size, world_group().rank) == (1, 0)


def test_alone_gather_gives_a_new_tensor() -> None:
    tensor = torch.ones(2, requires_grad=True)
    joined = gathering.gather_uneven(tensor, world_group())
    assert joined.data_ptr() != tensor.data_ptr()
    joined.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1, 1]
    assert not differentiable_sum(tensor.detach(), ALONE).requires_grad
    with pytest.raises(UsageError, match="0-dim"):
        gathering.gather_uneven(torch.tensor(1.0), world_group())


NATIVE: Any = mock.Mock()  # a Group keeps torch's group weakly


def two_processes(config: str, monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group of two processes that these backends connect."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    return Group(NATIVE)


def test_a_group_that_was_destroyed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops a destroyed group, and ours must not keep it: its threads would outlive it."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    native: Any = mock.NonCallableMock()
    group = Group(native)
    assert group.native is native
    del native
    gc.collect()
    for call in (lambda: group.all_reduce(torch.ones(1)), lambda: group.gather(1), group.barrier):
        with pytest.raises(WorldError, match="destroy_process_group"):
            call()


@pytest.mark.parametrize(
    ("config", "lies_on", "travels_from"),
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cuda:1", "cuda:1"),
        ("cuda:nccl", "cpu", "cuda:3"),
    ],
)
def test_device_of(config: str, lies_on: str, travels_from: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert two_processes(config, monkeypatch).device(torch.device(lies_on)) == torch.device(travels_from)


def test_digest_tells_permutations_and_dtypes_apart() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    others = [tensor.flip(0), tensor + 0.0 * tensor - 1e-7, tensor.double(), torch.cat([tensor, torch.zeros(0)])]
    found = [same_bits.digest(other).item() for other in (tensor, *others)]
    assert found[0] == found[4]
    assert len(set(found)) == 4


def test_the_table_of_digests_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 256 KB, and has to travel to the device."""
    same_bits.digest(torch.ones(3))
    monkeypatch.setattr(torch, "randint", None)
    ones = torch.ones(2**18 + 5)
    with torch.inference_mode():
        again = same_bits.digest(ones).item()
    assert same_bits.digest(ones).item() == again


@pytest.mark.parametrize(
    ("config", "device", "takes"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:1", False),
        ("cpu:gloo,cuda:nccl", "cpu", True),
        ("cuda:nccl", "cuda:0", False),
        ("cpu:gloo,cuda:gloo", "cuda:0", True),
        ("cpu:gloo", "cuda:0", True),
    ],
)
def test_nccl_takes_no_sparse_tensors(config: str, device: str, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_processes(config, monkeypatch).adds_sparse(torch.device(device)) is takes


def test_a_failing_rank_is_reported_and_ends_the_others() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 \(exit code 1\): Traceback.*one of us"):
        run_ranks(2, "tests.comm.test_collectives:one_fails", deadline=30)


def one_fails() -> None:
    if world_group().rank == 1:
        raise ValueError("one of us")
    world_group().barrier()
