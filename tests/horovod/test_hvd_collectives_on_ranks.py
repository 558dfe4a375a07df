"""Horovod's collectives, by formulas: values, gradients, names, join, batch norm, and what is refused."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
import paceline.horovod as hvd
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError, WorldError
from paceline.horovod import hvd_state, hvd_world
from paceline.horovod.gradient_reducer import reducers


@pytest.fixture(autouse=True)
def left_alone() -> Iterator[None]:
    yield
    for reducer in list(reducers):
        reducer.close()


def place() -> tuple[int, int]:
    hvd.init()
    return hvd.rank(), hvd.size()


def everyones(make: Any) -> list[Any]:
    return [make(rank) for rank in range(hvd.size())]


@pytest.mark.ranks(1, 2, full=3)
def test_reductions_of_numbers_lists_and_integers() -> None:
    rank, size = place()
    own = torch.tensor([[1.0, -2.0]]) * (rank + 1)
    rows = torch.stack(everyones(lambda r: torch.tensor([[1.0, -2.0]]) * (r + 1)))
    assert torch.equal(hvd.allreduce(own, name="loss"), rows.mean(0))
    assert torch.equal(hvd.allreduce(own, average=False), rows.sum(0))
    for op, expected in (
        (hvd.Average, rows.mean(0)), (hvd.Sum, rows.sum(0)), (hvd.Min, rows.amin(0)), (hvd.Max, rows.amax(0)),
        (hvd.Product, rows.prod(0)),
    ):  # fmt: skip
        assert torch.equal(hvd.allreduce(own, op=op), expected)
        first, second = hvd.grouped_allreduce([own, own * 2], op=op)
        assert torch.equal(first, expected)
        assert second.shape == own.shape
    assert torch.equal(own, torch.tensor([[1.0, -2.0]]) * (rank + 1)), "a new tensor"
    assert torch.allclose(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), rows.sum(0) * 2)
    numbers = torch.tensor([3, -3]) * (rank + 1)
    assert hvd.allreduce(numbers).tolist() == [int(3 * (size + 1) / 2), int(-3 * (size + 1) / 2)]
    halves = hvd.allreduce(own.double(), compression=hvd.Compression.fp16)
    assert halves.dtype == torch.float64
    assert torch.equal(halves, rows.mean(0).double())
    assert hvd.allreduce_(own) is own
    assert torch.equal(own, rows.mean(0))
    total = hvd.synchronize(
        hvd.sparse_allreduce_async(torch.eye(3).to_sparse() * (rank + 1), name="sparse", op=hvd.Average)
    )
    assert torch.equal(total.to_dense(), torch.eye(3) * (size + 1) / 2)


@pytest.mark.ranks(2, full=3)
def test_gathering_broadcasting_and_exchanging_rows() -> None:
    rank, size = place()
    parts = everyones(lambda r: torch.full((r, 2), float(r)))
    assert torch.equal(hvd.allgather(parts[rank]), torch.cat(parts))
    assert [len(t) for t in hvd.grouped_allgather([parts[rank], torch.ones(1)])] == [sum(range(size)), size]
    own = torch.full((2,), float(rank))
    assert hvd.broadcast(own, root_rank=size - 1).tolist() == [size - 1.0] * 2
    assert own.tolist() == [rank] * 2
    assert hvd.broadcast_(own, 1) is own
    assert own.tolist() == [1.0] * 2
    rows = torch.arange(size) + 10 * rank
    assert isinstance(swapped := hvd.alltoall(rows), Tensor)
    assert swapped.tolist() == [10 * r + rank for r in range(size)]
    splits = torch.tensor([r + rank for r in range(size)])  # to rank r: r + rank rows
    sent, received = hvd.alltoall(torch.full((int(splits.sum()), 1), float(rank)), splits=splits)
    assert received.tolist() == [r + rank for r in range(size)]
    assert torch.equal(sent, torch.cat([torch.full((r + rank, 1), float(r)) for r in range(size)]))
    whole = torch.arange(5.0) * (rank + 1)
    piece = hvd.reducescatter(whole, op=hvd.Sum)
    assert torch.equal(hvd.allgather(piece), torch.arange(5.0) * size * (size + 1) / 2)
    assert len(piece) == 5 // size + (rank < 5 % size)
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(whole)), piece / size)
    assert hvd.allgather_object({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert hvd.broadcast_object({"of": rank, "function": lambda: rank}, root_rank=1)["of"] == 1  # type: ignore[dict-item]
    hvd.barrier()


@pytest.mark.ranks(2)
def test_between_machines_objects_of_other_classes_are_pickled_only_where_the_user_allows_it() -> None:
    rank, _ = place()
    opaque = {"of": rank, "function": lambda: rank}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hvd_world, "cross_size", lambda: 2)
        assert hvd.allgather_object({"rank": rank, "rows": torch.ones(2)})[1]["rank"] == 1
        with pytest.raises(
            UsageError, match=r"obj\) at function: a function cannot be sent.*PACELINE_HOROVOD_PICKLE=1"
        ):
            hvd.allgather_object(opaque)
        if rank == 0:  # which would send it: the other asks for what never comes
            with pytest.raises(UsageError, match="PACELINE_HOROVOD_PICKLE=1"):
                hvd.broadcast_object(opaque, root_rank=0)
        patch.setattr(hvd_state, "_may_pickle", lambda: rank == 0)  # of the other, the sender
        sent = hvd_state._to_send(opaque, "obj") if rank == 0 else ("plain", 1)
        received = world_group().gather(sent)[0]
        if rank == 1:
            with pytest.raises(UsageError, match="received a pickle from another machine"):
                hvd_state._received(received, "hvd.broadcast_object")
        patch.undo()
        patch.setattr(hvd_world, "cross_size", lambda: 2)
        patch.setenv("PACELINE_HOROVOD_PICKLE", "1")
        assert [other["of"] for other in hvd.allgather_object(opaque)] == [0, 1]


@pytest.mark.ranks(2)
def test_gradients_are_those_of_horovods_formulas() -> None:
    rank, size = place()
    weights = everyones(lambda r: torch.tensor([1.0 + r, 10.0 * (r + 1)]))

    def gradient(call: Any) -> Tensor:
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        y = call(x)
        (y * torch.cat([weights[rank]] * (len(y) // 2) or [weights[rank][:1]])).sum().backward()
        assert x.grad is not None
        return x.grad

    mean, total = sum(weights) / size, sum(weights)
    assert torch.equal(gradient(hvd.allreduce), mean)
    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum)), total)
    assert torch.equal(gradient(hvd.allgather), mean)
    assert torch.equal(gradient(lambda x: hvd.broadcast(x, 1)), mean * (rank == 1))
    assert torch.equal(gradient(hvd.alltoall), torch.stack([w[rank] for w in weights]))
    firsts = torch.stack([w[0] for w in weights])
    assert torch.equal(gradient(hvd.reducescatter), firsts)
    assert torch.equal(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum)), firsts * size)
    with pytest.raises(UsageError, match="has no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max))


@pytest.mark.ranks(conformance=3)
def test_names_and_not_the_order_say_what_belongs_together() -> None:
    rank, size = place()
    names = ["a", "b", "c"]
    order = names[rank:] + names[:rank]
    handles = {name: hvd.allreduce_async(torch.tensor([float(ord(name))]), name=name) for name in order}
    for name in reversed(order):
        assert hvd.synchronize(handles[name]).item() == ord(name)
        assert hvd.poll(handles[name])
    late = hvd.allreduce_async_(torch.ones(1), name="late", op=hvd.Sum)
    while not hvd.poll(late):
        pass
    assert late.result.item() == size
    with pytest.raises(SettingError, match="_async in its name"):
        hvd.synchronize(3)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_calls_that_do_not_fit_together_are_named_on_every_process() -> None:
    rank, _ = place()
    with pytest.raises(
        UsageError, match=r"allreduce 'x' is not the same call.*rank 0: Average of float32 \(1,\); rank 1"
    ):
        hvd.allreduce(torch.ones(rank + 1), name="x")
    with pytest.raises(UsageError, match=r"rank 0 waits for allreduce 'only 0'; rank 1 waits for broadcast 'b'"):
        (hvd.allreduce(torch.ones(1), name="only 0") if rank == 0 else hvd.broadcast(torch.ones(1), 0, name="b"))
    first = hvd.allreduce_async(torch.ones(1), name="twice")
    with pytest.raises(UsageError, match="was called again while a call with that name is pending"):
        hvd.allreduce_async(torch.ones(1), name="twice")
    hvd.synchronize(first)
    with pytest.raises(UsageError, match="dimension 0"):
        hvd.allgather(torch.tensor(1.0))
    assert hvd.allreduce(torch.ones(1)).item() == 1, "and afterwards all is well"


@pytest.mark.ranks(2)
def test_what_there_is_not_is_refused_with_a_remedy() -> None:
    place()
    one = torch.ones(1)
    for call, words in (
        (lambda: hvd.allreduce(one, op=hvd.Adasum), "op=hvd.Average"),
        (lambda: hvd.allreduce(one, op="mean"), "Average, Sum, Min, Max or Product"),
        (lambda: hvd.allreduce(one, average=True, op=hvd.Sum), "Leave out average"),
        (lambda: hvd.allreduce(3.0), r"received float instead of a tensor. Write torch\.tensor"),  # type: ignore[arg-type]
        (lambda: hvd.allreduce(one.to_sparse()), "sparse_allreduce_async"),
        (lambda: hvd.broadcast(one, 7), "rank from 0 to 1"),
        (lambda: hvd.alltoall(torch.ones(3)), "cannot be divided evenly among 2 processes"),
        (lambda: hvd.alltoall(one, splits=[1]), "a number of rows for each of the 2 processes, 1 in total"),
        (lambda: hvd.alltoall(torch.tensor(1.0)), "reshape"),
        (lambda: hvd.reducescatter(one, op=hvd.Max), "hvd.Average or hvd.Sum"),
        (lambda: hvd.ProcessSet([0]), "torch.distributed.new_group"),
        (lambda: hvd.add_process_set([0]), "torch.distributed.new_group"),
        (lambda: hvd.allreduce(one, process_set=[0]), "torch.distributed.new_group"),
        (lambda: hvd.broadcast_parameters(nn.Linear(1, 1), 0), "state_dict"),
        (lambda: hvd.broadcast_parameters({"a": 1}, 0), "'a' is not a tensor"),
        (lambda: hvd.broadcast_parameters(3, 0), "received int"),
        (lambda: hvd.start_timeline("x.json"), "torch.profiler"),
        (lambda: hvd.run(print, hosts="a:2,b:2"), "this machine only"),
        (lambda: hvd.run(print, min_np=2), "min_np=2"),
    ):  # fmt: skip
        with pytest.raises((SettingError, UsageError), match=words):
            call()


def test_every_form_of_a_collective_shows_its_name_and_its_settings() -> None:
    settings = ["average", "name", "op", "prescale_factor", "postscale_factor", "process_set"]
    for name in ("allreduce_", "allreduce_async", "allreduce_async_"):
        for prefix, first in (("", "tensor"), ("grouped_", "tensors")):
            made = getattr(hvd, prefix + name)
            assert list(inspect.signature(made).parameters) == [first, *settings]
            assert (made.__name__, made.__doc__[:11]) == (prefix + name, "`allreduce`")
    assert list(inspect.signature(hvd.allreduce).parameters)[:5] == ["tensor", "average", "name", "compression", "op"]
    assert str(inspect.signature(hvd.broadcast)).startswith("(tensor: 'Tensor', root_rank: 'int', name: 'str | None'")
    for name in hvd.__all__:
        thing = getattr(hvd, name)
        if inspect.isfunction(thing) and not name.startswith(("mpi", "gloo", "ddl", "ccl", "remove")):
            assert thing.__name__ == name
            assert thing.__doc__


@pytest.mark.ranks(2)
def test_ranks_sizes_and_what_is_built() -> None:
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(UsageError, match=r"hvd\.init\(\) first"):
        hvd.rank()
    with pytest.raises(UsageError, match=r"hvd\.init\(\) first"):
        hvd.allreduce(torch.ones(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.comm.process_group.runs", 0)
        patch.setenv("PACELINE_SETTINGS", '{"strategy": "fsdp"}')
        with pytest.raises(SettingError, match=r"strategy='fsdp'.*paceline\.start"):
            hvd.init()
        patch.setenv("PACELINE_SETTINGS", "{}")
        patch.setenv("PACELINE_TRIAL", "{}")
        with pytest.raises(UsageError, match="paceline doctor"):
            hvd.init()
    with pytest.raises(SettingError, match="communicator"):
        hvd.init(comm=[0, 1])
    with pytest.raises(SettingError, match="new_group"):
        hvd.init(process_sets=[[0]])
    rank, size = place()
    hvd.init()
    assert (rank, size) == (int(os.environ["RANK"]), 2)
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, 2, 0, 1)
    assert hvd.is_homogeneous()
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    assert not any([hvd.mpi_built(), hvd.mpi_enabled(), hvd.mpi_threads_supported(), hvd.ddl_built(), hvd.ccl_built()])
    assert hvd.nccl_built() == torch.distributed.is_nccl_available()
    assert (hvd.cuda_built(), hvd.rocm_built()) == (torch.version.cuda is not None, torch.version.hip is not None)


def test_horovodrun_is_told_that_it_cannot_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setenv("HOROVOD_RANK", "1")
    with pytest.raises(WorldError, match=r"HOROVOD_SIZE=4: horovodrun.*paceline run --nproc 4"):
        hvd.init()


@pytest.mark.ranks(1, 2)
def test_calls_go_on_in_a_run_of_paceline_start() -> None:
    """Half way through a migration."""
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_SETTINGS", '{"precision": "fp32"}')
        run = paceline.start(progress="off")
        rank, size = place()
    assert (rank, size) == (run.rank, run.world_size)
    assert hvd.allreduce(torch.tensor([1.0 + rank]), op=hvd.Sum).item() == size * (size + 1) / 2
    run.close()


@pytest.mark.ranks(conformance=3)
def test_join_adds_zeros_until_all_have_come() -> None:
    """Averages divide by all processes, as Horovod's do (operations.cc: postscale_factor /= GetSize())."""
    rank, size = place()
    model = nn.Linear(2, 1, bias=False).double()
    nn.init.ones_(model.weight)
    other = nn.Linear(2, 1, bias=False).double()
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(m.parameters(), lr=0.5), m.named_parameters()) for m in (model, other)
    ]
    steps = [2, 1, 4][rank]
    for step in range(steps):
        for m, optimizer in zip((model, other), optimizers, strict=True):
            optimizer.zero_grad()
            m(torch.tensor([[1.0, rank]]).double()).sum().backward()
            optimizer.step()
        here = [r for r in range(size) if [2, 1, 4][r] > step]
        assert hvd.allreduce(torch.tensor([float(rank + 1)]), op=hvd.Sum).item() == sum(r + 1 for r in here)
        hvd.barrier()
    assert hvd.join() == 2
    hvd.broadcast_parameters(model.state_dict(), root_rank=2)
    expected = torch.ones(2).double()
    for step in range(4):
        here = [r for r in range(size) if [2, 1, 4][r] > step]
        expected -= 0.5 * torch.tensor([len(here) / size, sum(here) / size]).double()
    assert torch.allclose(model.weight[0], expected, atol=1e-15)
    assert hvd.join() == size - 1


