"""How ddp sums gradients where nobody says: shared memory by facts, and reducer=auto by facts and measuring."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.strategies.checks import Net, both_heads, plainly, same, started, under_paceline
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import codec_sums, collectives, link_cost
from paceline.comm.codec_sums import DirectSums, NativeSums, SharedMemorySums
from paceline.comm.direct import Direct
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.link_cost import LinkCost
from paceline.errors import SettingError
from paceline.strategies.replicated import ddp_buckets, ddp_hook
from paceline.strategies.replicated.ddp_buckets import MB, WHOLE

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
    for strategy in ("ddp", "ddp:reducer=auto"):
        with started(progress="off", strategy=strategy) as run:
            assert isinstance(summing(run), SharedMemorySums)
            assert run._strategy.carrier() == "shared memory"
    with started(progress="off", strategy="ddp:reducer=native") as run:
        assert summing(run) is None
        assert run._strategy.carrier() == ""
    with pytest.MonkeyPatch.context() as patch:  # as if two were more than share memory
        patch.setattr(codec_sums, "SHARING", 1)
        with started(progress="off", strategy="ddp") as run:
            assert summing(run) is None
        with started(progress="off", strategy="ddp:reducer=auto") as run:
            assert isinstance(summing(run), NativeSums)
    with machines(2), started(progress="off") as run:
        assert summing(run) is None
    with machines(2), started(progress="off", strategy="ddp:reducer=auto") as run:
        assert not isinstance(summing(run), SharedMemorySums)


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
def test_no_choice_of_auto_changes_a_bit() -> None:
    """Shared memory and direct exchange add in rank order, whatever the buckets are; two processes in any order."""
    ways = ["ddp", "ddp:bucket_mb=0.01", "ddp:reducer=direct", "ddp:reducer=direct,bucket_mb=0.01", "ddp:reducer=auto"]
    if dist.get_world_size() == 2:
        ways += ["ddp:reducer=native", "ddp:reducer=native,bucket_mb=0.01", "ddp:reducer=ring"]
    found = {way: weights(way) for way in ways}
    with machines(dist.get_world_size()):
        found["auto, apart"] = weights("ddp:reducer=auto")
    different = [way for way, bits in found.items() if bits != found["ddp"]]
    assert not different


# --- auto


@pytest.mark.ranks(2, full=3)
def test_auto_trains_as_plain_pytorch_and_says_what_it_has_chosen() -> None:
    reference = plainly(Net, both_heads)
    for count, name in ((1, "shared_memory"), (dist.get_world_size(), "direct")):
        said = io.StringIO()
        with machines(count), contextlib.redirect_stderr(said):
            same(under_paceline(Net, both_heads, strategy="ddp:reducer=auto", micro=1), reference)
        lines = [line for line in said.getvalue().splitlines() if "reducer=auto: " in line]
        assert len(lines) == (dist.get_rank() == 0), said.getvalue()
        assert all(f"reducer=auto: {name}, since" in line for line in lines), lines


def test_auto_chooses_among_lossless_ways_only() -> None:
    with pytest.raises(SettingError, match="codec='bf16' with reducer=auto"):
        ddp_hook.check("auto", "bf16")


@pytest.mark.ranks(2, full=3)
def test_the_cost_of_a_sum_is_measured_and_the_same_on_all_ranks() -> None:
    """On a clock of its own. Now and then a sum takes twice as long, as on a busy machine; rank 0's times count."""
    latency, rate = 0.004, 50e6  # bytes a second
    clock, sums = SimpleNamespace(now=0.0), itertools.count()

    def add(flat: Tensor) -> None:
        clock.now += (latency * (1 + dist.get_rank()) + flat.nbytes / rate) * (2 if next(sums) % 3 == 0 else 1)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link_cost, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        found = link_cost.measure(add)
    assert found.latency_seconds == pytest.approx(latency + link_cost.SMALL_BYTES / rate)
    assert found.seconds_per_byte * rate == pytest.approx(1.0)
    assert len(set(collectives.gather_objects(tuple(found)))) == 1


@pytest.mark.parametrize(
    ("cost", "backward", "chosen"),
    [
        (LinkCost(0.08, 0.0), 0.0, lambda count: count == 1),  # far away: one message
        (LinkCost(1e-4, MBIT / 20), 1e-3, lambda count: count <= 2),  # nothing to hide behind
        (LinkCost(2e-4, MBIT / 100), 4 * MB * MBIT / 100, lambda count: count >= 10),  # as long as each other
    ],
)
def test_buckets_are_few_where_a_sum_waits_and_many_where_it_can_be_hidden(
    cost: LinkCost, backward: float, chosen: Callable[[int], bool]
) -> None:
    sizes = [2**16] * 64
    size = ddp_buckets.choose(sizes, cost, backward, 25.0)
    assert chosen(len(ddp_buckets.buckets(sizes, size))), size
    assert ddp_buckets.seconds(sizes, size, cost, backward) <= ddp_buckets.seconds(sizes, 25.0, cost, backward)


def test_the_given_size_stays_where_another_promises_little() -> None:
    assert ddp_buckets.choose([2**24] * 4, LinkCost(1e-4, 1e-10), 5.0, 25.0) == 25.0


def test_a_predicted_step_that_is_balanced_is_near_the_longer_one_of_both() -> None:
    sizes, cost = [2**16] * 64, LinkCost(5e-4, MBIT / 100)
    backward = sum(sizes) * cost.seconds_per_byte
    size = ddp_buckets.choose(sizes, cost, backward, 25.0)
    assert ddp_buckets.seconds(sizes, size, cost, backward) <= 1.10 * backward


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_mb", [0.1, 0.5, 1.0, 2.0, WHOLE])
def test_buckets_are_foreseen_as_torch_fills_them(bucket_mb: float) -> None:
    layers = [nn.Linear(256, width, bias=False) for width in (64, 256, 900, 256, 16, 512, 256, 256, 1500)]
    model = nn.ModuleList(layers)
    order = list(reversed([p for layer in layers for p in layer.parameters()]))
    with started(strategy="ddp", progress="off") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run._strategy.bucket_mb = bucket_mb  # type: ignore[attr-defined]
        for batch in run.batches(lambda rows: torch.ones(len(rows), 256), global_batch=2):
            x = batch
            loss = torch.zeros(())
            for layer in layers:
                loss = loss + layer(x).mean()
                x = x + loss.detach()
            run.backward(loss)
            break
        (reducer,) = run._strategy._reducers.values()  # type: ignore[attr-defined]
        found = [bucket.buffer().nbytes for bucket in reducer._ddp.reducer._get_zeros_like_grad_buckets()]
        assert found == ddp_buckets.buckets([p.nbytes for p in order], bucket_mb)


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
        Direct(dist.new_group()).add(torch.ones(12))
    assert seen
    for operations in seen:
        assert operations == sorted(operations), operations  # "irecv", "isend"


def test_whole_is_more_than_any_size() -> None:
    assert math.isinf(WHOLE)
    assert ddp_buckets.buckets([1, 2, 3], WHOLE) == [6]
