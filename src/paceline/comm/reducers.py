"""Reducers: algorithms that sum a tensor over replicas, in place.

A replica reaches the others only through an `Endpoint`, which sends a tensor to one replica and at the same time
receives a tensor from another. comm/endpoints.py has an endpoint between processes, and an endpoint between threads of
one process. So the same reducer code runs on several machines, and on several devices of one machine.

Every sum is finished on one replica and copied from there, so all replicas end with the same bits.

Costs for n replicas on m machines, and tensors of B bytes:

  ring            n pieces travel around a ring twice. Each replica sends 2 (n - 1) / n B bytes, in 2 (n - 1) turns.
  hierarchical    Each machine sums to its first replica. These replicas run the ring, and then copy the sum to the
                  others on their machine. A machine sends and receives 2 (m - 1) / m B bytes, independent of its number
                  of replicas. (If the processes of a machine share memory, they sum and copy in it: codec_sums.py.)
  reduce_to_one   A tree sums to the first replica, and a tree copies back, in 2 log2(n) turns. The first replica sends
                  and receives up to log2(n) B bytes, the others about B bytes each.
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
        """All ranks, grouped by machine (or by socket or switch)."""

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        """Send `send` to replica `to` and receive `into` from replica `source`, both at once.

        Either tensor may be None. Tensors are contiguous, and equally long on both sides. After the call they may be
        read and overwritten (on an accelerator: by work enqueued after the call).
        """


Reducer = Callable[[Tensor, Endpoint], None]
"""Replaces a 1-d contiguous tensor by its sum over the replicas. They pass the same length and dtype."""


def ring(flat: Tensor, endpoint: Endpoint) -> None:
    """Ring all-reduce (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations"), which Horovod brought to deep learning (Sergeev and Del Balso 2018).

    Two phases of n - 1 turns. In each turn every replica sends one of n pieces to its right neighbour.
    """
    rank, n = endpoint.rank, endpoint.size
    if n == 1 or flat.numel() == 0:
        return
    right, left = (rank + 1) % n, (rank - 1) % n
    pieces = flat.tensor_split(n)  # the first numel % n pieces have one element more; some are empty if numel < n
    received = torch.empty_like(pieces[0])

    # Phase 1, scatter-reduce: a piece gains one replica's addend in each turn. At the end replica r holds the complete
    # sum of piece r + 1.
    for turn in range(n - 1):
        own, gained = pieces[(rank - turn) % n], pieces[(rank - turn - 1) % n]
        arrived = received[: gained.numel()]
        endpoint.exchange(own, right, arrived, left)
        gained += arrived

    # Phase 2, all-gather: each finished piece goes around once.
    for turn in range(n - 1):
        endpoint.exchange(pieces[(rank + 1 - turn) % n], right, pieces[(rank - turn) % n], left)


def reduce_to_one(flat: Tensor, endpoint: Endpoint) -> None:
    """Sum to replica 0 and copy back by binomial trees. The counterpart of tf.distribute.ReductionToOneDevice."""
    everyone = range(endpoint.size)
    _reduce(flat, endpoint, everyone)
    _spread(flat, endpoint, everyone)


def hierarchical(flat: Tensor, endpoint: Endpoint) -> None:
    """Sum to the first replica of each machine, run the ring between these, and copy back within each machine. The
    counterpart of tf.distribute.HierarchicalCopyAllReduce. Machines may have different numbers of replicas."""
    (near,) = (machine for machine in endpoint.machines if endpoint.rank in machine)
    _reduce(flat, endpoint, near)
    ring_of_machines(flat, endpoint)
    _spread(flat, endpoint, near)


def ring_of_machines(flat: Tensor, endpoint: Endpoint) -> None:
    """Run the ring between the first replicas of the machines. The other replicas' tensors are unchanged."""
    firsts = [machine[0] for machine in endpoint.machines]
    if endpoint.rank in firsts:
        ring(flat, _Subset(endpoint, firsts))


REDUCERS: dict[str, Reducer] = {"ring": ring, "hierarchical": hierarchical, "reduce_to_one": reduce_to_one}


def _reduce(flat: Tensor, endpoint: Endpoint, ranks: Sequence[int]) -> None:
    """Sum the tensors of the replicas `ranks` into the first replica's tensor. The others then hold partial sums."""
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
    """Copy the first replica's tensor to all of these replicas."""
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
    """A view of an endpoint with some of the replicas, numbered from 0 in the given order."""

    def __init__(self, whole: Endpoint, ranks: Sequence[int]) -> None:
        self._whole, self._ranks = whole, ranks
        self.rank, self.size = ranks.index(whole.rank), len(ranks)
        self.machines = [range(self.size)]

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        self._whole.exchange(send, self._ranks[to], into, self._ranks[source])
