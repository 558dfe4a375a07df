"""Numbers over the run where several processes work on one shard.

Usually each process has a shard of its own. Where a model is cut over a row of processes (`grid.py`) all of the row see
the same examples, which are to count once: sums and gathers then go over a column, that has each shard once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from paceline.comm import collectives

P = ParamSpec("P")
T = TypeVar("T")

_group: dist.ProcessGroup | None = None


def set_group(group: dist.ProcessGroup | None) -> None:
    """The processes that have each shard once; None: all of the world."""
    global _group
    _group = group


def over_shards(function: Callable[P, T]) -> Callable[P, T]:
    """In the function, what goes over the world goes over that group."""

    @functools.wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        with collectives.among(_group):
            return function(*args, **kwargs)

    return inner
