"""One small all-reduce of a window's sums. Its result is received at the next occasion, when it has long arrived.

The vector has one size, whatever was logged, because gloo ends the process where sizes differ. It carries a hash h of
the keys, as h and h squared: n ranks hold the same h exactly if n x (sum of h squared) = (sum of h) squared (Cauchy and
Schwarz), in whole numbers that float64 holds. Where they do not, all ranks see it and tell each other their keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.scalars import upload, wide_dtype
from paceline.errors import UsageError
from paceline.monitor.window import LOSS, Window
from paceline.strategies.base import Strategy

_DONE = "\0done"  # the key of the number of examples; no user's key has a zero byte

CAPACITY = 256  # keys in one exchange
_HEADER = 4  # number of ranks, h, h squared, elapsed seconds
NOW = "now"  # begins the occasion of what is logged outside of batches, which all ranks exchange together
_HASH_BITS = 20  # its square, times 4096 ranks, is below 2**53


class Result(NamedTuple):
    """What an exchange gave."""

    sums: dict[str, tuple[float, float]]  # key -> (sum of value x weight, sum of weight) over all ranks
    elapsed: float  # seconds between two exchanges, the ranks' mean
    note: Any  # what `send` was given
    done: float = 0.0  # examples of all ranks, where they are not in step


class _Flight(NamedTuple):
    """An all-reduce under way."""

    keys: list[str]  # of the window
    pending: collectives.Pending | None  # on the CPU, the all-reduce
    host: Tensor  # the vector, on the CPU once it has arrived
    event: torch.Event | None  # on a device, recorded behind the copy to `host`
    note: Any  # what `send` was given


class Exchange:
    """At most one all-reduce under way. All ranks call `send` and `receive` in the same order."""

    def __init__(self, device: torch.device, strategy: Strategy) -> None:
        self._device, self._strategy = device, strategy
        self._dtype = wide_dtype(device)
        self._flight: _Flight | None = None
        self._pooled: Result | None = None  # where ranks are not in step, what the next `receive` returns
        self.done = 0.0  # where ranks are not in step, the examples of this rank since the last `send`

    def send(self, window: Window, elapsed: float, occasion: str, note: Any) -> None:
        """Start the all-reduce of a window's sums.

        Args:
            elapsed: seconds since the last exchange.
            occasion: a text that must be the same on all ranks, as the keys must be.
            note: for the Result.
        """
        assert self._flight is None, "the last result was not received"
        queue = self._strategy.plan.shared_sums()
        if queue is not None:
            if not occasion.startswith(NOW):
                queue.pool({**window.totals(), _DONE: (self.done, 0.0)}, take=False)
                self._pooled, self.done = Result({}, elapsed, note), 0.0
                return
            occasion = NOW
        keys = window.keys
        if len(keys) > CAPACITY:
            raise UsageError(f"run.log: {len(keys)} names for one write; {CAPACITY} are the most. Log fewer.")
        code = zlib.crc32("\n".join([occasion, *keys]).encode()) % 2**_HASH_BITS
        host, parts = window.triples(keys)
        vector = torch.zeros(_HEADER + 3 * CAPACITY, dtype=self._dtype)
        vector[: _HEADER + len(host)] = torch.tensor([1, code, code * code, elapsed, *host], dtype=self._dtype)
        if self._device.type == "cpu":
            self._flight = _Flight(keys, collectives.all_reduce(vector, async_op=True), vector, None, note)
            return
        sent = upload(vector, self._device)
        if parts:
            places = upload(torch.tensor(list(parts)), self._device)
            sent[_HEADER:].view(-1, 3).index_add_(0, places, torch.stack(list(parts.values())).to(self._dtype))
        reduced = collectives.all_reduce(sent, async_op=True).wait()  # the device's stream waits, the host does not
        arrived = torch.empty(vector.shape, dtype=self._dtype, pin_memory=True)
        arrived.copy_(reduced, non_blocking=True)
        event = torch.Event(device=self._device)
        event.record()
        self._flight = _Flight(keys, None, arrived, event, note)

    @property
    def arrived(self) -> bool:
        """Would `receive` return without waiting?"""
        if self._flight is None:
            return True
        if self._flight.event is not None:
            return self._flight.event.query()
        return self._flight.pending is None or self._flight.pending.done()

    def receive(self) -> Result | None:
        """The result of the last `send`, if any. Raises UsageError, on all ranks, where the keys differ."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            queue = self._strategy.plan.shared_sums()
            if queue is None or collectives.rank_of():
                return pooled
            sums = queue.pool({}, take=True)
            return pooled._replace(done=sums.pop(_DONE, (0.0, 0.0))[0], sums=sums)
        flight, self._flight = self._flight, None
        if flight is None:
            return None
        if flight.event is not None:
            flight.event.synchronize()
        elif flight.pending is not None:
            flight.pending.wait()
        size, code, square, elapsed, *own = flight.host.tolist()[: _HEADER + 3 * len(flight.keys)]
        if size > 1 and int(size) * int(square) != int(code) ** 2:
            raise UsageError(_differ(collectives.gather_objects(flight.keys)))
        pairs = ((top + rest, bottom) for top, bottom, rest in zip(own[::3], own[1::3], own[2::3], strict=True))
        sums = dict(zip(flight.keys, pairs, strict=True))
        return Result(sums, elapsed / size, flight.note)


def _differ(everyone: Sequence[Sequence[str]]) -> str:
    """The text of the error: what each rank has logged."""
    named = [[key for key in keys if not key.startswith(LOSS)] for keys in everyone]
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, keys in enumerate(named):
        groups.setdefault(tuple(keys), []).append(rank)
    if len(groups) == 1:
        return (
            "run.log or the backward calls did not come equally often on all ranks, so that their values belong to "
            "different steps. Call them alike on all ranks."
        )
    lines = [f"  rank {', '.join(map(str, ranks))}: {', '.join(keys) or '(nothing)'}" for keys, ranks in groups.items()]
    return (
        "run.log was not called alike on all ranks, with the same names:\n" + "\n".join(lines) + "\nLogged values are "
        "means over all ranks: call it on every rank, and not under `if run.main`. Rank 0 alone writes what comes out."
    )
