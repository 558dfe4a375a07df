"""Reducers and codecs on 4 processes: sums, and bytes read from the network interface."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from paceline.comm import codec_sums, same_bits, shared_memory
from paceline.comm.codec_sums import NativeSums, ReducerSums
from paceline.comm.codecs import PowerSGD, Rounding, TopK, parse
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.mesh import world_group
from paceline.comm.reducers import REDUCERS, ring
from paceline.comm.shared_memory import PART_BYTES

MEGABYTES = 4


def own(numel: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.ranks(conformance=4)
def test_every_reducer_sums_with_the_same_bits_on_all_ranks_on_one_machine_and_two() -> None:
    """On one machine; on two, each with two; on two, one of which has three."""
    for node in (0, dist.get_rank() // 2, int(dist.get_rank() == 1)):
        endpoint = ProcessEndpoint(node)
        assert sorted(rank for machine in endpoint.machines for rank in machine) == list(range(4))
        for reducer in REDUCERS.values():
            for numel in (0, 1, 3, 4, 1001):
                total = own(numel)
                reducer(total, endpoint)
                expected = sum(torch.stack(world_group().gather(own(numel))))
                torch.testing.assert_close(total, expected if numel else total, rtol=1e-12, atol=1e-12)
                assert not same_bits.digest_mismatch([("sum", total)], world_group())


@pytest.mark.ranks(conformance=4)
def test_a_reducer_does_not_mix_with_collectives_in_another_thread() -> None:
    endpoint = ProcessEndpoint()
    sums: list[Tensor] = []

    def reduce() -> None:
        for _ in range(50):
            total = torch.full((1000,), float(dist.get_rank()))
            ring(total, endpoint)
            sums.append(total)

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(50):
        assert world_group().all_reduce(torch.ones(1000)).tolist() == [4.0] * 1000
    thread.join()
    assert all(total.tolist() == [6.0] * 1000 for total in sums)


def must_send(work: Callable[[], object], formula: float, tolerance: float = 0.03) -> None:
    """Bytes that all ranks together send through the loopback interface, in MEGABYTES. The least of several times,
    since other programs may send too: of 3, and of up to 20 while it is too much."""
    counts: list[float] = []
    while len(counts) < 3 or (len(counts) < 20 and min(counts) > formula * (1 + tolerance)):
        world_group().barrier()
        before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        world_group().barrier()
        work()
        world_group().barrier()
        sent = psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before
        counts.append(min(world_group().gather(sent)) / (MEGABYTES * 2**20))
    assert formula * (1 - 1e-3) <= min(counts) <= formula * (1 + tolerance), (formula, counts)


@pytest.mark.ranks(conformance=4)
def test_a_ring_sends_the_bytes_of_its_formula_read_from_the_interface() -> None:
    """2 (n - 1) / n of the tensor's bytes from each of n replicas."""
    flat, endpoint = torch.ones(MEGABYTES * 2**18), ProcessEndpoint()
    must_send(lambda: ring(flat, endpoint), 4 * 2 * 3 / 4)
    must_send(lambda: REDUCERS["reduce_to_one"](flat, endpoint), 2 * 3)


@pytest.mark.ranks(conformance=4)
def test_codecs_send_the_bytes_of_their_formulas_read_from_the_interface() -> None:
    n, side = 4, 1024
    assert side * side == MEGABYTES * 2**18
    like, shape = torch.zeros(1), (side, side)
    values = own(side * side, torch.float32)
    rings = 4 * 2 * 3 / 4
    for sums in (NativeSums(), ReducerSums(ring, ProcessEndpoint())):
        for codec, formula in (
            (Rounding("bf16", torch.bfloat16), rings / 2),
            (Rounding("fp16", torch.float16), rings / 2),
            (PowerSGD(32), rings * 32 * 2 / side),
            (TopK(0.05), n * (n - 1) * 0.05 * 2),  # to all others, an index and a value
        ):
            state = codec.init(shape, like)
            must_send(lambda: codec.total(values.clone(), [shape], [state], sums), formula, 0.06)  # noqa: B023


