"""A sum over the processes of one machine, in shared memory.

A tensor is summed in parts. For each part, each of the n processes does this:

    1 copy its part into its slot
    2 wait for all processes
    3 add up its n-th of all slots, in rank order, into the first slot
    4 wait for all processes
    5 copy the sum out

Parts alternate between the two halves of the memory. So a process can copy the next part in while a slow process still
copies the last sum out.

Each process reads and writes 4 B + 3 (n - 1) / n B for a tensor of B bytes. gloo's ring sends 2 (n - 1) / n B through
sockets, which takes 11 (n - 1) / n B with the copies into and out of the kernel: equal for n = 2, more for larger n.
Each element is summed by one process in rank order, so all processes always get the same bits.

The memory is an anonymous file (memfd_create(2)), shared through the sockets of neighbours.py. The kernel frees it when
the processes end, even if they are killed. A waiting process polls the others' counters briefly, then sleeps on them
(futex(2)), and checks periodically that the others' sockets are still open.

Linux on x86-64 only: there, stores become visible in program order.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.comm import neighbours
from paceline.comm.group import Group
from paceline.comm.neighbours import Neighbours
from paceline.comm.waits import waits
from paceline.errors import UsageError
from paceline.torch_private.core import profiling

PART_BYTES = 2**19
"""Bytes of a tensor that are summed at once. With all slots they should fit into the processor's cache."""

_LINE = 64  # bytes of a cache line: each process writes to a separate line
_PAGE = 4096
_LOOKS = 100  # polls of a counter, about 0.1 us each, before a process sleeps
_NAP_SECONDS = 0.2  # between checks that the others are alive
_SECONDS = 1800.0  # timeout for another process, the same as gloo's
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the number of the futex call on x86-64, and its operations
_EVERYONE = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_NO_SPAN = contextlib.nullcontext()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Line(ctypes.Structure):
    """One process's progress counter and scalars, in shared memory."""

    _fields_ = (
        ("count", ctypes.c_uint32),  # number of waits the process has reached, modulo 2**32; the others sleep on it
        ("nbytes", ctypes.c_uint64),  # size of the tensor that the process sums
        ("values", ctypes.c_double * 2),  # its scalars at the last two waits: [0] at even counts, [1] at odd counts
    )


