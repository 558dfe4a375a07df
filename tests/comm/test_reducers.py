"""Reducers between threads: the sum, the same bits on all, and the bytes of the formulas. Between processes:
test_reducers_on_ranks.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.endpoints import ReplicaStopped, ThreadEndpoint, thread_endpoints
from paceline.comm.reducers import REDUCERS

MACHINES: list[tuple[int, list[list[int]] | None]] = [
    (1, None),
    (2, None),
    (3, None),
    (4, [[0, 1], [2, 3]]),
    (5, [[0, 1, 2], [3], [4]]),
    (7, [[3, 0], [1, 2, 4, 5, 6]]),
]


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Calls all at the same time; what each returned, or the exception that it raised."""
    results: list[Any] = [None] * len(functions)

    def call(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "not done after 20 s"
    return results


def reduced(name: str, tensors: Sequence[Tensor], endpoints: Sequence[ThreadEndpoint]) -> list[Any]:
    """The reducer on all replicas' tensors, in place."""
    return in_threads([partial(REDUCERS[name], *pair) for pair in zip(tensors, endpoints, strict=True)])


class Counting(ThreadEndpoint):
    """Counts the bytes that it hands over, and how often it does so."""

    sent = turns = 0

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        self.turns += 1
        self.sent += 0 if send is None else send.nbytes
        super().exchange(send, to, into, source)


def counting(size: int, machines: Sequence[Sequence[int]] | None = None) -> list[Counting]:
    made = thread_endpoints(size, machines)
    return [Counting(one._boxes, one.rank, one.size, one.machines) for one in made]


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize(("size", "machines"), MACHINES)
def test_sum_in_threads(name: str, size: int, machines: list[list[int]] | None) -> None:
    endpoints = thread_endpoints(size, machines)
    for numel in (0, 1, size - 1, size, 3 * size + 1, 1000):
        own = [torch.randn(numel, dtype=torch.float64) for _ in range(size)]
        sums = [tensor.clone() for tensor in own]
        assert reduced(name, sums, endpoints) == [None] * size
        for one in sums:
            assert torch.equal(one, sums[0]), "all replicas end with the same bits"
        torch.testing.assert_close(sums[0], torch.stack(own).sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("name", REDUCERS)
def test_whole_numbers_are_exact_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    endpoints = thread_endpoints(3)
    sums = [torch.arange(10).add(i).to(dtype) for i in range(3)]
    reduced(name, sums, endpoints)
    for one in sums:
        assert torch.equal(one, (3 * torch.arange(10) + 3).to(dtype))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_ring_sends_2_n_minus_1_nths(size: int) -> None:
    """Of each replica's tensor, in 2 (n - 1) turns: Patarasuk and Yuan's bound. 840 is divisible by all sizes."""
    endpoints = counting(size)
    reduced("ring", [torch.ones(840) for _ in endpoints], endpoints)
    for endpoint in endpoints:
        assert endpoint.sent == 2 * (size - 1) * 840 * 4 // size
        assert endpoint.turns == 2 * (size - 1)


def test_hierarchical_sends_between_machines_what_a_ring_of_machines_sends() -> None:
    machines = [[0, 1, 2], [3], [4, 5]]
    endpoints = counting(6, machines)
    crossed = dict.fromkeys(range(3), 0)
    of = {rank: number for number, machine in enumerate(machines) for rank in machine}

    class Crossing(Counting):
        def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
            if send is not None and of[to] != of[self.rank]:
                crossed[of[self.rank]] += send.nbytes
            super().exchange(send, to, into, source)

    watched = [Crossing(one._boxes, one.rank, one.size, one.machines) for one in endpoints]
    reduced("hierarchical", [torch.ones(840) for _ in watched], watched)
    assert crossed == dict.fromkeys(range(3), 2 * 2 * 840 * 4 // 3)


def test_reduce_to_one_goes_over_replica_0() -> None:
    endpoints = counting(4)
    reduced("reduce_to_one", [torch.ones(100) for _ in endpoints], endpoints)
    assert [endpoint.sent for endpoint in endpoints] == [800, 400, 800, 400]


@pytest.mark.parametrize("name", REDUCERS)
def test_one_that_fails_frees_the_others(name: str) -> None:
    endpoints = thread_endpoints(4)

    def fail() -> None:
        endpoints[2].abandon()
        raise ZeroDivisionError

    functions: list[Callable[[], Any]] = [partial(REDUCERS[name], torch.ones(100), one) for one in endpoints]
    functions[2] = fail
    done = in_threads(functions)
    assert isinstance(done[2], ZeroDivisionError)
    assert isinstance(done[0], ReplicaStopped), "it waits for the sum of all"
    assert all(result is None or isinstance(result, ReplicaStopped) for result in (done[1], done[3]))
