"""A sum over processes by direct exchange: each process adds up one n-th of the elements and sends it to all others.

n processes with a tensor of B bytes each; all connections are used at once:

  n = 2   Each process sends its whole tensor to the other. B bytes sent, one latency.
  n > 2   Phase 1: every process sends piece r of its tensor to process r, which adds the pieces in rank order.
          Phase 2: every process sends its finished piece to all others. 2 (n - 1) / n B bytes sent, two latencies.

A ring sends the same number of bytes in 2 (n - 1) turns of one latency each (Thakur et al. 2005, "Optimization of
collective communication operations in MPICH", sections 4 and 5). Every element is added in rank order, so the bits of a
sum do not depend on the bucket sizes, and are the same as in shared_memory.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import fork_safety
from paceline.comm.group import Group


class Direct:
    """Direct exchange in a group. No other thread may use the group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._rank, self._size = group.rank, group.size
        self._others = [rank for rank in range(self._size) if rank != self._rank]

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Replace a 1-d contiguous CPU tensor by its sum over the processes. They pass the same length and dtype."""
        if flat.numel() == 0:
            return
        if self._size == 2:
            arrived = torch.empty_like(flat)
            self._exchange([flat], [arrived])
            flat += arrived
            return
        pieces = flat.tensor_split(self._size)  # some are empty if there are fewer elements than processes
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
        """Send a tensor to each other process, and receive a tensor from each, all at once.

        Receives are posted first, so that gloo notifies each sender at once. A notification behind an outgoing tensor
        would arrive only after that tensor, and the other direction would be idle until then.
        """
        operations = [
            dist.P2POp(way, tensor.view(torch.uint8), group=self._group.native, group_peer=rank)
            for way, tensors in ((dist.irecv, arriving), (dist.isend, sent))
            for rank, tensor in zip(self._others, tensors, strict=True)
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
            del work  # it references its tensor
        fork_safety.keep(*(operation.tensor for operation in operations))
