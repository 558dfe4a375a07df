"""Forking beside gloo's threads, as every DataLoader with workers does.

Gloo's threads drop a finished collective's tensors a moment after its waiter has gone on. If nobody else holds them any
more, the thread that drops the last reference to a tensor that Python knows must enter the interpreter, and CPython up
to 3.11 hangs in the child when a process forks at that instant: its `PyOS_AfterFork_Child` takes the lock on the list
of thread states, which the thread held, before it makes that lock anew (seen with gdb, once in some 2,000 forks of
workers right after a collective on a loaded machine). Therefore:

1. What was sent is kept until gloo has let go of it: then its threads have no reason to enter the interpreter.
2. Before a fork they get a moment to finish what was not sent through here.
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
    """Call it with what a collective was given, when that has finished and its `Work` is gone."""
    _kept[:] = _in_use(_kept)
    small = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel() <= _LARGE]
    large = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.numel() > _LARGE]
    _kept.extend(small)
    _wait_for(large)


def _wait_for(tensors: list[Tensor]) -> None:
    """At most a moment: a tensor may be held by others too, such as a view of it or a graph."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while _in_use(tensors) and time.monotonic() < deadline:
        time.sleep(0.0001)


def _before_fork() -> None:
    if dist.is_available() and dist.is_initialized():
        time.sleep(_MOMENT_SECONDS)
        _wait_for(_kept)


os.register_at_fork(before=_before_fork)
