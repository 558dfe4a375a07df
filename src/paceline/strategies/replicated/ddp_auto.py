"""`ddp:reducer=auto`: how gradients are summed, chosen among the lossless ways by where the processes are and, for what
changes no bits, by measuring.

Phase 1, facts: shared memory where all processes are on one machine and can share it (gloo where they are more than
  four, among which shared memory is slower); hierarchical where a machine has several; else direct exchange, which
  sends as many bytes as a ring in fewer turns. These add in different orders, so that a choice by time, which may fall
  otherwise the next time, would change the bits of a rerun. Where the processes are depends on the job alone.
Phase 2, a calibration of this way (comm/link_cost.py): latency, and seconds a byte.
Phase 3, after the first backward, whose time and gradients are then known: the size of buckets (ddp_buckets.py), up to
  one bucket without overlap. Sums in rank order do not depend on it; a ring between three machines or more would, and
  keeps `bucket_mb`.

Rank 0 decides and tells the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from paceline.comm import codec_sums, collectives, link_cost
from paceline.strategies.replicated import ddp_buckets
from paceline.world import World

if TYPE_CHECKING:
    from paceline.comm.codecs import Sums

STOCK_MB = 25.0  # ddp's default: another `bucket_mb` was asked for, and is kept


class Choice:
    """What was chosen, as one process sees it. All processes make it, and call `bucket_mb`, together.

    sums: what adds gradients up.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._way, self._why, self.sums, self._any_size = _by_facts(world, device)
        self._cost = link_cost.measure(self.sums.add)
        self._told = world.rank != 0

    def bucket_mb(self, given: float, sizes: Sequence[int], backward_seconds: float) -> float:
        """The size of buckets in MB. sizes: bytes of the gradients, in the order in which they come. backward_seconds:
        what a backward has taken without communication."""
        size = given
        if self._any_size and given == STOCK_MB:
            size = collectives.broadcast_object(ddp_buckets.choose(sizes, self._cost, backward_seconds, given))
        if not self._told:
            self._told = True
            print(f"paceline: {self._line(sizes, backward_seconds, size)}", file=sys.stderr, flush=True)
        return size

    def _line(self, sizes: Sequence[int], backward_seconds: float, size: float) -> str:
        cost, count, mb = self._cost, len(ddp_buckets.buckets(sizes, size)), sum(sizes) / ddp_buckets.MB
        rate = f"{8e-6 / cost.seconds_per_byte:.0f} Mbit/s" if cost.seconds_per_byte else "no limit of its rate seen"
        cut = f"{count} buckets behind the backward" if count > 1 else "one bucket"
        return (
            f"reducer=auto: {self._way}, since {self._why}; {cut}, for {mb:.1f} MB of gradients "
            f"(a sum takes {cost.latency_seconds * 1e3:.2g} ms and {rate}, a backward {backward_seconds * 1e3:.3g} ms)"
        )


def _by_facts(world: World, device: torch.device) -> tuple[str, str, Sums, bool]:
    """The way, why, what adds so, and whether it gives the same bits for any size of buckets. Collective."""
    shared = codec_sums.shared_memory_sums() if world.size <= codec_sums.SHARING else None
    if shared is not None:
        return codec_sums.SHARED_MEMORY, f"the {world.size} processes are on one machine", shared, True
    places = collectives.gather_objects(world.node)
    machines = len(set(places))
    if machines == 1 and world.size > codec_sums.SHARING:
        sums = codec_sums.make("native", world.node, device)
        return "native", f"{world.size} processes on one machine are too many for shared memory", sums, False
    if 1 < machines < len(places):
        sums = codec_sums.make("hierarchical", world.node, device)
        return "hierarchical", f"{machines} machines have {len(places)} processes", sums, machines == 2
    sums = codec_sums.make(codec_sums.DIRECT, world.node, device)
    return codec_sums.DIRECT, f"the {len(places)} processes share no memory", sums, True
