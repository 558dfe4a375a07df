"""Memory of which this process has copies: pages that it has written to, of a mapping that others do not see.

Such a mapping (mmap(2), MAP_PRIVATE) shows a file that others write to, until this process writes to a page of it: the
kernel then gives the process a page of its own, whatever wrote to it. The kernel's table of pages tells them apart
(proc_pid_pagemap(5): bit 61 is set for pages of files).
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt
import torch

PAGE = mmap.PAGESIZE

_PRESENT, _SWAPPED, _OF_A_FILE = np.uint64(1 << 63), np.uint64(1 << 62), np.uint64(1 << 61)


class CopiedPages:
    """Of one mapping, which begins as it was shared."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() // PAGE
        self._count = -(-len(memory) // PAGE)

    def numbers(self) -> npt.NDArray[np.int64]:
        """The pages that this process has copies of, counted from the mapping's first, in order."""
        table = os.open("/proc/self/pagemap", os.O_RDONLY)  # anew, since a fork has another one
        try:
            entries = np.frombuffer(os.pread(table, 8 * self._count, 8 * self._first), dtype=np.uint64)
        finally:
            os.close(table)
        there = (entries & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(there & ((entries & _OF_A_FILE) == 0))

    def forget(self) -> None:
        """Drops the copies: every page shows what is shared again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def visible() -> bool:
    """Whether this system tells such pages apart."""
    handle = os.memfd_create("paceline")
    try:
        os.ftruncate(handle, 2 * PAGE)
        shared, copied = mmap.mmap(handle, 2 * PAGE), mmap.mmap(handle, 2 * PAGE, flags=mmap.MAP_PRIVATE)
        shared[0] = shared[PAGE] = 1
        pages = CopiedPages(copied)
        seen = copied[0], copied[PAGE]
        before = len(pages.numbers())
        copied[PAGE] = 2
        return seen == (1, 1) and before == 0 and list(pages.numbers()) == [1]
    except OSError:
        return False
    finally:
        os.close(handle)
