"""A sum over processes by direct exchange: each adds up one n-th of the elements, and everybody sends to everybody.

n processes, B bytes, all of whose connections are used at once:
  2            each sends all of its addends to the other.                                   B sent, one latency.
  more   1     piece r of every process's addends to process r, which adds them in rank order.
         2     the finished pieces to all.                               2 (n - 1) / n B sent, two latencies.

A ring sends as many bytes in 2 (n - 1) turns, each of them a latency (Thakur et al. 2005, "Optimization of collective
communication operations in MPICH", sections 4 and 5). Elements are added in rank order wherever they stand: the bits of
a sum do not depend on how gradients are cut into buckets, and are those of shared_memory.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives, fork_safety


class Direct:
    """The processes of a group, which no other thread uses."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank, self._size = collectives.rank_of(group), collectives.size_of(group)
        self._others = [rank for rank in range(self._size) if rank != self._rank]

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Replaces a tensor, 1-d and contiguous on the CPU, by the sum of all processes' tensors of its length and
        dtype."""
        if flat.numel() == 0:
            return
        if self._size == 2:
            arrived = torch.empty_like(flat)
            self._exchange([flat], [arrived])
            flat += arrived
            return
        pieces = flat.tensor_split(self._size)  # some are empty where there are fewer elements than processes
        own = pieces[self._rank]
        rows = own.new_empty(len(self._others), own.numel())
        self._exchange([pieces[rank] for rank in self._others], list(rows))
        addends = [*rows[: self._rank], own, *rows[self._rank :]]
        total = addends[0].clone()
        for addend in addends[1:]:
            total += addend
        own.copy_(total)
        self._exchange([own] * len(self._others), [pieces[rank] for rank in self._others])

    def _exchange(self, sent: list[Tensor], arriving: list[Tensor]) -> None:
        """Sends one tensor to each of the others, and receives one from each, all at once.

        Receives are asked for first. Gloo tells the other side of each, which then sends; behind a tensor that is on
        its way already it would tell so only when all of that has gone, and the other direction would stand still.
        """
        operations = [
            dist.P2POp(way, tensor.view(torch.uint8), group=self._group, group_peer=rank)
            for way, tensors in ((dist.irecv, arriving), (dist.isend, sent))
            for rank, tensor in zip(self._others, tensors, strict=True)
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
            del work  # it holds its tensor
        fork_safety.keep(*(operation.tensor for operation in operations))
