"""Let malloc keep freed memory for the next step.

By default glibc's malloc returns freed blocks to the kernel: large blocks at once, and free space at the end of the
heap. A step on a CPU frees its activations and gradients, and the next step allocates them again. The kernel then maps
and clears each page of 4 KB anew, thousands of times in a step (benchmarks/page_faults.py).

The peak of the memory may grow by some percent. The memory of the peak stays with the process until it ends.
"""

from __future__ import annotations

import ctypes
import os

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of mallopt(3)
_KEPT = 2**30  # bytes that the end of the heap may have free
_LARGE = 2**28, 2**25  # smaller blocks are on the heap; some versions of glibc allow 32 MiB at most
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables by which a user chooses these limits."""


def keep_freed_memory() -> bool:
    """Let malloc keep freed memory, until this process ends. Returns whether it does.

    It changes nothing if one of the variables CHOSEN is set, or if the C library is not glibc.
    """
    if any(name in os.environ for name in CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc, or not Linux
        return False
    return any(mallopt(_MMAP, size) for size in _LARGE) and bool(mallopt(_TRIM, _KEPT))
