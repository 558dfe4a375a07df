"""How large ddp's buckets should be, by what a sum costs and how long a backward takes: arithmetic only.

Gradients come evenly over the backward's time, bucket after bucket; a bucket is summed when its gradients are there and
the one before it is summed:

    end of bucket i = max(end of bucket i - 1, time at which its gradients are there) + latency + bytes x seconds a byte

Small buckets start early and leave little for the end; each costs a latency. How long a backward takes is known roughly
(the first one warms up, or is compiled), so the size is chosen that is least wrong, as a ratio to the best, over the
time that was measured and parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.comm.link_cost import LinkCost

MB = 2**20
WHOLE = math.inf
"""All gradients in one bucket, after the backward: no overlap, and one latency."""

SIZES_MB = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0, 100.0, WHOLE)

HOOK_SECONDS = 2e-4
"""What a bucket costs beside its sum: a call from torch's reducer, and a turn of another thread."""

PARTS = (1.0, 1 / 3, 1 / 30)
"""What later backwards may take of the first one's time."""

WORTH = 0.98
"""Another size than the given one is taken where it promises at most this part of its time."""


def buckets(sizes: Sequence[int], bucket_mb: float) -> list[int]:
    """The bytes of each bucket, as torch's reducer fills them: with whole gradients until one is full at `bucket_mb`,
    and the first at 1 MB at most. sizes: the bytes of the gradients, in the order in which they come."""
    filled, room = [0], min(bucket_mb, 1.0 if bucket_mb < WHOLE else WHOLE) * MB
    for size in sizes:
        if filled[-1] >= room:
            filled.append(0)
            room = bucket_mb * MB
        filled[-1] += size
    return filled


def seconds(sizes: Sequence[int], bucket_mb: float, cost: LinkCost, backward_seconds: float) -> float:
    """From the begin of the backward until the last bucket is summed."""
    total, come, end = sum(sizes), 0, 0.0
    for nbytes in buckets(sizes, bucket_mb):
        come += nbytes
        end = max(end, backward_seconds * come / total) + HOOK_SECONDS + cost.of(nbytes)
    return end


def choose(sizes: Sequence[int], cost: LinkCost, backward_seconds: float, given_mb: float) -> float:
    """One of SIZES_MB, or `given_mb` where none promises to be clearly faster."""
    options = {given_mb, *SIZES_MB}
    regrets = dict.fromkeys(options, 1.0)
    for part in PARTS:
        found = {size: seconds(sizes, size, cost, part * backward_seconds) for size in options}
        best = min(found.values())
        regrets = {size: max(regret, found[size] / best) for size, regret in regrets.items()}
    least = min(sorted(options), key=lambda size: regrets[size])
    return least if regrets[least] <= WORTH * regrets[given_mb] else given_mb
