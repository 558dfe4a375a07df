"""Collect shown and logged values when a loader yields, and exchange them at intervals. Rank 0 shows and writes them.

One mechanism serves the progress display and the trackers. The loss of every backward call, and the values of
`run.log`, go into a window (window.py). A window is exchanged (exchange.py):

- With trackers, every `log_every` optimizer steps. The result is then written.
- For the display, about once a second, even between two writes. The next interval, in steps, is computed from the mean
  elapsed time of the ranks. All ranks receive this mean, so they use the same interval.
- Without trackers and display, never.

A result is received at the next exchange, or at the end of an epoch. At the end of an epoch, the remaining sums are
exchanged too, so the line about the epoch shows the mean over the whole epoch. These sums also count in the next write.
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
from paceline.comm.mesh import world_group
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
MOST_STEPS = 1000  # largest interval between two exchanges for the display
GROWTH = 8  # largest factor by which the interval grows at once


class _Note(NamedTuple):
    """A record of a window, kept until its sums are received."""

    write: bool  # whether to write the sums
    ends: bool  # whether a pass ends with this window, so that the pass is complete
    step: int  # updates of the first optimizer
    epoch: int  # from 0
    learning_rate: float | None  # of the first optimizer
    made: int  # steps in the window


class Monitor:
    """The display and the trackers of a run. `Run` creates a monitor on every rank.

    Raises SettingError on all ranks if rank 0 cannot write to log_dir, or if a rank cannot write to the path of
    `trace`.
    """

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
        self._window, self._pass = Window(device), Window(device)  # for steps; for an evaluation pass
        self._carry: dict[str, list[float]] = {}  # received sums that are not written yet
        self._carried: _Note | None = None  # the last note received with these sums
        self._display: Display | None = None
        self.view = View()  # the values that the display shows
        self._facts: summary.Facts | None = None  # None until training begins
        self._loader: Loader | None = None  # the training loader that steps are counted for
        self._latest: Loader | None = None  # the loader that yielded last
        self._learning_rate: float | None = None
        self._steps = 0  # updates at the start of the last global batch
        self._sent_steps = 0  # steps made at the last exchange
        self._first_steps = 0  # steps made at the start of the run
        self._printed_steps = -1  # steps made at the last printed summary
        self._interval = 1  # steps between two exchanges for the display
        self._sent_at = 0.0
        self._unable: set[str] = set()  # logging methods that no tracker supports
        self._unwritten = False  # whether steps have been made since the last write
        self.totals = summary.Totals()  # counts for the summary at the end
        self._local = False  # no more collectives, because other ranks may be gone (at the interpreter's exit)
        self._closed = False
        if self._active:
            stepper.losses = []

    @property
    def active(self) -> bool:
        """Whether anything is shown or recorded, so that the monitor must see each yield."""
        return self._active

    def add_tracker(self, tracker: Tracker, latest: Loader | None) -> None:
        """Add a tracker. `latest` is the loader that yielded last."""
        self._trackers.add(tracker)
        self._recorded = self._active = True
        self._latest = latest
        if self._stepper.losses is None:
            self._stepper.losses = []

    def _made(self) -> int:
        """Return the number of steps of all optimizers, including skipped steps.

        It is the same on all ranks. The number of batches that the script has read may differ between ranks.
        """
        return self._stepper.updates.made + self._stepper.updates.skipped

    def _updates(self) -> int:
        """Return the number of updates of the first optimizer, like `run.steps`."""
        for updates in self._stepper.updates.counts.values():
            return updates
        return 0

    def _rate(self) -> float | None:
        for optimizer in self._stepper.updates.counts:
            return optimizer.param_groups[0].get("lr")
        return None

    # --- in the loop

    def on_yield(self, loader: Loader) -> None:
        """Handle a loader's yield, before the script gets the batch."""
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
        """Handle the start of a global batch of the training loader. Exchange the window if due."""
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
        if not self._stepper.strategy.plan.in_step:  # each rank sends its number of examples with its sums
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
        self._sent_steps = self._made()  # not 0 in a restored run
        self._first_steps = self._updates() + self._stepper.updates.skipped
        if not self._main:
            return
        self._trackers.begin(self._facts.as_config(), self._updates())
        if self._shown:
            for line in summary.at_start(self._facts):
                _say(f"paceline: {line}")

    def on_end(self, loader: Loader, whole: bool) -> None:
        """Handle the end of a loader's pass.

        Args:
            whole: whether the pass was read to its end. If so, all ranks have done the same.
        """
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
            return  # with a work queue, this rank may have had no chunk of this pass
        if whole and not self._local:
            if self._facts is not None:
                steps = self._updates()
                every = self._settings.log_every
                write = not self._recorded or steps // every != self._steps // every
                self._send(write, steps, loader.fetched_at, ends=True)
                self._steps = steps
            if not self._stepper.strategy.plan.in_step:
                world_group().barrier()  # all ranks have sent their sums
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
        """Yield the epochs of `run.epochs`. After the last epoch, end the display and call `at_end`."""
        self.view.epochs = count
        for number in numbers:
            self.view.epoch = number
            yield number
        self._flush()
        if self._display is not None:
            self._display.close()
            self._display = None
            if notebook.in_kernel():
                self._print_end()  # in this cell: the run may be closed in any later cell
        self.view.epochs = None
        at_end()

    # --- logging

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
        """Record hyperparameters on rank 0, without communication."""
        if self._main and self._recorded:
            self._trackers.log_hyperparameters(values)

    def log_media(self, method: str, name: str, make: Callable[[], Any]) -> None:
        """Record an image or a histogram on rank 0, without communication. `make` returns the object for trackers."""
        if self._main and self._recorded:
            able = self._trackers.log_media(method, name, make(), self._updates(), self.view.epoch)
            if not able and method not in self._unable:
                self._unable.add(method)
                warn(f"run.{method}: no tracker of this run supports it. tensorboard and wandb support both.")

    def _write_now(self, window: Window) -> None:
        """Exchange, receive and write a window at once, for values that are logged outside of a batch."""
        steps = self._updates()
        if self._recorded and steps // self._settings.log_every != self._steps // self._settings.log_every:
            self._send(True, steps, time.perf_counter())  # the earlier values come first
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
        """Move the losses of the steps into the window."""
        losses = self._stepper.losses
        if losses:
            self._window.add_losses(losses)
            losses.clear()

    def _send(self, write: bool, steps: int, now: float, ends: bool = False) -> None:
        """Start the exchange of the window. `write` and `ends` are for its _Note."""
        self._receive()
        self._collect()
        made = self._made()
        note = _Note(write, ends, steps, self.view.epoch, self._learning_rate, made - self._sent_steps)
        self._exchange.send(self._window, now - self._sent_at, f"{write} {steps}", note)
        self._window = Window(self._device)
        self._sent_at, self._sent_steps = now, made
        self._unwritten = self._unwritten and not write

    def _receive(self) -> None:
        """Receive the last exchange, and set the interval until the next one."""
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
        except UsageError:  # raised on all ranks; their later exchanges would not match either
            self._local = True
            raise

    def _accumulate(self, result: Result) -> None:
        """Add received sums to the sums of the epoch and of the next write. Write them, or show them."""
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
        """Write the sums received since the last write."""
        sums, self._carry, self._carried = self._carry, {}, None
        if not self._main:
            return
        values = self._show(sums, note)
        if self._recorded:
            rate = self.totals.rate()
            standard = {
                "loss": self.view.loss,
                "lr": note.learning_rate,
                "examples_per_second": rate,
                "mfu": self.totals.utilization(rate),
            }
            known = {key: value for key, value in standard.items() if value is not None}
            self._record({**known, **values}, note.step, note.epoch)

    def _show(self, sums: Mapping[str, list[float]], note: _Note) -> dict[str, float]:
        """Put the means of loss and logged values into the view. Return the means of the logged values."""
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
        """Write everything that is not yet written. Collective."""
        if not self._active:
            return
        if self._unwritten:
            self._send(True, self._updates(), time.perf_counter())
        self._receive()

    # --- outside the loop

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Receive the last exchange, and measure how long the block takes to write a checkpoint. Collective."""
        if not self._local:
            self._receive()
        began = time.perf_counter()
        yield
        self.totals.saved(time.perf_counter() - began)

    def restored(self, place: str, steps: int) -> None:
        if self._main and self._shown:
            _say(f"paceline: resumed after step {steps}, from {place}")

    def _exiting(self) -> None:
        self._local = True

    def close(self) -> None:
        """End the display and the trackers.

        Does not communicate, because other ranks may have failed. Values exchanged at the end of a pass or of
        `run.epochs` are written. If a pass was left early, the values of its last steps are lost, unless the run has
        only one process.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._exiting)
        try:
            if world_group().size > 1:
                self._last_arrival()
            else:
                self._flush()
        except Exception:
            if not self._local:  # at the exit of a failed run, the device itself may have failed
                raise
        finally:
            self._stepper.losses = None
            if self._display is not None:
                self._display.close()
                self._display = None
            self._trackers.close()
            if self._main and self._shown and self._facts is not None and not (self._local and _failed()):
                self._print_end()

    def _print_end(self) -> None:
        """Print the summary line, unless it was already printed after the same step."""
        steps = self._updates() + self._stepper.updates.skipped - self._first_steps
        if steps != self._printed_steps:
            self._printed_steps = steps
            _say(f"paceline: {summary.at_end(self.totals, steps, self._world)}")

    def _last_arrival(self) -> None:
        """Receive the last exchange if it arrives within two seconds. It never arrives if a rank died before it."""
        deadline = time.monotonic() + 2.0
        while not self._exchange.arrived and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(Exception):
            if self._exchange.arrived:
                self._receive()
            if self._carried is not None:  # the end of a pass: all ranks have already sent their sums
                self._write(self._carried)


def _say(line: str) -> None:
    """Print on stderr, or in a notebook on stdout, because a cell shows stderr as an error."""
    print(line, file=sys.stdout if notebook.in_kernel() else sys.stderr)


def _failed() -> bool:
    """Return whether the program ends with an error. The error's message must be the last output."""
    error = getattr(sys, "last_value", None)
    return error is not None and not isinstance(error, KeyboardInterrupt)
