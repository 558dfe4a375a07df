"""Reducers: algorithms that add a tensor up over replicas, in place, each written once.

A replica reaches the others only through an `Endpoint`, by which it sends a tensor to one of them and receives one from
another at the same time. comm/endpoints.py has two: between processes, and between threads of one process. So a reducer
does not know whether it runs on several machines or on several devices of one.

Every sum is finished on one replica and copied from there: all replicas end with the same bits.

n replicas, B bytes:
  ring             n pieces travel around a ring, twice.       Each sends 2 (n - 1) / n B, in 2 (n - 1) turns.
  hierarchical     to one replica on each machine, the ring    A machine sends and receives 2 (m - 1) / m B (m machines)
                   between those, and back. (Where the         whatever number of replicas it has.
                   processes of a machine share memory, they
                   add up and copy there: codec_sums.py.)
  reduce_to_one    to the first replica, and back, by trees.   The first sends and receives up to log2(n) B, the others
                                                               about B each; 2 log2(n) turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Endpoint(Protocol):
    """The other replicas, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def machines(self) -> Sequence[Sequence[int]]:
        """All ranks in groups that are near each other: a machine, a socket, a switch."""

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        """Sends `send` to replica `to`, and receives `into` from replica `source`, both at once.

        Either may be None. The tensors are contiguous and have the length that the other side passes. Both may be used
        and overwritten afterwards (on an accelerator: by what is enqueued from here on).
        """


Reducer = Callable[[Tensor, Endpoint], None]
"""Replaces a 1-d contiguous tensor by the sum of all replicas' tensors of that length and dtype."""


def ring(flat: Tensor, endpoint: Endpoint) -> None:
    """Ring all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"), which Horovod brought to deep learning (Sergeev and Del Balso 2018).

    Two phases of n - 1 turns. In each turn every replica hands one of n pieces to its right neighbour.
    """
    rank, n = endpoint.rank, endpoint.size
    if n == 1 or flat.numel() == 0:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    pieces = flat.tensor_split(n)  # the first numel % n are one longer; some are empty where numel < n
    received = torch.empty_like(pieces[0])

    # Phase 1, scatter-reduce: a piece gains one replica's addend in each turn; in the end replica r holds the whole sum
    # of piece r + 1.
    for turn in range(n - 1):
        own, gained = pieces[(rank - turn) % n], pieces[(rank - turn - 1) % n]
        arrived = received[: gained.numel()]
        endpoint.exchange(own, right, arrived, left)
        gained += arrived

    # Phase 2, all-gather: each finished piece goes around once.
    for turn in range(n - 1):
        endpoint.exchange(pieces[(rank + 1 - turn) % n], right, pieces[(rank - turn) % n], left)


def reduce_to_one(flat: Tensor, endpoint: Endpoint) -> None:
    """To replica 0 and back, as tf.distribute.ReductionToOneDevice does; by binomial trees."""
    everyone = range(endpoint.size)
    _reduce(flat, endpoint, everyone)
    _spread(flat, endpoint, everyone)


def hierarchical(flat: Tensor, endpoint: Endpoint) -> None:
    """Within each machine to its first replica, by the ring between these, and back; as
    tf.distribute.HierarchicalCopyAllReduce. Machines may have unequally many replicas."""
    (near,) = (machine for machine in endpoint.machines if endpoint.rank in machine)
    _reduce(flat, endpoint, near)
    ring_of_machines(flat, endpoint)
    _spread(flat, endpoint, near)


def ring_of_machines(flat: Tensor, endpoint: Endpoint) -> None:
    """The ring between each machine's first replica. What the others pass stays as it is."""
    firsts = [machine[0] for machine in endpoint.machines]
    if endpoint.rank in firsts:
        ring(flat, _Subset(endpoint, firsts))


REDUCERS: dict[str, Reducer] = {"ring": ring, "hierarchical": hierarchical, "reduce_to_one": reduce_to_one}


def _reduce(flat: Tensor, endpoint: Endpoint, ranks: Sequence[int]) -> None:
    """The sum over these replicas, on the first of them. The others' tensors are partial sums afterwards."""
    if flat.numel() == 0:
        return
    mine, step = ranks.index(endpoint.rank), 1
    received: Tensor | None = None
    while step < len(ranks):
        if mine & step:
            endpoint.exchange(flat, ranks[mine - step], None, 0)
            return
        if mine + step < len(ranks):
            received = torch.empty_like(flat) if received is None else received
            endpoint.exchange(None, 0, received, ranks[mine + step])
            flat += received
        step *= 2


def _spread(flat: Tensor, endpoint: Endpoint, ranks: Sequence[int]) -> None:
    """The first one's tensor on all of these replicas."""
    if flat.numel() == 0:
        return
    mine, step = ranks.index(endpoint.rank), 1
    while step < len(ranks) and not mine & step:
        step *= 2
    if mine:
        endpoint.exchange(None, 0, flat, ranks[mine - step])
    step //= 2
    while step:
        if mine + step < len(ranks):
            endpoint.exchange(flat, ranks[mine + step], None, 0)
        step //= 2


class _Subset:
    """An endpoint's view of some of the replicas, numbered from 0 in the order given."""

    def __init__(self, whole: Endpoint, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.machines = [range(self.size)]

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        self._whole.exchange(send, self._ranks[to], into, self._ranks[source])
