"""Sums over all replicas, as codecs need them: by the backend's own collectives, or by a reducer over an endpoint.

Between processes both have a process group of their own, so that they may run in another thread while the main thread
is in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives, fork_safety, transport
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.reducers import REDUCERS, Endpoint, Reducer, ring

if TYPE_CHECKING:
    from paceline.comm.codecs import Rounding, Sums


def make(reducer: str, node: int, device: torch.device) -> Sums:
    """All processes make it together. node: the number of this process's machine. device: where the tensors lie."""
    if reducer == "native" and collectives.size_of() > 1:
        return NativeSums()
    return ReducerSums(REDUCERS.get(reducer, ring), ProcessEndpoint(node, device))  # alone, a ring sends nothing


class NativeSums:
    """The backend's all_reduce, all_gather and all_to_all."""

    def __init__(self) -> None:
        self.group = dist.new_group()
        self.size = collectives.size_of(self.group)

    def add(self, flat: Tensor) -> None:
        if flat.numel():
            collectives.all_reduce(flat, group=self.group)

    def gather(self, flat: Tensor) -> Tensor:
        if not flat.numel():
            return flat.expand(self.size, 0)
        sent = flat.contiguous().to(collectives.device_of(self.group, flat.device))
        return transport.all_gather(sent, self.group).to(flat.device).view(self.size, -1)

    def add_rounded(self, flat: Tensor, rounding: Rounding, scale: Tensor | None) -> Tensor:
        """Each replica adds up one n-th. It rounds the other pieces before it sends them, and its own sum. Like a ring
        each sends 2 (n - 1) / n of the 16-bit values."""
        n, rank, length = self.size, collectives.rank_of(self.group), -(-flat.numel() // self.size)
        pieces = torch.nn.functional.pad(flat, (0, n * length - flat.numel())).view(n, length)

        # Phase 1: a piece's addends to the replica that adds them up.
        sent = rounding.encode(pieces, scale)
        kept = pieces - rounding.decode(sent, flat, scale)
        addends = rounding.decode(torch.stack(self.to_each(list(sent), [length] * n)), flat, scale)
        addends[rank] = pieces[rank]
        total = addends.sum(0)

        # Phase 2: the sums to all.
        rounded = rounding.encode(total, scale)
        kept[rank] = total - rounding.decode(rounded, flat, scale)
        flat.copy_(rounding.decode(self.gather(rounded), flat, scale).view(-1)[: flat.numel()])
        return kept.view(-1)[: flat.numel()]

    def to_each(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """All-to-all: sends flat piece i to replica i, and receives from replica i a piece of `lengths[i]` elements."""
        some = [piece for piece in pieces if piece.numel()]
        flat = some[0] if len(some) == 1 else torch.cat(list(pieces))
        sent = flat.view(torch.uint8).to(collectives.device_of(self.group, flat.device))
        size = flat.element_size()
        received = sent.new_empty(size * sum(lengths))
        outwards, inwards = [piece.numel() * size for piece in pieces], [length * size for length in lengths]
        if any(outwards) or any(inwards):
            dist.all_to_all_single(received, sent, inwards, outwards, group=self.group)
            fork_safety.keep(sent, received)
        return list(received.to(flat.device).view(flat.dtype).split(list(lengths)))


class ReducerSums:
    """A reducer over an endpoint."""

    def __init__(self, reducer: Reducer, endpoint: Endpoint) -> None:
        self._reduce, self._endpoint = reducer, endpoint
        self.size = endpoint.size

    def add(self, flat: Tensor) -> None:
        self._reduce(flat, self._endpoint)

    def gather(self, flat: Tensor) -> Tensor:
        """The second phase of a ring: each replica's tensor goes around once."""
        rank, n = self._endpoint.rank, self.size
        rows = flat.new_empty(n, flat.numel())
        rows[rank] = flat
        for turn in range(n - 1):
            self._endpoint.exchange(
                rows[(rank - turn) % n], (rank + 1) % n, rows[(rank - turn - 1) % n], (rank - 1) % n
            )
        return rows

    def add_rounded(self, flat: Tensor, rounding: Rounding, scale: Tensor | None) -> Tensor:
        endpoint = _RoundedEndpoint(self._endpoint, rounding, scale, flat)
        self._reduce(flat, endpoint)
        return endpoint.kept


class _RoundedEndpoint:
    """An endpoint whose messages are rounded. A replica that sends a part of `flat`, be it a partial sum or a finished
    one, goes on with the rounded values, and books the difference. Rounding twice is rounding once, so that all
    replicas end with the same bits."""

    def __init__(self, whole: Endpoint, rounding: Rounding, scale: Tensor | None, flat: Tensor) -> None:
        """scale: for fp16. flat: the tensor that is reduced."""
        self.rank, self.size, self.machines = whole.rank, whole.size, whole.machines
        self._whole, self._rounding, self._scale, self._flat = whole, rounding, scale, flat
        self.kept = torch.zeros_like(flat)  # what this replica has rounded off

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        message = arriving = None
        if send is not None and send.numel():
            start = send.storage_offset() - self._flat.storage_offset()
            message = self._rounding.encode(send, self._scale)
            rounded = self._rounding.decode(message, send, self._scale)
            self.kept[start : start + send.numel()] += send - rounded
            send.copy_(rounded)
        if into is not None:
            arriving = into.new_empty(into.numel(), dtype=self._rounding.dtype)
        self._whole.exchange(message, to, arriving, source)
        if into is not None and arriving is not None:
            into.copy_(self._rounding.decode(arriving, into, self._scale))
