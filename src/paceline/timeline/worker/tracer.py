"""Record the spans of one rank, and join the spans of all ranks at the end.

The tracer observes a run that sets `trace`, and watches the functions that wait for other processes (comm/waits.py).

At each moment a rank is in one phase (span_file.Phase):

1. A loader yields: the time that it waited for data is DATA. For an evaluation loader, the whole pass is EVALUATION.
   After that the rank is BETWEEN phases.
2. A backward begins: the time before it was FORWARD. A step with several losses, as in a GAN, has a FORWARD before each
   backward.
3. `run.step` is UPDATE. The time between a backward and `run.step`, or between `run.step` and the next batch, is
   BETWEEN.
4. If the strategy runs the closure and interleaves forwards and backwards, both are FORWARD_AND_BACKWARD.
5. In any phase, the time that the script's thread waits for other processes is COMMUNICATION. It splits the phase in
   two.

A span costs one reading of the clock and one write into memory. A step is one global batch, as in the probe of
`paceline compare`. Times are measured on the host: with an accelerator, they show when the host launches kernels and
waits for them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import Any
from weakref import WeakKeyDictionary

from paceline import notebook
from paceline.comm.process_group import machine
from paceline.comm.waits import watch
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.run import Run, RunParts
from paceline.step.observer import StepObserver
from paceline.strategies.base import ClosureStrategy
from paceline.timeline.chrome_trace import cannot_write, first_rank, join_and_say, part_files, part_of
from paceline.timeline.span_file import Phase, SpanWriter, has_ended
from paceline.world import TRACE, send_to_launcher

_LATE_SECONDS = 2.0  # the rank that joins the files waits this long for other ranks to close their runs

# Plain numbers: looking up a member of an enumeration takes as long as reading the clock.
_BETWEEN, _DATA, _FORWARD, _BACKWARD = map(int, (Phase.BETWEEN, Phase.DATA, Phase.FORWARD, Phase.BACKWARD))
_BOTH, _COMMUNICATION = int(Phase.FORWARD_AND_BACKWARD), int(Phase.COMMUNICATION)
_UPDATE, _CHECKPOINT, _EVALUATION = int(Phase.UPDATE), int(Phase.CHECKPOINT), int(Phase.EVALUATION)


class Tracer(StepObserver):
    """Traces a run from its start to its end. Raises SettingError if it cannot create the file for the spans."""

    def __init__(self, run: Run, parts: RunParts, file: str) -> None:
        self._run, self._parts = run, parts
        self._closure_form = isinstance(parts.strategy, ClosureStrategy)
        self._outer = _BETWEEN  # the phase to return to after the current backward or save
        self._file = os.path.abspath(file)  # the script may change its directory
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._about: dict[str, Any] = {
            "rank": run.world.rank,
            "pid": self._pid,
            "host": os.uname().nodename,
            "machine": machine(),
            "monotonic_ns": time.perf_counter_ns(),
            "wall_ns": time.time_ns(),
            "accelerated": run.device.type != "cpu",
        }
        try:
            self._writer = SpanWriter(part_of(self._file, run.world.rank, self._pid), self._about)
        except OSError as error:  # such as a full disk: write access was checked before
            raise SettingError(cannot_write(file, run.world.rank, error)) from error
        send_to_launcher(os.environ, TRACE, self._file)
        self._described = False  # whether `_describe` was called
        self._phase, self._since = _BETWEEN, time.perf_counter_ns()
        # Intervals of the current BETWEEN that an exchange has ended. They become FORWARD if a backward follows.
        # Bounded, because there may be many exchanges before any other phase.
        self._gaps: deque[tuple[int, int]] = deque(maxlen=1000)
        self._epoch, self._step, self._micro_batch = -1, -1, 0  # of the current step
        self._loader: Loader | None = None  # the loader of the current step's batch
        self._updated = False  # whether `run.step` has acted on the current step
        self._waited: WeakKeyDictionary[Loader, float] = WeakKeyDictionary()  # `loader.waited` at its last yield
        self._within = _BETWEEN  # the phase that the current wait has split
        self._unwatch = watch(self._wait)

    # --- events of the run

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        assert request is not None
        fetched = int(loader.fetched_at * 1e9)
        began = fetched - int((loader.waited - self._waited.get(loader, 0.0)) * 1e9)
        self._waited[loader] = loader.waited
        self._thread = threading.get_ident()
        if loader.train:
            began = self._leave(began)
            key = request.epoch, request.step
            if self._updated or self._loader is None or (loader is self._loader and key != (self._epoch, self._step)):
                self._loader, self._updated = loader, False
                self._epoch, self._step = key
            self._micro_batch = request.micro
            if not self._described:
                self._describe()
            self._write(_DATA, began, fetched)
            self._phase, self._since = _BETWEEN, max(began, fetched)
        elif self._phase != _EVALUATION:
            self._since = self._leave(began)
            self._phase = _EVALUATION

    def before_end(self, loader: Loader, whole: bool) -> None:
        if not loader.train and self._phase == _EVALUATION:
            self._switch(_BETWEEN)

    def in_backward(self, begins: bool) -> None:
        if not begins:
            self._switch(self._outer)
            return
        if not self._closure_form and self._phase == _BETWEEN:
            for start, end in self._gaps:
                self._write(_FORWARD, start, end)
            self._phase = _FORWARD
        self._outer = _BETWEEN if self._phase == _FORWARD else self._phase
        self._switch(_BOTH if self._closure_form else _BACKWARD)

    def before_step(self) -> None:
        self._switch(_UPDATE)

    def after_step(self, acted: bool) -> None:
        if acted:
            self._updated = True
        else:  # not the last micro-batch: nothing was updated
            self._phase = _BETWEEN
        self._switch(_BETWEEN)

    def in_save(self, begins: bool) -> None:
        if begins:
            self._outer = self._phase
        self._switch(_CHECKPOINT if begins else self._outer)

    def _wait(self, begins: bool) -> None:
        if threading.get_ident() != self._thread:
            return
        now = time.perf_counter_ns()
        if not begins:
            if self._phase == _COMMUNICATION:
                self._write(_COMMUNICATION, self._since, now, self._within)
                self._phase, self._since = self._within, now
            return
        if self._phase == _BETWEEN:  # this time is FORWARD if a backward follows
            self._gaps.append((self._since, now))
        else:
            self._write(self._phase, self._since, now)
        self._within = self._phase
        self._phase, self._since = _COMMUNICATION, now

    # --- spans

    def _switch(self, phase: int) -> None:
        """End the current phase, and begin `phase`."""
        self._since = self._leave(time.perf_counter_ns())
        self._phase = phase

    def _leave(self, moment: int) -> int:
        """End the current phase at `moment`, or at its start if that is later. Return the end."""
        moment = max(moment, self._since)
        if self._phase != _BETWEEN:
            self._write(self._phase, self._since, moment)
        self._gaps.clear()
        return moment

    def _write(self, phase: int, start: int, end: int, within: int | None = None) -> None:
        if end > start:
            self._writer.write(
                phase, phase if within is None else within, self._micro_batch, self._epoch, self._step, start, end
            )

    def _describe(self) -> None:
        """Add the strategy's settings to the description. Called once, when training begins and they are known."""
        self._described = True
        mesh = self._parts.strategy.mesh
        self._about["in_step"] = self._parts.in_step
        self._about["alike"] = mesh.shards == self._run.world.size
        self._writer.describe(self._about)

    # --- the end

    def after_close(self) -> None:
        if os.getpid() != self._pid:  # a process forked by the script
            return
        self._leave(time.perf_counter_ns())
        self._phase = _BETWEEN
        self._unwatch()
        self._writer.close()
        if first_rank(self._file) == self._run.world.rank:
            if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
                self._wait_for_others()
            join_and_say(self._file, _say)

    def _wait_for_others(self) -> None:
        """Wait up to _LATE_SECONDS for all ranks to close their runs. A later rank's trace ends at this moment."""
        deadline = time.monotonic() + _LATE_SECONDS
        while not all(map(has_ended, part_files(self._file))) and time.monotonic() < deadline:
            time.sleep(0.05)


def _say(line: str) -> None:
    """Print a line on stderr. In a notebook, print it on stdout, because a cell shows stderr as an error."""
    print(line, file=sys.stdout if notebook.in_kernel() else sys.stderr)