@pytest.mark.ranks(2)
def test_join_does_not_stand_in_where_all_are_needed() -> None:
    rank, _ = place()
    with pytest.raises(UsageError, match=r"allgather.*rank 1 has called hvd\.join"):
        (hvd.join() if rank == 1 else hvd.allgather(torch.ones(1)))
    model = nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UsageError, match="between a backward and the step"):
        hvd.join()
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [2, 3])
def test_sync_batch_norm_is_that_of_the_whole_batch(first: int) -> None:
    """Also where the processes have unequally many examples."""
    rank, _ = place()
    torch.manual_seed(0)
    whole = torch.randn(6, 3, 4).double()
    weights = torch.randn(6, 3, 4).double()
    plain = nn.BatchNorm1d(3).double()
    plain.weight.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    synced = hvd.SyncBatchNorm(3).double()
    synced.load_state_dict(plain.state_dict())
    x = whole.clone().requires_grad_()
    (plain(x) * weights).sum().backward()
    part = slice(0, first) if rank == 0 else slice(first, 6)
    own = whole[part].clone().requires_grad_()
    (synced(own) * weights[part]).sum().backward()
    assert x.grad is not None
    assert own.grad is not None
    assert torch.allclose(own.grad, x.grad[part], atol=1e-13)
    assert torch.allclose(synced.running_var, plain.running_var, atol=1e-13)
    for found, expected in zip(synced.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert torch.allclose(hvd.allreduce(found.grad, op=hvd.Sum), expected.grad, atol=1e-12)
    synced.eval()
    plain.eval()
    assert torch.allclose(synced(own), plain(own), atol=1e-13)
