"""What a run shows and records: collected when a loader yields, exchanged now and then, shown and written on rank 0.

One mechanism serves the progress display and the trackers. The loss of every backward call, and the values of
`run.log`, go into a window (window.py). A window is exchanged (exchange.py)

- with trackers, every `log_every` optimizer steps, and is then written;
- for the display, about once a second, also between two writes. The next interval in steps comes from the ranks' mean
  elapsed time, which all of them receive, so that they never disagree about it;
- with neither, never.

What was sent is received at the next occasion. The end of an epoch is one. There the rest is exchanged as well, so that
the line about the epoch has its whole mean; these sums are kept for the next write.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline import notebook
from paceline.comm import collectives
from paceline.config import Settings
from paceline.data.loader import Loader
from paceline.errors import UsageError, warn
from paceline.metrics.weighted_sum import FOLD_AT
from paceline.monitor import summary
from paceline.monitor.display import Display, View
from paceline.monitor.display_choice import make_display
from paceline.monitor.exchange import NOW, Exchange, Result
from paceline.monitor.settings_check import check_settings
from paceline.monitor.trackers import Tracker, TrackerSet, cannot_track
from paceline.monitor.window import Window, checked, means
from paceline.step.loss import parts_of
from paceline.step.step import Stepper
from paceline.timeline.chrome_trace import cannot_trace
from paceline.world import World

INTERVAL_SECONDS = 1.0
MOST_STEPS = 1000  # between two exchanges for the display
GROWTH = 8  # the most by which the interval grows at once


class _Note(NamedTuple):
    """What rank 0 must remember about a window until its sums come back."""

    write: bool  # are they to be written?
    ends: bool  # does a pass end with it, so that nothing more comes to that pass?
    step: int  # updates of the first optimizer
    epoch: int  # from 0
    learning_rate: float | None  # of the first optimizer
    made: int  # steps in the window


class Monitor:
    """The display and the trackers of a run, made by `Run` on all ranks alike. Raises SettingError on all ranks where
    rank 0 cannot write to log_dir, or a rank to what `trace` names."""

    def __init__(
        self, world: World, settings: Settings, device: torch.device, stepper: Stepper, models: Sequence[nn.Module]
    ) -> None:
        self._world, self._settings, self._device = world, settings, device
        self._stepper, self._models = stepper, models
        self._main = world.rank == 0
        self._shown = settings.progress != "off"
        problem = cannot_track(settings.log_dir, settings.trackers) if self._main else None
        if problem is None:
            problem = cannot_trace(settings.trace, world.rank, world.local_rank == 0)
        traced = settings.trace is not None
        check_settings(problem, (self._shown, settings.log_dir is not None, settings.log_every, traced))
        self._trackers = TrackerSet(settings.log_dir, settings.trackers)
        self._recorded = settings.log_dir is not None
        self._active = self._shown or self._recorded
        self._exchange = Exchange(device, stepper.strategy)
        self._window, self._pass = Window(device), Window(device)  # of the steps; of an evaluation's pass
        self._carry: dict[str, list[float]] = {}  # received sums that are not written yet
        self._carried: _Note | None = None  # the last note that came with them
        self._display: Display | None = None
        self.view = View()  # what the display shows
        self._facts: summary.Facts | None = None  # None until training begins
        self._loader: Loader | None = None  # the training loader whose steps are counted
        self._latest: Loader | None = None  # the loader that yielded last
        self._learning_rate: float | None = None
        self._steps = 0  # updates when the last global batch began
        self._sent_steps = 0  # steps made at the last exchange
        self._first_steps = 0  # steps made when the run began
        self._told_steps = -1  # steps made when the last line was printed
        self._interval = 1  # steps between two exchanges for the display
        self._sent_at = 0.0
        self._unable: set[str] = set()  # what was logged and no tracker takes
        self._unwritten = False  # have steps been made since the last write?
        self.totals = summary.Totals()  # counts for the last line
        self._local = False  # no more collectives: at the interpreter's exit, when other ranks may be gone
        self._closed = False
        if self._active:
            stepper.losses = []

    @property
    def active(self) -> bool:
        """Whether something is shown or recorded, so that the monitor needs each yield."""
        return self._active

    def add_tracker(self, tracker: Tracker, latest: Loader | None) -> None:
        """latest: the loader that has yielded last."""
        self._trackers.add(tracker)
        self._recorded = self._active = True
        self._latest = latest
        if self._stepper.losses is None:
            self._stepper.losses = []

    def _made(self) -> int:
        """Steps of all optimizers, also those left out. All ranks agree on this number, and not on the number of
        batches that a script has looked at."""
        return self._stepper.updates.made + self._stepper.updates.skipped

    def _updates(self) -> int:
        """Updates of the first optimizer, as `run.steps`."""
        for updates in self._stepper.updates.counts.values():
            return updates
        return 0

    def _rate(self) -> float | None:
        for optimizer in self._stepper.updates.counts:
            return optimizer.param_groups[0].get("lr")
        return None

    # --- in the loop

    def on_yield(self, loader: Loader) -> None:
        """A loader has fetched the next batch, which the script is about to get."""
        self._latest = loader
        request = loader.current
        assert request is not None
        if not loader.train:
            self.view.evaluation = loader
        elif request.micro == 0:
            if self._loader is None:
                self._begin_epoch(loader)
            if loader is self._loader:
                self._next_batch(loader, request.total)
        if self._display is not None and loader.fetched_at >= self._display.due:
            self._display.refresh(loader.fetched_at)

    def _next_batch(self, loader: Loader, examples: int) -> None:
        """A global batch of the training loader begins: exchange if it is time."""
        steps = self._updates()
        losses = self._stepper.losses
        if self._recorded:
            if steps // self._settings.log_every != self._steps // self._settings.log_every:
                self._send(True, steps, loader.fetched_at)
            elif self._shown and self._made() - self._sent_steps >= self._interval:
                self._send(False, steps, loader.fetched_at)
        elif self._made() - self._sent_steps >= self._interval:
            self._send(True, steps, loader.fetched_at)
        elif losses is not None and len(losses) >= FOLD_AT:
            self._collect()
        self._steps = steps
        self._unwritten = True
        if self._main:
            self._learning_rate = self._rate()
        if not self._stepper.strategy.plan.in_step:  # other ranks are somewhere else: they tell with their sums
            self._exchange.done += examples
        else:
            self.totals.examples += examples

    def _begin_epoch(self, loader: Loader) -> None:
        self._loader = loader
        now = loader.fetched_at
        if self._facts is None:
            self._begin(loader)
        self._sent_at = now
        self._steps = self._updates()
        self.view.begin_epoch(loader, now)
        self.totals.begin(loader, now)
        if self._display is None and self._main and self._shown:
            self._display = make_display(self._settings.progress, self.view, self.totals, self._device)

    def _begin(self, loader: Loader) -> None:
        self._facts = summary.facts(self._world, self._settings, self._device, self._stepper, self._models, loader)
        atexit.register(self._exiting)
        self._sent_steps = self._made()  # of a restored run: not 0
        self._first_steps = self._updates() + self._stepper.updates.skipped
        if not self._main:
            return
        self._trackers.begin(self._facts.as_config(), self._updates())
        if self._shown:
            for line in summary.at_start(self._facts):
                _say(f"paceline: {line}")

    def on_end(self, loader: Loader, whole: bool) -> None:
        """A loader's pass has ended. whole: it was read to its end, which happens alike on all ranks."""
        if not self._active:
            return
        if not loader.train:
            if self.view.evaluation is loader:
                self.view.evaluation = None
            if whole and self._pass:
                self._write_now(self._pass)
                self._pass = Window(self._device)
            return
        if loader is not self._loader and self._stepper.strategy.plan.in_step:
            return  # but where parts are dealt, this rank may have had none of this pass
        if whole and not self._local:
            if self._facts is not None:
                steps = self._updates()
                every = self._settings.log_every
                write = not self._recorded or steps // every != self._steps // every
                self._send(write, steps, loader.fetched_at, ends=True)
                self._steps = steps
            if not self._stepper.strategy.plan.in_step:
                collectives.barrier()  # all have sent
            self._receive()
        if loader is not self._loader:
            return
        now = time.perf_counter()
        self._loader = None
        self.totals.end(now)
        left = None if whole else loader.loop_exit
        self.view.end_epoch(None if left is None else left.request.step)
        if self._display is not None and whole:
            self._display.epoch_ended(now)

    def epochs(self, numbers: Iterator[int], count: int, at_end: Callable[[], object]) -> Iterator[int]:
        """Pass on the epochs of `run.epochs`. After the last one, end the display and call `at_end`."""
        self.view.epochs = count
        for number in numbers:
            self.view.epoch = number
            yield number
        self._flush()
        if self._display is not None:
            self._display.close()
            self._display = None
            if notebook.in_kernel():
                self._tell_end()  # in this cell: the run may be closed in any later one
        self.view.epochs = None
        at_end()

    # --- what is logged

    def log(self, values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> None:
        logged = checked(values, named)
        if not self._active:
            return
        loader = self._latest
        inside = loader is not None and loader.current is not None
        window = Window(self._device) if not inside else self._window if loader.train else self._pass  # type: ignore[union-attr]
        for key, value in logged.items():
            for part, weight in parts_of(value) if inside else [(value, 1)]:
                window.add(key, part, loader.examples if weight is None else weight)  # type: ignore[union-attr]
        if not inside:
            self._write_now(window)

    def log_hyperparameters(self, values: Mapping[str, str | int | float | bool]) -> None:
        """On rank 0; nothing travels."""
        if self._main and self._recorded:
            self._trackers.log_hyperparameters(values)

    def log_media(self, method: str, name: str, make: Callable[[], Any]) -> None:
        """An image or a histogram, on rank 0; nothing travels. make: computes what trackers take."""
        if self._main and self._recorded:
            able = self._trackers.log_media(method, name, make(), self._updates(), self.view.epoch)
            if not able and method not in self._unable:
                self._unable.add(method)
                warn(f"run.{method}: no tracker of this run takes that. tensorboard and wandb take both.")

    def _write_now(self, window: Window) -> None:
        """Exchange, receive and write a window that was logged outside of a batch, before this returns."""
        steps = self._updates()
        if self._recorded and steps // self._settings.log_every != self._steps // self._settings.log_every:
            self._send(True, steps, time.perf_counter())  # those before it come first
            self._steps = steps
        self._receive()
        self._exchange.send(window, 0.0, f"{NOW} {steps}", None)
        result = self._result()
        assert result is not None
        if self._main:
            _, values = means(result.sums)
            self.view.updates = steps
            self._record(values, steps, self.view.epoch)
            if self._display is not None:
                self._display.logged(values)
            elif self._shown:
                _say(summary.logged(steps, values))

    # --- the exchange

    def _collect(self) -> None:
        """Move the step's losses into the window."""
        losses = self._stepper.losses
        if losses:
            self._window.add_losses(losses)
            losses.clear()

    def _send(self, write: bool, steps: int, now: float, ends: bool = False) -> None:
        """Exchange the window. write: its sums are to be written; ends: a pass ends with it."""
        self._receive()
        self._collect()
        made = self._made()
        note = _Note(write, ends, steps, self.view.epoch, self._learning_rate, made - self._sent_steps)
        self._exchange.send(self._window, now - self._sent_at, f"{write} {steps}", note)
        self._window = Window(self._device)
        self._sent_at, self._sent_steps = now, made
        self._unwritten = self._unwritten and not write

    def _receive(self) -> None:
        """Receive the last exchange, and set the interval to the next one."""
        result = self._result()
        if result is None:
            return
        if self._shown and result.elapsed > 0:
            wanted = int(result.note.made * INTERVAL_SECONDS / result.elapsed)
            self._interval = max(1, min(wanted, GROWTH * self._interval, MOST_STEPS))
        self._accumulate(result)

    def _result(self) -> Result | None:
        try:
            return self._exchange.receive()
        except UsageError:  # on all ranks: what they would send from here on would not fit together either
            self._local = True
            raise

    def _accumulate(self, result: Result) -> None:
        """Add received sums to those of the epoch and of the next write. Write them, or show them."""
        self.totals.examples += int(result.done)
        for key, (top, bottom) in result.sums.items():
            for sums in (self._carry, self.view.epoch_sums):
                pair = sums.setdefault(key, [0.0, 0.0])
                pair[0] += top
                pair[1] += bottom
        if result.note.write:
            self._write(result.note)
            return
        if result.note.ends or self._carried is not None:
            self._carried = result.note
        self._show(self._carry, result.note)

    def _write(self, note: _Note) -> None:
        """Write the sums that have been received since the last write."""
        sums, self._carry, self._carried = self._carry, {}, None
        if not self._main:
            return
        values = self._show(sums, note)
        if self._recorded:
            own = {"loss": self.view.loss, "lr": note.learning_rate, "examples_per_second": self.totals.rate()}
            known = {key: value for key, value in own.items() if value is not None}
            self._record({**known, **values}, note.step, note.epoch)

    def _show(self, sums: Mapping[str, list[float]], note: _Note) -> dict[str, float]:
        """Put means into the view. Returns those of the script's own names."""
        self.view.loss, values = means(sums)
        self.view.updates = note.step
        if self.view.loss is not None:
            self.view.losses.append((note.step, self.view.loss))
        self.view.learning_rate = note.learning_rate
        self.view.values = {key: value for key, value in values.items() if key != "loss"}
        return values

    def _record(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        if self._recorded:
            self._trackers.log(values, step, epoch)

    def _flush(self) -> None:
        """Write what has not been written yet. Called by all ranks, or by a rank that is alone."""
        if not self._active:
            return
        if self._unwritten:
            self._send(True, self._updates(), time.perf_counter())
        self._receive()

    # --- beside the loop

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Around the writing of a checkpoint, which all ranks do together."""
        if not self._local:
            self._receive()
        began = time.perf_counter()
        yield
        self.totals.saved(time.perf_counter() - began)

    def restored(self, place: str, steps: int) -> None:
        if self._main and self._shown:
            _say(f"paceline: goes on after step {steps}, from {place}")

    def _exiting(self) -> None:
        self._local = True

    def close(self) -> None:
        """End the display and the trackers.

        Nothing is communicated, since other ranks may have failed. What was exchanged at the end of a pass or of
        `run.epochs` is written. Where a pass was broken off, its last steps are not, unless the run is one process.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._exiting)
        try:
            if collectives.size_of() > 1:
                self._last_arrival()
            else:
                self._flush()
        except Exception:
            if not self._local:  # at the exit of a run that failed, the device may be what did
                raise
        finally:
            self._stepper.losses = None
            if self._display is not None:
                self._display.close()
                self._display = None
            self._trackers.close()
            if self._main and self._shown and self._facts is not None and not (self._local and _failed()):
                self._tell_end()

    def _tell_end(self) -> None:
        """Print the last line, unless it was printed after the same step."""
        steps = self._updates() + self._stepper.updates.skipped - self._first_steps
        if steps != self._told_steps:
            self._told_steps = steps
            _say(f"paceline: {summary.at_end(self.totals, steps, self._world)}")

    def _last_arrival(self) -> None:
        """Receive what was sent before, if it comes within two seconds: a rank that died will not send its part."""
        deadline = time.monotonic() + 2.0
        while not self._exchange.arrived and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(Exception):
            if self._exchange.arrived:
                self._receive()
            if self._carried is not None:  # the end of a pass, which all ranks have told already
                self._write(self._carried)


def _say(line: str) -> None:
    """On stderr; in a notebook on stdout, since a cell shows stderr as an error."""
    print(line, file=sys.stdout if notebook.in_kernel() else sys.stderr)


def _failed() -> bool:
    """Does the program end by an error, whose message must stay the last?"""
    error = getattr(sys, "last_value", None)
    return error is not None and not isinstance(error, KeyboardInterrupt)