@waits("wait")
class SharedBarrier:
    """Barriers between the processes of a group, seen from one of them. `wait` is collective."""

    def __init__(self, between: Neighbours) -> None:
        """Collective. Raises OSError if the memory cannot be allocated."""
        self.size, self.rank, self.group = between.size, between.rank, between.group
        self._between = between
        self._memory = self.share(_PAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.lines = [_Line.from_address(start + _LINE * number) for number in range(self.size)]
        self._addresses = [ctypes.c_void_p(start + _LINE * number) for number in range(self.size)]
        self._count = 0  # number of waits
        crowded = self.size > len(os.sched_getaffinity(0))
        self._looks = 0 if crowded else _LOOKS

    def share(self, nbytes: int) -> mmap.mmap:
        """Allocate `nbytes` of memory, initially zero, shared by all processes of the group. Collective. Raises OSError
        if that fails."""
        with self._handle(nbytes) as handle:
            return mmap.mmap(handle, nbytes)

    def share_twice(self, nbytes: int) -> tuple[mmap.mmap, mmap.mmap]:
        """Allocate shared memory, and map it twice into this process. Writes to the second mapping are private to this
        process. A page written there no longer shows changes made through the first mapping; all other pages do."""
        with self._handle(nbytes) as handle:
            return mmap.mmap(handle, nbytes), mmap.mmap(handle, nbytes, flags=mmap.MAP_PRIVATE)

    @contextlib.contextmanager
    def _handle(self, nbytes: int) -> Iterator[int]:
        handle = os.memfd_create("paceline") if self.rank == 0 else -1
        try:
            if self.rank == 0:
                os.ftruncate(handle, nbytes)
            handle = self._between.share(handle)
            yield handle
        finally:
            if handle >= 0:
                os.close(handle)

    def wait(self, value: float = 0.0) -> list[float]:
        """Wait until all processes have reached this call. Returns the values that they passed, in rank order."""
        self._count = (self._count + 1) % 2**32
        place, own = self._count % 2, self.lines[self.rank]
        own.values[place] = value
        own.count = self._count
        _libc.syscall(_FUTEX, self._addresses[self.rank], _WAKE, _EVERYONE, None, None, 0)
        for rank in range(self.size):
            if rank != self.rank:
                self._wait_for(rank)
        return [line.values[place] for line in self.lines]

    def _wait_for(self, rank: int) -> None:
        """Wait until process `rank` reaches the current wait. No process can be more than one wait ahead, so `rank` has
        arrived once its counter differs from the previous count."""
        line, before = self.lines[rank], (self._count - 1) % 2**32
        for _ in range(self._looks):
            if line.count != before:
                return
        deadline = time.monotonic() + _SECONDS
        nap = _Timespec(0, int(_NAP_SECONDS * 1e9))
        while line.count == before:
            # Returns at once if the counter is no longer `before`.
            _libc.syscall(_FUTEX, self._addresses[rank], _WAIT, before, ctypes.byref(nap), None, 0)
            try:
                self._between.check()
            except ConnectionError:
                if line.count == before:  # otherwise it reached this wait, and then closed its sockets
                    raise
            if time.monotonic() > deadline:
                raise ConnectionError(f"rank {rank}, a process on this machine, did not take part in a sum")

    def close(self) -> None:
        """Close the connections. The memory is freed with the last tensor that uses it."""
        self._between.close()


@waits("add", "spread")
class SharedMemory:
    """Memory where the processes of a group sum tensors, seen from one of them. `add` and `spread` are collective."""

    def __init__(self, barrier: SharedBarrier) -> None:
        """Collective. Raises OSError if the memory cannot be allocated."""
        self._barrier, self._ranks, self._rank = barrier, barrier.size, barrier.rank
        self.group = barrier.group
        memory = barrier.share(2 * self._ranks * PART_BYTES)
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, self._ranks, PART_BYTES)
        self._parts = 0  # number of parts so far

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Replace a 1-d contiguous CPU tensor by its sum over the processes. They pass the same length and dtype.
        Raises ConnectionError if a process has ended, and UsageError if another process sums a different length."""
        each, lines = PART_BYTES // flat.element_size(), self._barrier.lines
        lines[self._rank].nbytes = flat.nbytes
        with torch.profiler.record_function("memory:all_reduce") if profiling() else _NO_SPAN:
            for first in range(0, flat.numel(), each):
                part = flat[first : first + each]
                length = part.numel()
                slots = self._next_half(part.dtype)[:, :length].unbind()
                slots[self._rank].copy_(part)
                self._barrier.wait()
                for rank, line in enumerate(lines) if first == 0 else ():
                    if line.nbytes != flat.nbytes:
                        raise UsageError(_other_lengths(rank, line.nbytes, flat.nbytes))
                low, high = length * self._rank // self._ranks, length * (self._rank + 1) // self._ranks
                total = slots[0][low:high]
                for slot in slots[1:]:
                    total += slot[low:high]
                self._barrier.wait()
                part.copy_(slots[0])

    @torch.no_grad()
    def spread(self, flat: Tensor) -> None:
        """Replace a 1-d contiguous CPU tensor by the first process's tensor of the same length."""
        each = PART_BYTES // flat.element_size()
        for first in range(0, flat.numel(), each):
            part = flat[first : first + each]
            slot = self._next_half(part.dtype)[0, : part.numel()]
            if self._rank == 0:
                slot.copy_(part)
            self._barrier.wait()
            if self._rank != 0:
                part.copy_(slot)

    def _next_half(self, dtype: torch.dtype) -> Tensor:
        """(processes, ...): a slot for each process, in the next half of the memory."""
        half = self._halves[self._parts % 2].view(dtype)
        self._parts += 1
        return half

    def close(self) -> None:
        """Close the connections. The memory is freed with the last tensor that uses it."""
        self._barrier.close()


def _other_lengths(rank: int, its: int, mine: int) -> str:
    return (
        f"rank {rank} sums {its:,} bytes, but this process sums {mine:,}: the processes have different gradients. Run "
        "the same layers of the same model on all processes."
    )


def supported() -> bool:
    """Whether this system has the required features."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def open_barrier(group: Group, able: bool = True) -> SharedBarrier | None:
    """Set up the barriers of a group. Collective. Returns None on all processes if they are on several machines, cannot
    share memory, or one of them passes able=False."""
    between = neighbours.find_neighbours(group, able=able and supported())
    return None if between is None else SharedBarrier(between)


def open_memory(group: Group) -> SharedMemory | None:
    """Set up the memory of a group. Collective. Returns None on all processes if they cannot share memory."""
    found = open_barrier(group)
    return None if found is None else SharedMemory(found)
