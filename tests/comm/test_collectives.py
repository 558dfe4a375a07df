"""Collectives of one process alone (on several: test_collectives_on_ranks.py), and what a failing rank leaves."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import run_ranks

from paceline.comm import collectives
from paceline.comm.replicas import OneReplica, differentiable_sum
from paceline.errors import UsageError


def test_alone_nothing_travels() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert collectives.all_reduce(tensor).tolist() == [1, 2]
    assert collectives.all_reduce(tensor, async_op=True).wait().tolist() == [1, 2]
    assert collectives.gather_objects("x") == ["x"]
    assert collectives.broadcast_object("x", src=0) == "x"
    assert collectives.digest_mismatch([("a", tensor)]) == []
    collectives.broadcast_tensors([tensor])
    collectives.barrier()
    assert collectives.device_of() == torch.device("cpu")
    assert (collectives.size_of(), collectives.rank_of()) == (1, 0)


def test_alone_gather_gives_a_new_tensor() -> None:
    tensor = torch.ones(2, requires_grad=True)
    joined = collectives.gather_uneven(tensor)
    assert joined.data_ptr() != tensor.data_ptr()
    joined.sum().backward()
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [1, 1]
    assert not differentiable_sum(tensor.detach(), OneReplica()).requires_grad
    with pytest.raises(UsageError, match="0-dim"):
        collectives.gather_uneven(torch.tensor(1.0))


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
    monkeypatch.setattr(collectives, "size_of", lambda group: 2)
    monkeypatch.setattr(collectives.dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert collectives.device_of(None, torch.device(lies_on)) == torch.device(travels_from)


def test_digest_tells_permutations_and_dtypes_apart() -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    others = [tensor.flip(0), tensor + 0.0 * tensor - 1e-7, tensor.double(), torch.cat([tensor, torch.zeros(0)])]
    digests = [collectives.digest(other).item() for other in (tensor, *others)]
    assert digests[0] == digests[4]
    assert len(set(digests)) == 4


def test_the_table_of_digests_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has 256 KB, and has to travel to the device."""
    collectives.digest(torch.ones(3))
    monkeypatch.setattr(torch, "randint", None)
    ones = torch.ones(2**18 + 5)
    with torch.inference_mode():
        again = collectives.digest(ones).item()
    assert collectives.digest(ones).item() == again


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
    monkeypatch.setattr(collectives, "size_of", lambda group: 2)
    monkeypatch.setattr(collectives.transport, "backends_of", lambda group: config)
    assert collectives.takes_sparse(torch.device(device)) is takes


def test_a_failing_rank_is_reported_and_ends_the_others() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 \(exit code 1\): Traceback.*one of us"):
        run_ranks(2, "tests.comm.test_collectives:one_fails", deadline=30)


def one_fails() -> None:
    if collectives.rank_of() == 1:
        raise ValueError("one of us")
    collectives.barrier()
