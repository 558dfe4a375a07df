"""A process's own time in each step: from the request for data to the last gradient, without waits for other processes.

1. A loader fetches the first batch of a step: the clock starts when the fetch begins.
2. While a listed function waits for other processes (comm/waits.py), the clock stands still.
3. In a backward, ddp waits for others after the last gradient only. So the time counts up to this gradient. Its
   parameter is found in the first backward, and gets a hook. If a strategy reduces within the backward (fsdp), all of
   the backward counts, without its waits.
4. The update does not count: it does not depend on the examples.

On an accelerator, the readings of the clock are events on the device's stream, so the host does not wait for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Reading = Any
"""Seconds on the host, or an event of a device."""


class _Arrival(NamedTuple):
    """A gradient that has arrived."""

    parameter: Tensor
    moment: Reading
    number: int  # of the intervals that were complete
    since: Reading  # the start of the interval that was open; None: there was none


class OwnTime:
    """The own time of this process.

    Args:
        device: of the models.
        within_backward: whether a backward waits for others before its last gradient.
    """

    def __init__(self, device: torch.device, *, within_backward: bool) -> None:
        self._device, self._within_backward = device, within_backward
        self._thread = threading.get_ident()
        self._since: Reading = None  # None: the clock stands still
        self._waits = False
        self._intervals: list[tuple[Reading, Reading]] = []  # of the open step
        self._open = False
        self._lost = False  # whether a last gradient of this step was not found
        self._last: _Arrival | None = None  # the latest gradient of this backward
        self._hooked: set[Tensor] = set()  # parameters whose gradient came last in a backward
        self._searching: list[Any] = []  # hooks on all parameters, in a backward whose last parameter is not known
        self._hooks: list[Any] = []
        self._known: set[int] = set()  # the numbers of the backward calls whose last parameter is known
        self._calls = 0  # backward calls in this step

    def now(self) -> Reading:
        """Read the clock."""
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def begin(self, fetched: float, waited: float) -> None:
        """A loader has yielded, unless the step is already open.

        fetched: `time.perf_counter()` when the batch arrived, `waited` seconds after the loader was asked for it.
        """
        if not self._open:
            self._open, self._lost, self._intervals, self._calls = True, False, [], 0
            self._thread = threading.get_ident()
            self._since = fetched - waited if self._device.type == "cpu" else self.now()

    def wait(self, begins: bool) -> None:
        """This process waits for others if `begins`, else has waited."""
        if not self._open or (self._device.type == "cpu" and threading.get_ident() != self._thread):
            return
        if begins and self._since is not None:
            self._pause(self.now())
            self._waits = True
        elif not begins and self._waits:
            self._since, self._waits = self.now(), False

    def _pause(self, moment: Reading) -> None:
        self._intervals.append((self._since, moment))
        self._since = None

    def begin_backward(self, parameters: Sequence[Tensor]) -> None:
        """A backward begins. parameters: those that can get a gradient."""
        self._last = None
        if self._open and not self._within_backward and self._calls not in self._known:
            self._searching = [p.register_post_accumulate_grad_hook(self._note) for p in parameters if p.requires_grad]

    def _note(self, parameter: Tensor) -> None:
        """A gradient has arrived."""
        self._last = _Arrival(parameter, self.now(), len(self._intervals), self._since)

    def end_backward(self) -> None:
        """The backward has ended."""
        searched = bool(self._searching)
        for hook in self._searching:
            hook.remove()
        self._searching = []
        if not self._open:
            return
        if self._last is not None:
            parameter, moment, number, since = self._last
            self._intervals[number:] = [] if since is None else [(since, moment)]
            if searched:
                self._known.add(self._calls)
                if parameter not in self._hooked:
                    self._hooked.add(parameter)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))
        elif self._within_backward:
            self._pause(self.now())
        else:  # other parameters than before were used
            self._known.discard(self._calls)
            self._lost = True
        self._calls += 1
        self._last, self._since, self._waits = None, self.now(), False

    def end(self) -> list[tuple[Reading, Reading]] | None:
        """The step has ended. Returns its intervals; None if they are not known."""
        found = self._intervals if self._open and not self._lost else None
        self._open, self._since, self._waits = False, None, False
        return found

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked, self._known = [], set(), set()


def seconds(intervals: Sequence[tuple[Reading, Reading]]) -> float | None:
    """The total length of intervals; None if a device has not reached the end of the last one."""
    if not intervals:
        return 0.0
    if isinstance(intervals[0][0], float):
        return float(sum(end - start for start, end in intervals))
    if not intervals[-1][1].query():
        return None
    return float(sum(start.elapsed_time(end) for start, end in intervals)) / 1000