@pytest.mark.ranks(conformance=4)
def test_what_codecs_leave_out_is_in_the_residuals_and_all_ranks_decode_the_same_bits() -> None:
    """All gradients = all that was decoded + the residuals, and all ranks decode the same bits."""
    shapes = [(30, 20), (11,), (), (0,)]
    for sums in (NativeSums(), ReducerSums(ring, ProcessEndpoint())):
        for text in ("bf16", "fp16", "powersgd:rank=2", "topk:ratio=0.1"):
            codec = parse(text)
            assert codec is not None
            states = [codec.init(shape, own(1), seed=1) for shape in shapes]
            given = decoded = torch.zeros(612, dtype=torch.float64)
            for step in range(5):
                flat = own(612) * torch.logspace(-5, 1, 612, dtype=torch.float64) * (step + 1)
                given = given + flat
                for part, state in zip(flat.split([600, 11, 1, 0]), states, strict=True):
                    part += state["residual"]
                states = codec.total(flat, shapes, states, sums)
                assert not same_bits.digest_mismatch([("decoded", flat)], world_group())
                decoded = decoded + flat
            left = torch.cat([state["residual"] for state in states])
            world_group().all_reduce(given)
            world_group().all_reduce(left)
            assert (given - decoded - left).norm() < 1e-13 * given.norm(), text
            assert left.norm() > 1e-6 * given.norm(), text


class Bucket:
    """What torch's hooks want to see of a bucket."""

    def __init__(self, flat: Tensor, shapes: list[tuple[int, ...]]) -> None:
        self.flat = flat
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        self.parts = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.parts

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


@pytest.mark.ranks(conformance=4)
def test_power_sgd_sums_as_torchs_own_hook_does() -> None:
    """The same sums as torch's own powerSGD_hook over several steps, from the same first Q."""
    shapes: list[tuple[int, ...]] = [(30, 20), (8, 3, 3, 3), (11,)]
    numel, codec, sums = 600 + 216 + 11, PowerSGD(3), NativeSums()
    states = [codec.init(shape, own(1), seed=number) for number, shape in enumerate(shapes)]
    theirs = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=3, start_powerSGD_iter=2, min_compression_rate=1
    )
    theirs.iter = 2
    theirs.q_memory_dict[0] = torch.cat([state["q"].flatten() for state in states if "q" in state])
    theirs.p_memory_dict[0] = own(3 * (30 + 8))
    for step in range(4):
        gradient = own(numel) + torch.linspace(-1, 1, numel, dtype=torch.float64) * step
        expected = powerSGD_hook.powerSGD_hook(theirs, Bucket(gradient.clone(), shapes)).wait() * 4  # a mean
        flat = gradient.clone()
        for part, state in zip(flat.split([600, 216, 11]), states, strict=True):
            part += state["residual"]
        states = codec.total(flat, shapes, states, sums)
        torch.testing.assert_close(flat, expected, rtol=1e-8, atol=1e-8)
        assert not torch.allclose(flat, sum(torch.stack(world_group().gather(gradient))), rtol=1e-3)


@pytest.mark.ranks(2, full=(3, 4))
def test_the_hierarchical_sum_is_exact_with_shared_memory_within_each_machine() -> None:
    """On one machine; on two, each with half of the processes; on two, one of which has one process; and where the
    processes of one machine cannot share memory."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for nodes in ([0] * size, [k * 2 // size for k in range(size)], [int(k == 1) for k in range(size)]):
        for able in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                if not able and nodes[rank] == 0:
                    patch.setattr(shared_memory, "supported", lambda: False)
                sums = codec_sums.make("hierarchical", nodes[rank], torch.device("cpu"))
            alone = nodes.count(nodes[rank]) == 1
            assert (sums._memory is not None) == (not alone and (able or nodes[rank] == 1))  # type: ignore[attr-defined]
            for numel in (0, 1, 5, 1001, 2 * PART_BYTES // 8 + 3):
                total = own(numel)
                sums.add(total)
                expected = sum(torch.stack(world_group().gather(own(numel))))
                torch.testing.assert_close(total, expected if numel else total, rtol=1e-12, atol=1e-12)
                assert not same_bits.digest_mismatch([("sum", total)], world_group())
            sums.close()  # type: ignore[attr-defined]


@pytest.mark.ranks(conformance=4)
def test_within_a_machine_the_hierarchical_sum_sends_nothing() -> None:
    """Two machines of two processes: the ring of the two firsts sends 2 (2 - 1) / 2 of the bytes from each."""
    sums = codec_sums.make("hierarchical", dist.get_rank() // 2, torch.device("cpu"))
    flat = torch.ones(MEGABYTES * 2**20 // 4)
    must_send(lambda: sums.add(flat), 2.0)
    sums.close()  # type: ignore[attr-defined]
