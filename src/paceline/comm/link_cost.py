"""What a sum over processes costs here, as latency + bytes x seconds a byte: measured once, in about a second.

The model is Hockney's (1994, "The communication challenge for MPP"), by which Thakur et al. 2005 ("Optimization of
collective communication operations in MPICH", section 3) choose between algorithms: alpha + beta n. Here alpha and beta
are those of a whole sum, so that turns and the copies in between are in them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives

SMALL_BYTES = 2**12
MOST_BYTES = 2**24
ENOUGH_SECONDS = 0.03  # that a large tensor takes longer than a small one: well above what a scheduler adds
_ROUNDS = 6  # of small sums; of large ones until three in a row are no faster: a connection begins slowly
_FASTER, _MOST_SECONDS = 0.95, 2.0


class LinkCost(NamedTuple):
    """Of one sum."""

    latency_seconds: float
    seconds_per_byte: float

    def of(self, nbytes: int) -> float:
        return self.latency_seconds + nbytes * self.seconds_per_byte


def measure(add: Callable[[Tensor], None]) -> LinkCost:
    """Times sums of a few KB, and of as many more bytes as take clearly longer; the fastest of several, since whatever
    disturbs a sum makes it slower. Collective: rank 0's times count, and all ranks return them.

    add: replaces a 1-d float32 tensor on the CPU by the sum over all processes.
    """
    small = min(_seconds(add, SMALL_BYTES) for _ in range(_ROUNDS))
    nbytes, longer, took = SMALL_BYTES, False, small
    while not longer:
        nbytes *= 4
        took = _seconds(add, nbytes)
        longer = collectives.broadcast_object(took - small >= max(ENOUGH_SECONDS, small) or nbytes >= MOST_BYTES)
    large, spent, since = took, 0.0, 0
    while collectives.broadcast_object(since < 3 and spent < _MOST_SECONDS):
        took = _seconds(add, nbytes)
        since = 0 if took < _FASTER * large else since + 1
        large, spent = min(took, large), spent + took
    cost = LinkCost(small, max(large - small, 0.0) / (nbytes - SMALL_BYTES))
    return LinkCost(*collectives.broadcast_object(tuple(cost)))


def _seconds(add: Callable[[Tensor], None], nbytes: int) -> float:
    flat = torch.zeros(nbytes // 4)
    began = time.perf_counter()
    add(flat)
    return time.perf_counter() - began
