"""A sum over the processes of one machine, in memory that they share.

    part 0 of the tensor           part 1                       ...
    1 copy my part into my slot    (each part takes the other half of the memory, so that a part may be copied in while
    2 wait until all have           a late process still copies the last one out)
    3 add up my n-th of all slots, in the order of the ranks, into the first slot
    4 wait until all have
    5 copy the sum out

Each process reads and writes the tensor about twice, at the speed of memory; gloo sends it through the kernel's
sockets. A sum is finished in one place: all processes have the same bits, however late each was.

The memory is a file without a name (memfd_create(2)), handed over through the sockets of neighbours.py: nothing is left
of it when the processes are gone, whatever ended them. A process that waits looks at the others' counters for a moment,
sleeps on them then (futex(2)), and looks now and then whether the sockets of the others are still open.

Only on Linux and x86-64, whose stores become visible in the order in which they were made.
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
from paceline.comm.mesh import Group
from paceline.comm.neighbours import Neighbours
from paceline.comm.waits import waits
from paceline.errors import UsageError
from paceline.torch_private.core import profiling

PART_BYTES = 2**19
"""Of a tensor that are summed at once: with all slots they should stay in the processor's cache."""

_LINE = 64  # bytes of a cache line: each process writes into one of its own
_PAGE = 4096
_LOOKS = 100  # at a counter, about 0.1 us each, before a process sleeps
_NAP_SECONDS = 0.2  # after which it looks whether the others live
_SECONDS = 1800.0  # that another may be late, as gloo's timeout
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # the call's number on x86-64, and its operations
_EVERYONE = 2**31 - 1

_libc = ctypes.CDLL(None, use_errno=True)
_NO_SPAN = contextlib.nullcontext()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Line(ctypes.Structure):
    """What a process tells the others. In shared memory."""

    _fields_ = (
        ("count", ctypes.c_uint32),  # how many waits it has come to, modulo 2**32; the others sleep on it
        ("nbytes", ctypes.c_uint64),  # of the tensor that it sums
        ("values", ctypes.c_double * 2),  # told at its last waits: at even counts the first, at odd ones the second
    )


@waits("wait")
class Meetings:
    """The waits of a group's processes for each other, as one of them sees them. All of them call `wait` alike."""

    def __init__(self, between: Neighbours) -> None:
        """Collective. Raises OSError where the memory cannot be had."""
        self.size, self.rank, self.group = between.size, between.rank, between.group
        self._between = between
        self._memory = self.share(_PAGE)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.lines = [_Line.from_address(start + _LINE * number) for number in range(self.size)]
        self._addresses = [ctypes.c_void_p(start + _LINE * number) for number in range(self.size)]
        self._count = 0  # of waits
        crowded = self.size > len(os.sched_getaffinity(0))
        self._looks = 0 if crowded else _LOOKS

    def share(self, nbytes: int) -> mmap.mmap:
        """So much memory, zeros at first, that all processes of the group have. Collective. Raises OSError where it
        cannot be had."""
        with self._handle(nbytes) as handle:
            return mmap.mmap(handle, nbytes)

    def share_twice(self, nbytes: int) -> tuple[mmap.mmap, mmap.mmap]:
        """Such memory at two addresses of this process. What is written at the second this process alone sees, and from
        then on it sees that page as it left it. Of all other pages the second shows what is at the first."""
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
        """Until all processes have come to this wait. Returns the values that they came with, in rank order."""
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
        """A process is one wait ahead of another at most, so that it has come if its counter is not the last one."""
        line, before = self.lines[rank], (self._count - 1) % 2**32
        for _ in range(self._looks):
            if line.count != before:
                return
        deadline = time.monotonic() + _SECONDS
        nap = _Timespec(0, int(_NAP_SECONDS * 1e9))
        while line.count == before:
            # It returns at once where the counter is no longer `before`.
            _libc.syscall(_FUTEX, self._addresses[rank], _WAIT, before, ctypes.byref(nap), None, 0)
            try:
                self._between.check()
            except ConnectionError:
                if line.count == before:  # else it came and, since this was its last wait, left
                    raise
            if time.monotonic() > deadline:
                raise ConnectionError(f"rank {rank} of the processes on this machine did not come to a sum")

    def close(self) -> None:
        """Ends the connections. The memory goes with its last tensor."""
        self._between.close()


