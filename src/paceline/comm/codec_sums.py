"""Sums over all replicas, as codecs need them: by the backend's own collectives, or by a reducer over an endpoint.

Between processes both have a process group of their own, so that they may run in another thread while the main thread
is in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives, fork_safety, shared_memory, transport
from paceline.comm.direct import Direct
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.reducers import REDUCERS, Endpoint, Reducer, hierarchical, ring, ring_of_machines
from paceline.comm.shared_memory import SharedMemory
from paceline.errors import SettingError

if TYPE_CHECKING:
    from paceline.comm.codecs import Rounding, Sums

SHARED_MEMORY = "shared_memory"
"""A reducer beside REDUCERS, for the processes of one machine."""

DIRECT = "direct"
"""Another: direct exchange, between processes only."""


def make(reducer: str, node: int, device: torch.device) -> Sums:
    """All processes make it together. node: the number of this process's machine. device: where the tensors lie."""
    if reducer == "native" and collectives.size_of() > 1:
        return NativeSums()
    if reducer == SHARED_MEMORY and collectives.size_of() > 1:
        return _shared_memory_or_error(device)
    if reducer == DIRECT and collectives.size_of() > 1:
        return DirectSums(device)
    if reducer == "hierarchical" and device.type == "cpu" and collectives.size_of() > 1:
        return HierarchicalSums(ProcessEndpoint(node, device))
    return ReducerSums(REDUCERS.get(reducer, ring), ProcessEndpoint(node, device))  # alone, a ring sends nothing


class NativeSums:
    """The backend's all_reduce, all_gather and all_to_all."""

    def __init__(self) -> None:
        self.size = collectives.size_of(self.group)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """Made when it is first asked for, by all processes at the same place of their threads."""
        return dist.new_group()

    def close(self) -> None:
        """Ends what `make` began."""

    def add(self, flat: Tensor) -> None:
        if flat.numel():
            collectives.all_reduce(flat, group=self.group)

    def add_sparse(self, sparse: Tensor) -> None:
        """Replaces a sparse tensor on the CPU by the sum of all processes'."""
        dist.all_reduce(sparse, group=self.group)
        fork_safety.keep(sparse)

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


class SharedMemorySums(NativeSums):
    """Sums in memory that the processes of one machine share. What a codec sends, and sparse gradients, go by the
    backend's collectives."""

    def __init__(self, memory: SharedMemory) -> None:  # without a group: most runs never need one
        self.size = collectives.size_of()
        self.memory = memory

    def add(self, flat: Tensor) -> None:
        self.memory.add(flat)

    def close(self) -> None:
        self.memory.close()


SHARING = 4
"""The most processes that sum in shared memory where nobody names it. On 16 cores (2026-11-26, one run each), steps of
8 processes took 1.17 to 1.25 times as long with it as with gloo; those of 4 took less."""


def shared_memory_sums() -> SharedMemorySums | None:
    """Collective. None, on all processes, where they cannot share memory."""
    memory = shared_memory.meet()
    return None if memory is None else SharedMemorySums(memory)


def _shared_memory_or_error(device: torch.device) -> SharedMemorySums:
    """Raises SettingError where there is no such memory."""
    sums = shared_memory_sums() if device.type == "cpu" else None
    if sums is None:
        why = "they are on several machines, or in containers of their own"
        if device.type != "cpu":
            why = f"the gradients are on {device.type}, which has faster ways (reducer=native)"
        elif not shared_memory.supported():
            why = "it takes Linux on x86-64"
        raise SettingError(
            f"strategy ddp: reducer={SHARED_MEMORY}: the processes cannot share memory for their gradients: {why}. "
            "Use reducer=native."
        )
    _ = sums.group  # made here, in the main thread, for a codec
    return sums


class DirectSums(NativeSums):
    """Sums by direct exchange. What a codec sends, and sparse gradients, go by the backend's collectives."""

    def __init__(self, device: torch.device) -> None:
        """Raises SettingError where gradients are not on CPUs."""
        if device.type != "cpu":
            raise SettingError(
                f"strategy ddp: reducer={DIRECT}: the gradients are on {device.type}, and this is for CPUs. Use "
                "reducer=native."
            )
        super().__init__()
        self._direct = Direct(self.group)

    def add(self, flat: Tensor) -> None:
        self._direct.add(flat)


class ReducerSums:
    """A reducer over an endpoint."""

    def __init__(self, reducer: Reducer, endpoint: Endpoint) -> None:
        self._reduce, self._endpoint = reducer, endpoint
        self.size = endpoint.size

    def close(self) -> None:
        """Nothing is open."""

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


class HierarchicalSums(ReducerSums):
    """The hierarchical reducer between processes that compute on CPUs: within a machine in memory that its processes
    share, where they can. What a codec rounds goes by the endpoint alone."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Collective. Each machine finds for itself whether its processes can share memory."""
        super().__init__(hierarchical, endpoint)
        self._endpoint = endpoint
        near = next(machine for machine in endpoint.machines if endpoint.rank in machine)
        group, _ = dist.new_subgroups_by_enumeration([list(machine) for machine in endpoint.machines])
        self._memory = shared_memory.meet(group) if len(near) > 1 else None
        self._alone = len(near) == 1  # on its machine

    def add(self, flat: Tensor) -> None:
        if self._memory is None and not self._alone:
            super().add(flat)
            return
        if self._memory is not None:
            self._memory.add(flat)
        if len(self._endpoint.machines) > 1:
            ring_of_machines(flat, self._endpoint)
            if self._memory is not None:
                self._memory.spread(flat)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()


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
