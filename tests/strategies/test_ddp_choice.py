"""How ddp sums gradients: by facts where nobody says, by direct exchange, in one bucket."""

from __future__ import annotations

import contextlib
import io
import itertools
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.strategies.checks import Net, both_heads, plainly, same, started, under_paceline
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import codec_sums
from paceline.comm.codec_sums import DirectSums, SharedMemorySums
from paceline.comm.direct import Direct
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.group import Group

MBIT = 8e-6  # seconds a byte at 1 Mbit/s


def summing(run: paceline.Run) -> object:
    """What adds gradients up; None: torch's reducer by itself."""
    reduction = run._strategy._reduction  # type: ignore[attr-defined]
    return None if reduction is None else reduction._sums


@contextlib.contextmanager
def machines(count: int) -> Iterator[None]:
    """As if the processes were on so many machines, in turn."""
    mine = dist.get_rank() % count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"machine-{mine}")
        yield


# --- facts


@pytest.mark.ranks(2, full=3)
def test_where_the_processes_are_chooses_what_adds_up() -> None:
    with started(progress="off", strategy="ddp") as run:
        assert isinstance(summing(run), SharedMemorySums)
        assert run._strategy.carrier() == "shared memory"
    with started(progress="off", strategy="ddp:reducer=native") as run:
        assert summing(run) is None
        assert run._strategy.carrier() == ""
    with pytest.MonkeyPatch.context() as patch:  # as if two were more than share memory
        patch.setattr(codec_sums, "SHARING", 1)
        with started(progress="off", strategy="ddp") as run:
            assert summing(run) is None
    with machines(2), started(progress="off") as run:
        assert summing(run) is None


@pytest.mark.ranks(2)
def test_the_line_at_the_start_says_what_carries_gradients() -> None:
    for strategy, told in (("ddp", "through gloo and shared memory,"), ("ddp:reducer=native", "through gloo,")):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), started(progress="lines", strategy=strategy) as run:
            model = nn.Linear(3, 1)
            run.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.loader(TensorDataset(torch.randn(4, 3)), global_batch=4):
                run.forward_backward(lambda m, b: m(b[0]).mean(), model, batch)
                run.step(optimizer)
        assert (told in said.getvalue()) == (dist.get_rank() == 0), said.getvalue()


@pytest.mark.ranks(2, full=3)
def test_sparse_gradients_are_added_too() -> None:
    for strategy in ("ddp", "ddp:reducer=native", "ddp:reducer=direct"):
        trained = under_paceline(lambda: Net(sparse=True), both_heads, strategy=strategy)
        same(trained, plainly(lambda: Net(sparse=True), both_heads))


# --- the same bits


def weights(strategy: str) -> bytes:
    """In float32, in which the order of additions shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    data = TensorDataset(torch.randn(24, 40))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with started(strategy=strategy, progress="off") as run:
            run.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.loader(data, global_batch=6):
                run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
                run.step(optimizer)
    finally:
        torch.set_default_dtype(default)
    return b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())


@pytest.mark.ranks(2, full=(3, 4))
def test_no_size_of_buckets_changes_a_bit() -> None:
    """Shared memory and direct exchange add in rank order, whatever the buckets are; two processes in any order."""
    ways = ["ddp", "ddp:bucket_mb=0.01", "ddp:reducer=direct", "ddp:reducer=direct,bucket_mb=0.01", "ddp:bucket_mb=inf"]
    if dist.get_world_size() == 2:
        ways += ["ddp:reducer=native", "ddp:reducer=native,bucket_mb=0.01", "ddp:reducer=ring"]
    found = {way: weights(way) for way in ways}
    different = [way for way, bits in found.items() if bits != found["ddp"]]
    assert not different


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("bucket_mb", "buckets"), [("0.5", 8), ("inf", 1)])
def test_one_bucket_holds_all_gradients(bucket_mb: str, buckets: int) -> None:
    """Also the first one, which else is full at 1 MB."""
    model = nn.Sequential(*(nn.Linear(400, 400, bias=False) for _ in range(8)))  # 0.6 or 1.2 MB each
    with started(strategy=f"ddp:bucket_mb={bucket_mb}", progress="off") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in run.batches(lambda rows: torch.ones(len(rows), 400), global_batch=2):
            run.backward(model(batch).mean())
            break
        (reducer,) = run._strategy._reducers.values()  # type: ignore[attr-defined]
        assert len(reducer._ddp.reducer._get_zeros_like_grad_buckets()) == buckets


# --- direct exchange


@pytest.mark.ranks(2, full=(3, 4))
def test_a_direct_exchange_adds_in_rank_order() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    sums = DirectSums(torch.device("cpu"))
    for numel, dtype in itertools.product((0, 1, 2, 5, 10_007), (torch.float32, torch.float64, torch.bfloat16)):
        addends = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(size)]
        total = addends[rank].clone()
        sums.add(total)
        expected = addends[0].clone()
        for addend in addends[1:]:
            expected += addend
        assert torch.equal(total, expected), (numel, dtype)


@pytest.mark.ranks(2, full=3)
def test_a_receive_is_asked_for_before_a_send() -> None:
    """Gloo tells the other side of a receive behind what it is sending already: the two directions of a slow link would
    take turns. Seen at 20 Mbit/s between two hosts: 6.7 s in place of 3.7 s for 8 MB."""
    seen: list[list[str]] = []
    real = dist.batch_isend_irecv

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        seen.append([operation.op.__name__ for operation in operations])
        return real(operations)

    rank, size = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", watched)
        ProcessEndpoint().exchange(torch.ones(3), (rank + 1) % size, torch.empty(3), (rank - 1) % size)
        Direct(Group(dist.new_group())).add(torch.ones(12))
    assert seen
    for operations in seen:
        assert operations == sorted(operations), operations  # "irecv", "isend"
