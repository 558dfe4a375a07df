"""The tracer: it records the spans of one rank, and joins those of all ranks at the end.

It observes a run with `trace`, and wraps the functions that wait for other processes (comm/waits.py).

At each moment a rank is in one phase (span_file.Phase):

1. A loader yields: the time that it has waited for data is DATA, or, of an evaluation loader, the whole pass
   EVALUATION. After that the rank is BETWEEN phases.
2. A backward begins: what lay between was FORWARD. With several losses, as of a GAN, that holds for each.
3. `run.step` is UPDATE. What lies between a backward and that, or between that and the next batch, is no phase.
4. Where the strategy runs the closure, and mixes forwards and backwards, that is FORWARD_AND_BACKWARD.
5. Within any of these, waiting for other processes in the script's thread is COMMUNICATION, and cuts the phase in two.

A span costs a look at the clock and a write into memory. A step of the script is one global batch, as in the probe of
`paceline compare`. Times are the host's: on an accelerator, where it has launched kernels, and where it waits for them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from paceline import notebook
from paceline.comm.process_group import machine
from paceline.comm.waits import WAITS
from paceline.data.loader import Loader
from paceline.errors import SettingError
from paceline.run import Run, RunParts
from paceline.step.observer import StepObserver
from paceline.strategies.base import ClosureStrategy
from paceline.timeline.chrome_trace import cannot_write, first_rank, join_and_say, part_files, part_of
from paceline.timeline.span_file import Phase, SpanWriter, has_ended
from paceline.world import TRACE, tell_launcher

_LATE_SECONDS = 2.0  # for which the rank that joins waits for others, which close their runs too

# Plain numbers: a look at an enumeration's member takes as long as a look at the clock.
_BETWEEN, _DATA, _FORWARD, _BACKWARD = map(int, (Phase.BETWEEN, Phase.DATA, Phase.FORWARD, Phase.BACKWARD))
_BOTH, _COMMUNICATION = int(Phase.FORWARD_AND_BACKWARD), int(Phase.COMMUNICATION)
_UPDATE, _CHECKPOINT, _EVALUATION = int(Phase.UPDATE), int(Phase.CHECKPOINT), int(Phase.EVALUATION)


class Tracer(StepObserver):
    """Observes a run from its start. Raises SettingError where there is no room."""

    def __init__(self, run: Run, parts: RunParts, file: str) -> None:
        self._run, self._parts = run, parts
        self._closure_form = isinstance(parts.strategy, ClosureStrategy)
        self._outer = _BETWEEN  # the phase to which the open backward or save returns
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
        except OSError as error:  # such as no room: that it may write there was checked
            raise SettingError(cannot_write(file, run.world.rank, error)) from error
        tell_launcher(os.environ, TRACE, self._file)
        self._described = False  # whether `_describe` was called
        self._phase, self._since = _BETWEEN, time.perf_counter_ns()
        # Earlier parts of the time BETWEEN, cut by exchanges; the last ones, since nothing else may ever come.
        self._gaps: deque[tuple[int, int]] = deque(maxlen=1000)
        self._epoch, self._step, self._micro_batch = -1, -1, 0  # of the open step
        self._loader: Loader | None = None  # whose batch the open step is
        self._updated = False  # whether `run.step` has acted on the open step
        self._waited: WeakKeyDictionary[Loader, float] = WeakKeyDictionary()  # seconds at its last yield
        self._patches = contextlib.ExitStack()
        for owner, name in WAITS:
            self._replace(owner, name, self._waiting)

    def _replace(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Puts `method` in the place of this one, which becomes its first argument, until the run is closed."""
        original = getattr(owner, name)
        own = name in vars(owner)

        @functools.wraps(original)
        def replaced(*args: Any, **options: Any) -> Any:
            return method(original, *args, **options)

        setattr(owner, name, replaced)
        if own:
            self._patches.callback(setattr, owner, name, original)
        else:
            self._patches.callback(delattr, owner, name)

    # --- what the run tells

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
        else:  # a micro-batch that is not the last: nothing was updated
            self._phase = _BETWEEN
        self._switch(_BETWEEN)

    def in_save(self, begins: bool) -> None:
        if begins:
            self._outer = self._phase
        self._switch(_CHECKPOINT if begins else self._outer)

    def _waiting(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        before = self._phase
        if before == _COMMUNICATION or threading.get_ident() != self._thread:
            return original(*args, **options)
        now = time.perf_counter_ns()
        if before == _BETWEEN:  # of which nobody knows yet whether it is a forward
            self._gaps.append((self._since, now))
        else:
            self._write(before, self._since, now)
        self._phase, self._since = _COMMUNICATION, now
        try:
            return original(*args, **options)
        finally:
            now = time.perf_counter_ns()
            self._write(_COMMUNICATION, self._since, now, before)
            self._phase, self._since = before, now

    # --- spans

    def _switch(self, phase: int) -> None:
        """The phase ends here, and this one begins."""
        self._since = self._leave(time.perf_counter_ns())
        self._phase = phase

    def _leave(self, moment: int) -> int:
        """The phase has ended at this moment, or when it began if that was later. Returns when it ended."""
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
        """Once, when training begins: what the strategy has set by then."""
        self._described = True
        mesh, plan = self._parts.strategy.mesh, self._parts.strategy.plan
        self._about["in_step"] = plan.in_step and not mesh.independent
        self._about["alike"] = mesh.shards == self._run.world.size
        self._writer.describe(self._about)

    # --- the end

    def after_close(self) -> None:
        if os.getpid() != self._pid:  # a process that the script has forked
            return
        self._leave(time.perf_counter_ns())
        self._phase = _BETWEEN
        self._patches.close()
        self._writer.close()
        if first_rank(self._file) == self._run.world.rank:
            if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
                self._wait_for_others()
            join_and_say(self._file, _say)

    def _wait_for_others(self) -> None:
        """Until all have closed their runs, for a moment: what a rank has recorded so far is there anyway."""
        deadline = time.monotonic() + _LATE_SECONDS
        while not all(map(has_ended, part_files(self._file))) and time.monotonic() < deadline:
            time.sleep(0.05)


def _say(line: str) -> None:
    """On stderr; in a notebook on stdout, since a cell shows stderr as an error."""
    print(line, file=sys.stdout if notebook.in_kernel() else sys.stderr)
