"""Find the pages of a private mapping that this process has written to.

A private mapping (mmap(2), MAP_PRIVATE) shows the current contents of a shared file. Once this process writes to a
page, the kernel gives it a private copy of that page. The kernel's page table marks the copies
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
    """The private copies of one mapping's pages. A new mapping has none."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._first = torch.frombuffer(memory, dtype=torch.uint8).data_ptr() // PAGE
        self._count = -(-len(memory) // PAGE)

    def numbers(self) -> npt.NDArray[np.int64]:
        """The sorted numbers of the copied pages, counted from the mapping's start."""
        table = os.open("/proc/self/pagemap", os.O_RDONLY)  # opened at each call: a forked child has its own table
        try:
            entries = np.frombuffer(os.pread(table, 8 * self._count, 8 * self._first), dtype=np.uint64)
        finally:
            os.close(table)
        there = (entries & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(there & ((entries & _OF_A_FILE) == 0))

    def forget(self) -> None:
        """Drop the copies: every page shows the shared file again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


def visible() -> bool:
    """Whether this system can distinguish private copies from shared pages."""
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
