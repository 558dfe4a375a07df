"""Makes it safe to fork beside gloo's threads, as every DataLoader with workers does.

Gloo's threads drop a finished collective's tensors a moment after its waiter has gone on. A thread that drops the last
reference to a tensor that Python knows must enter the interpreter. If a process forks at that instant, CPython up to
3.11 hangs in the child: `PyOS_AfterFork_Child` takes the lock on the list of thread states, which the thread held,
before it makes that lock anew (seen with gdb, once in some 2,000 forks right after a collective on a loaded machine).
Therefore:

1. `keep` holds what was sent until gloo has dropped it: then its threads never drop the last reference.
2. Before a fork gloo's threads get a moment to drop what was not sent through `keep`.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist
from torch import Tensor

from paceline.torch_private.core import use_count

_LARGE = 2**20  # elements: not kept until the next collective, but waited for
_WAIT_SECONDS = 0.02
_MOMENT_SECONDS = 0.002

_kept: list[Tensor] = []


def _in_use(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if use_count(tensor) > 1]  # one is Python's


def keep(*tensors: Tensor) -> None:
    """Call it with the tensors of a collective, when that has finished and its `Work` is gone."""
    _kept[:] = _in_use(_kept)
    on_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    _kept.extend(tensor for tensor in on_cpu if tensor.numel() <= _LARGE)
    _wait_for([tensor for tensor in on_cpu if tensor.numel() > _LARGE])


def _wait_for(tensors: list[Tensor]) -> None:
    """Waits until gloo has dropped them, for a moment at most: a view or a graph may hold them too."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while _in_use(tensors) and time.monotonic() < deadline:
        time.sleep(0.0001)


def _before_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_MOMENT_SECONDS)
        _wait_for(_kept)


os.register_at_fork(before=_before_fork)
