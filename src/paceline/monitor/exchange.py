"""One small all-reduce of a window's sums. The result is received later, usually long after it has arrived.

The vector has a fixed size, because gloo ends the process if sizes differ. It contains a hash h of the keys, and h
squared. n ranks have the same h if and only if n x (sum of h squared) = (sum of h) squared (Cauchy-Schwarz). float64
holds these integers exactly. If the hashes differ, all ranks notice, and exchange their keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Pending
from paceline.comm.mesh import world_group
from paceline.comm.scalars import upload, wide_dtype
from paceline.errors import UsageError
from paceline.monitor.window import LOSS, Window
from paceline.strategies.base import Strategy

_DONE = "\0done"  # key of the number of examples; no user's key has a zero byte

CAPACITY = 256  # keys in one exchange
_HEADER = 4  # number of ranks, h, h squared, elapsed seconds
NOW = "now"  # prefix of the occasion for values logged outside of batches, which all ranks exchange together
_HASH_BITS = 20  # the square, times 4096 ranks, is below 2**53


class Result(NamedTuple):
    """The result of an exchange."""

    sums: dict[str, tuple[float, float]]  # key -> (sum of value x weight, sum of weight) over all ranks
    elapsed: float  # seconds between two exchanges, mean over the ranks
    note: Any  # the argument of `send`
    done: float = 0.0  # examples of all ranks, if they are not in step


class _Flight(NamedTuple):
    """An all-reduce in progress."""

    keys: list[str]  # of the window
    pending: Pending | None  # on a CPU: the all-reduce
    host: Tensor  # the vector, on the CPU when it has arrived
    event: torch.Event | None  # on a device: recorded after the copy to `host`
    note: Any  # the argument of `send`


class Exchange:
    """At most one all-reduce in progress. All ranks call `send` and `receive` in the same order."""

    def __init__(self, device: torch.device, strategy: Strategy) -> None:
        self._device, self._strategy = device, strategy
        self._dtype = wide_dtype(device)
        self._flight: _Flight | None = None
        self._pooled: Result | None = None  # if ranks are not in step: the result of the next `receive`
        self.done = 0.0  # if ranks are not in step: examples of this rank since the last `send`

    def send(self, window: Window, elapsed: float, occasion: str, note: Any) -> None:
        """Start the all-reduce of a window's sums.

        Args:
            elapsed: seconds since the last exchange.
            occasion: a text that must be the same on all ranks, like the keys.
            note: an object to return in the Result.
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
            raise UsageError(f"run.log: {len(keys)} names in one write; the limit is {CAPACITY}. Log fewer.")
        code = zlib.crc32("\n".join([occasion, *keys]).encode()) % 2**_HASH_BITS
        host, parts = window.triples(keys)
        vector = torch.zeros(_HEADER + 3 * CAPACITY, dtype=self._dtype)
        vector[: _HEADER + len(host)] = torch.tensor([1, code, code * code, elapsed, *host], dtype=self._dtype)
        if self._device.type == "cpu":
            self._flight = _Flight(keys, world_group().all_reduce(vector, async_op=True), vector, None, note)
            return
        sent = upload(vector, self._device)
        if parts:
            positions = upload(torch.tensor(list(parts)), self._device)
            sent[_HEADER:].view(-1, 3).index_add_(0, positions, torch.stack(list(parts.values())).to(self._dtype))
        reduced = world_group().all_reduce(sent, async_op=True).wait()  # the device's stream waits, the host does not
        arrived = torch.empty(vector.shape, dtype=self._dtype, pin_memory=True)
        arrived.copy_(reduced, non_blocking=True)
        event = torch.Event(device=self._device)
        event.record()
        self._flight = _Flight(keys, None, arrived, event, note)

    @property
    def arrived(self) -> bool:
        """Whether `receive` would return without waiting."""
        if self._flight is None:
            return True
        if self._flight.event is not None:
            return self._flight.event.query()
        return self._flight.pending is None or self._flight.pending.done()

    def receive(self) -> Result | None:
        """Return the result of the last `send`, or None. Raises UsageError on all ranks if the keys differ."""
        pooled, self._pooled = self._pooled, None
        if pooled is not None:
            queue = self._strategy.plan.shared_sums()
            if queue is None or world_group().rank:
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
        size, code, square, elapsed, *row = flight.host.tolist()[: _HEADER + 3 * len(flight.keys)]
        if size > 1 and int(size) * int(square) != int(code) ** 2:
            raise UsageError(_differ(world_group().gather(flight.keys)))
        pairs = ((top + rest, bottom) for top, bottom, rest in zip(row[::3], row[1::3], row[2::3], strict=True))
        sums = dict(zip(flight.keys, pairs, strict=True))
        return Result(sums, elapsed / size, flight.note)


def _differ(everyone: Sequence[Sequence[str]]) -> str:
    """Return the error message, with the names that each rank has logged."""
    named = [[key for key in keys if not key.startswith(LOSS)] for keys in everyone]
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, keys in enumerate(named):
        groups.setdefault(tuple(keys), []).append(rank)
    if len(groups) == 1:
        return (
            "the ranks called run.log or the backward different numbers of times, so their values belong to different "
            "steps. Call each the same number of times on every rank."
        )
    lines = [f"  rank {', '.join(map(str, ranks))}: {', '.join(keys) or '(nothing)'}" for keys, ranks in groups.items()]
    return (
        "the ranks called run.log with different names:\n" + "\n".join(lines) + "\nLogged values are means over all "
        "ranks: call run.log on every rank, not under `if run.main`. Only rank 0 writes the result."
    )