@waits("add", "spread")
class SharedMemory:
    """The memory in which the processes of a group add up tensors, as one of them sees it. All of them call `add` and
    `spread` alike."""

    def __init__(self, meetings: Meetings) -> None:
        """Collective. Raises OSError where the memory cannot be had."""
        self._meetings, self._ranks, self._rank = meetings, meetings.size, meetings.rank
        self.group = meetings.group
        memory = meetings.share(2 * self._ranks * PART_BYTES)
        self._halves = torch.frombuffer(memory, dtype=torch.uint8).view(2, self._ranks, PART_BYTES)
        self._parts = 0  # so far

    @torch.no_grad()
    def add(self, flat: Tensor) -> None:
        """Replaces a tensor, 1-d and contiguous on the CPU, by the sum of all processes' tensors of its length and
        dtype. Raises ConnectionError where a process has gone, UsageError where another sums another length."""
        each, lines = PART_BYTES // flat.element_size(), self._meetings.lines
        lines[self._rank].nbytes = flat.nbytes
        with torch.profiler.record_function("memory:all_reduce") if profiling() else _NO_SPAN:
            for first in range(0, flat.numel(), each):
                part = flat[first : first + each]
                length = part.numel()
                slots = self._next_half(part.dtype)[:, :length].unbind()
                slots[self._rank].copy_(part)
                self._meetings.wait()
                for rank, line in enumerate(lines) if first == 0 else ():
                    if line.nbytes != flat.nbytes:
                        raise UsageError(_other_lengths(rank, line.nbytes, flat.nbytes))
                low, high = length * self._rank // self._ranks, length * (self._rank + 1) // self._ranks
                total = slots[0][low:high]
                for slot in slots[1:]:
                    total += slot[low:high]
                self._meetings.wait()
                part.copy_(slots[0])

    @torch.no_grad()
    def spread(self, flat: Tensor) -> None:
        """Replaces a tensor, 1-d and contiguous on the CPU, by the first process's, which is as long."""
        each = PART_BYTES // flat.element_size()
        for first in range(0, flat.numel(), each):
            part = flat[first : first + each]
            slot = self._next_half(part.dtype)[0, : part.numel()]
            if self._rank == 0:
                slot.copy_(part)
            self._meetings.wait()
            if self._rank != 0:
                part.copy_(slot)

    def _next_half(self, dtype: torch.dtype) -> Tensor:
        """(processes, ...): a slot for each process, in the half of the memory that is next."""
        half = self._halves[self._parts % 2].view(dtype)
        self._parts += 1
        return half

    def close(self) -> None:
        """Ends the connections. The memory goes with its last tensor."""
        self._meetings.close()


def _other_lengths(rank: int, its: int, mine: int) -> str:
    return (
        f"rank {rank} sums {its:,} bytes, and this process {mine:,}: the processes have different gradients. Give all "
        "of them one model and one path through it."
    )


def supported() -> bool:
    """Whether this system has what is needed."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


def meetings(group: Group = None, able: bool = True) -> Meetings | None:
    """The meetings of a group. Collective. None, on all, where they are on several machines, or cannot share memory, or
    one is not `able` to do what is meant."""
    between = neighbours.meet(group, able=able and supported())
    return None if between is None else Meetings(between)


def meet(group: Group = None) -> SharedMemory | None:
    """The memory of a group. Collective. None, on all, where they are on several machines, or cannot share it."""
    found = meetings(group)
    return None if found is None else SharedMemory(found)
