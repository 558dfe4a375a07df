"""Makes forks safe while gloo's threads run. Every DataLoader with workers forks.

Gloo's threads drop a finished collective's tensors shortly after the waiting thread continues. If a gloo thread drops
the last reference to a tensor known to Python, it must enter the interpreter. If the process forks at that instant,
CPython up to 3.11 hangs in the child: `PyOS_AfterFork_Child` takes the lock on the list of thread states, which the
gloo thread held, before it re-creates that lock (seen with gdb, once in some 2,000 forks right after a collective on a
loaded machine). Therefore:

1. `keep` holds sent tensors until gloo has dropped them, so that gloo's threads never drop the last reference.
2. Before a fork, a short wait lets gloo's threads drop the tensors that were not passed to `keep`.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch import Tensor

from paceline.torch_private.core import use_count

_LARGE = 2**20  # elements; for larger tensors `keep` waits instead of holding them
_WAIT_SECONDS = 0.02
_MOMENT_SECONDS = 0.002

_kept: list[Tensor] = []


def _in_use(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if use_count(tensor) > 1]  # Python holds one reference


def keep(*tensors: Tensor) -> None:
    """Hold the tensors of a finished collective until gloo drops them. Call it after the `Work` object is deleted."""
    _kept[:] = _in_use(_kept)
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    _kept.extend(tensor for tensor in on_cpu if tensor.numel() <= _LARGE)
    _wait_for([tensor for tensor in on_cpu if tensor.numel() > _LARGE])


def _wait_for(tensors: list[Tensor]) -> None:
    """Wait until gloo has dropped the tensors, at most _WAIT_SECONDS: a view or an autograd graph may hold them too."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while _in_use(tensors) and time.monotonic() < deadline:
        time.sleep(0.0001)


def _before_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_MOMENT_SECONDS)
        _wait_for(_kept)


os.register_at_fork(before=_before_fork)
