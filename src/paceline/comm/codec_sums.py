"""Sums over all replicas for codecs, by the backend's collectives or by a reducer over an endpoint.

Between processes both use a separate process group, so they can run in another thread while the main thread is in a
collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import fork_safety, shared_memory
from paceline.comm.direct import Direct
from paceline.comm.endpoints import ProcessEndpoint
from paceline.comm.group import Group
from paceline.comm.mesh import new_group, world_group
from paceline.comm.reducers import REDUCERS, Endpoint, Reducer, hierarchical, ring, ring_of_machines
from paceline.comm.shared_memory import SharedMemory
from paceline.errors import SettingError

if TYPE_CHECKING:
    from paceline.comm.codecs import Rounding, Sums

SHARED_MEMORY = "shared_memory"
"""A reducer that is not in REDUCERS: sums in memory shared by the processes of one machine."""

DIRECT = "direct"
"""A reducer that is not in REDUCERS: direct exchange between processes (direct.py)."""


def make(reducer: str, node: int, device: torch.device) -> Sums:
    """Build the `Sums` for a reducer's name. Collective.

    node: the number of this process's machine. device: the tensors' device.
    """
    if reducer == "native" and world_group().size > 1:
        return NativeSums()
    if reducer == SHARED_MEMORY and world_group().size > 1:
        return _shared_memory_or_error(device)
    if reducer == DIRECT and world_group().size > 1:
        return DirectSums(device)
    if reducer == "hierarchical" and device.type == "cpu" and world_group().size > 1:
        return HierarchicalSums(ProcessEndpoint(node, device))
    return ReducerSums(REDUCERS.get(reducer, ring), ProcessEndpoint(node, device))  # with one process, sends nothing


class NativeSums:
    """The backend's all_reduce, all_gather and all_to_all."""

    def __init__(self) -> None:
        self.size = self.group.size

    @cached_property
    def group(self) -> Group:
        """A separate group. The first use creates it, and must be at the same point in every process's thread."""
        return new_group()

    def close(self) -> None:
        """Release the resources that `make` opened."""

    def add(self, flat: Tensor) -> None:
        if flat.numel():
            self.group.all_reduce(flat)

    def add_sparse(self, sparse: Tensor) -> None:
        """Replace a sparse CPU tensor by the sum over all processes."""
        dist.all_reduce(sparse, group=self.group.native)
        fork_safety.keep(sparse)

    def gather(self, flat: Tensor) -> Tensor:
        if not flat.numel():
            return flat.expand(self.size, 0)
        return self.group.all_gather(flat.contiguous()).view(self.size, -1)

    def add_rounded(self, flat: Tensor, rounding: Rounding, scale: Tensor | None) -> Tensor:
        """Sum one n-th of the elements on each replica. A replica rounds the other pieces before it sends them, and
        rounds the sum of its own piece. As in a ring, it sends 2 (n - 1) / n 16-bit values per element."""
        n, rank, length = self.size, self.group.rank, -(-flat.numel() // self.size)
        pieces = torch.nn.functional.pad(flat, (0, n * length - flat.numel())).view(n, length)

        # Phase 1: send each piece to the replica that adds it up.
        sent = rounding.encode(pieces, scale)
        kept = pieces - rounding.decode(sent, flat, scale)
        addends = rounding.decode(torch.stack(self.to_each(list(sent), [length] * n)), flat, scale)
        addends[rank] = pieces[rank]
        total = addends.sum(0)

        # Phase 2: send the sums to all replicas.
        rounded = rounding.encode(total, scale)
        kept[rank] = total - rounding.decode(rounded, flat, scale)
        flat.copy_(rounding.decode(self.gather(rounded), flat, scale).view(-1)[: flat.numel()])
        return kept.view(-1)[: flat.numel()]

    def to_each(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """All-to-all: send the 1-d piece i to replica i, and receive `lengths[i]` elements from replica i."""
        some = [piece for piece in pieces if piece.numel()]
        flat = some[0] if len(some) == 1 else torch.cat(list(pieces))
        if not flat.numel() and not any(lengths):
            return list(flat.split(list(lengths)))
        return list(self.group.all_to_all(flat, [piece.numel() for piece in pieces], lengths).split(list(lengths)))


class SharedMemorySums(NativeSums):
    """Sums in memory shared by the processes of one machine. Encoded messages and sparse gradients use the backend's
    collectives."""

    def __init__(self, memory: SharedMemory) -> None:  # makes no group: most runs never need it
        self.size = world_group().size
        self.memory = memory

    def add(self, flat: Tensor) -> None:
        self.memory.add(flat)

    def close(self) -> None:
        self.memory.close()


SHARING = 4
"""The largest number of processes that sum in shared memory by default. On 16 cores (2026-11-26, one run each), steps
of 8 processes took 1.17 to 1.25 times as long as with gloo; steps of 4 processes were faster than with gloo."""


def shared_memory_sums() -> SharedMemorySums | None:
    """Set up sums in shared memory. Collective. Returns None on all processes if they cannot share memory."""
    memory = shared_memory.open_memory(world_group())
    return None if memory is None else SharedMemorySums(memory)


def _shared_memory_or_error(device: torch.device) -> SharedMemorySums:
    """Like `shared_memory_sums`, but raises SettingError if the processes cannot share memory."""
    sums = shared_memory_sums() if device.type == "cpu" else None
    if sums is None:
        why = "they are on several machines, or in separate containers"
        if device.type != "cpu":
            why = f"the gradients are on {device.type}, where the backend is faster"
        elif not shared_memory.supported():
            why = "this reducer needs Linux on x86-64"
        raise SettingError(
            f"strategy ddp: reducer={SHARED_MEMORY}: the processes cannot share memory for their gradients: {why}. "
            "Use reducer=native."
        )
    _ = sums.group  # created now, in the main thread, in case a codec needs it
    return sums


class DirectSums(NativeSums):
    """Sums by direct exchange. Encoded messages and sparse gradients use the backend's collectives."""

    def __init__(self, device: torch.device) -> None:
        """Raises SettingError if the gradients are not on CPUs."""
        if device.type != "cpu":
            raise SettingError(
                f"strategy ddp: reducer={DIRECT} works on CPUs only, but the gradients are on {device.type}. Use "
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
        """Does nothing: no resource is open."""

    def add(self, flat: Tensor) -> None:
        self._reduce(flat, self._endpoint)

    def gather(self, flat: Tensor) -> Tensor:
        """Gather all replicas' tensors: each is sent once around a ring, as in the second phase of `ring`."""
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
    """The hierarchical reducer between processes that compute on CPUs. Within a machine it uses shared memory if
    possible. `gather` and `add_rounded` always use the endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Collective. Each machine checks separately whether its processes can share memory."""
        super().__init__(hierarchical, endpoint)
        self._endpoint = endpoint
        near = next(machine for machine in endpoint.machines if endpoint.rank in machine)
        group, _ = dist.new_subgroups_by_enumeration([list(machine) for machine in endpoint.machines])
        self._memory = shared_memory.open_memory(Group(group)) if len(near) > 1 else None
        self._alone = len(near) == 1  # the only process on its machine

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
    """An endpoint that rounds messages. When a replica sends a part of `flat` (a partial or finished sum), it replaces
    that part by the rounded values, and adds the difference to `kept`. Rounding a second time changes nothing, so all
    replicas end with the same bits."""

    def __init__(self, whole: Endpoint, rounding: Rounding, scale: Tensor | None, flat: Tensor) -> None:
        """scale: the scale for fp16; None for bf16. flat: the tensor to reduce."""
        self.rank, self.size, self.machines = whole.rank, whole.size, whole.machines
        self._whole, self._rounding, self._scale, self._flat = whole, rounding, scale, flat
        self.kept = torch.zeros_like(flat)  # the rounding errors of this replica

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
