"""The progress display of rank 0 on stderr: a bar on a terminal, else plain lines. See also notebook_display.py.

The script's thread draws the display when a loader yields, at most twice a second. A separate thread could take the GIL
from the step at any moment, and could hold locks when a data worker is forked.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import IO, Any, Protocol

import psutil
import torch

from paceline.data.loader import Loader
from paceline.monitor.summary import Totals, amount, duration, number
from paceline.monitor.window import means

BAR_SECONDS = 0.5
LINE_SECONDS = 10.0
EPOCH_SECONDS = 1.0  # least time between the lines of two epochs, after MANY_EPOCHS lines
MANY_EPOCHS = 20


class View:
    """The values to show."""

    def __init__(self) -> None:
        self.epoch = 0  # from 0
        self.epochs: int | None = None  # argument of `run.epochs`; None outside of it
        self.loader: Loader | None = None  # the training loader during its pass
        self.evaluation: Loader | None = None  # the evaluation loader during its pass
        self.updates = 0  # of the first optimizer, at the last received exchange
        self.loss: float | None = None  # the last global mean
        # (updates, last global mean), in order; a display with a curve removes them
        self.losses: deque[tuple[int, float]] = deque(maxlen=64)
        self.learning_rate: Any = None  # of the first optimizer
        self.values: dict[str, float] = {}  # last global means of logged values
        self.epoch_sums: dict[str, list[float]] = {}  # key -> [sum, weight] over all ranks, since the epoch began
        self.steps: int | None = None  # per epoch, if known
        self._ended_at = 0  # number of global batches of the last pass
        self.first_step = 0  # the step at the start of the pass; not 0 if a restored run continues in mid-epoch
        self.began = 0.0  # start of the pass

    def begin_epoch(self, loader: Loader, now: float) -> None:
        if self.epochs is None:
            self.epoch = loader.epoch
        self.loader, self.began, self.first_step = loader, now, loader.step
        self.epoch_sums.clear()
        try:
            self.steps = loader.steps
        except TypeError:  # the length of the data is not known
            self.steps = None

    def end_epoch(self, left_at: int | None) -> None:
        """Record the end of a pass.

        Args:
            left_at: the step where the script left the pass early; None: the pass was complete.
        """
        self._ended_at = self.steps or 0 if left_at is None else left_at
        self.loader = None

    @property
    def step(self) -> int:
        """The number of finished global batches of this epoch."""
        return self.loader.step if self.loader is not None else self._ended_at

    def name(self) -> str:
        return f"epoch {self.epoch + 1}{f'/{self.epochs}' if self.epochs else ''}"

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds to the end of all epochs, or of this epoch if their number is unknown."""
        done = self.step - self.first_step
        if self.steps is None or done <= 0:
            return None
        left = self.steps - self.step + (self.steps * (self.epochs - self.epoch - 1) if self.epochs else 0)
        return left * (now - self.began) / done


class Display(Protocol):
    """A bar or lines."""

    due: float  # time of the next `refresh`, by time.perf_counter

    def refresh(self, now: float) -> None: ...

    def epoch_ended(self, now: float) -> None: ...

    def logged(self, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Writer:
    """Formats the texts of all displays."""

    def __init__(self, view: View, totals: Totals, device: torch.device) -> None:
        self.view, self._totals, self._device = view, totals, device
        self._process = psutil.Process()
        self._epochs = 0  # number of shown lines about epochs
        self._epoch_at = 0.0  # time of the last of these lines
        self._held_back: str | None = None  # the line about the last epoch, if not yet shown

    def position(self) -> str:
        view = self.view
        if view.evaluation is not None:
            loader = view.evaluation
            return f"{view.name()}  evaluating {loader.step + 1}{_of(loader)}"
        return f"{view.name()}  step {view.step}{f'/{view.steps}' if view.steps else ''}"

    def fraction(self) -> float | None:
        view = self.view
        return min(view.step / view.steps, 1.0) if view.steps else None

    def numbers(self, now: float, memory: bool) -> list[str]:
        """Format loss, logged values, learning rate, speed, time left and memory."""
        view = self.view
        parts = [f"loss {number(view.loss)}"] if view.loss is not None else []
        parts += [f"{key} {number(value)}" for key, value in view.values.items()]
        if view.learning_rate is not None:
            parts.append(f"lr {number(float(view.learning_rate))}")
        rate = self._totals.rate()
        if rate is not None:
            parts.append(f"{amount(rate)} examples/s")
        left = view.seconds_left(now)
        if left is not None and left >= 1:
            parts.append(f"eta {duration(left)}")
        return [*parts, self._memory()] if memory else parts

    def epoch(self, now: float) -> str | None:
        """Return the line about the epoch that has ended. With many short epochs, return None for most of them."""
        self._held_back = self._epoch(now)
        if self._epochs >= MANY_EPOCHS and now - self._epoch_at < EPOCH_SECONDS:
            return None
        self._epochs, self._epoch_at = self._epochs + 1, now
        return self.last_epoch()

    def last_epoch(self) -> str | None:
        """Return the line about the last epoch if it has not been shown, else None."""
        text, self._held_back = self._held_back, None
        return text

    def _epoch(self, now: float) -> str:
        view = self.view
        loss, values = means(view.epoch_sums)
        known = values if loss is None else {"loss": loss, **values}
        parts = [view.name(), *(f"{key} {number(value)}" for key, value in known.items())]
        return "  ".join([*parts, duration(now - view.began)])

    def logged(self, values: Mapping[str, float]) -> str:
        return "  ".join([self.view.name(), *(f"{key} {number(value)}" for key, value in values.items())])

    def _memory(self) -> str:
        """Format the accelerator's peak memory, or on a CPU the process's current memory."""
        if self._device.type == "cpu":
            return f"{self._process.memory_info().rss / 2**30:.1f} GiB"
        module = torch.get_device_module(self._device)
        most = getattr(module, "max_memory_allocated", None)
        return f"{most(self._device) / 2**30:.1f} GiB" if most is not None else ""


def _of(loader: Loader) -> str:
    try:
        return f"/{loader.steps}"
    except TypeError:
        return ""


class Lines:
    """A line every ten seconds, and at the end of each epoch."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.due = time.perf_counter() + LINE_SECONDS

    def refresh(self, now: float) -> None:
        self.due = now + LINE_SECONDS
        self._print("  ".join([self._writer.position(), *self._writer.numbers(now, memory=False)]))

    def epoch_ended(self, now: float) -> None:
        self.due = now + LINE_SECONDS
        self._print(self._writer.epoch(now))

    def logged(self, values: Mapping[str, float]) -> None:
        self._print(self._writer.logged(values))

    def close(self) -> None:
        self._print(self._writer.last_epoch())

    def _print(self, line: str | None) -> None:
        if line is not None:
            print(line, file=sys.stderr, flush=True)


class Bar:
    """One line that rich redraws. Other lines appear above it.

    The cursor is never hidden, so a killed process leaves the terminal intact.
    """

    WIDTH = 20

    def __init__(self, writer: Writer) -> None:
        from rich.console import Console
        from rich.live import Live

        class Visible(Console):
            def show_cursor(self, show: bool = True) -> bool:
                return False

        self._writer = writer
        self.due = 0.0
        stderr: IO[str] = sys.stderr
        self._console = Visible(file=stderr, force_terminal=True)
        # If stdout is a file or a pipe, it is not redirected.
        both = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=both)
        self._pid = os.getpid()
        self._live.start()
        _plain_in_children()

    def refresh(self, now: float) -> None:
        from rich.text import Text

        self.due = now + BAR_SECONDS
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(self._writer.position())
        fraction = self._writer.fraction()
        if fraction is not None:
            full = round(fraction * self.WIDTH)
            line.append("  ")
            line.append("━" * full, "green")
            line.append("━" * (self.WIDTH - full), "bright_black")
        line.append("  " + "  ".join(self._writer.numbers(now, memory=True)))
        self._live.update(line, refresh=True)

    def epoch_ended(self, now: float) -> None:
        self._above(self._writer.epoch(now))
        self.due = 0.0

    def logged(self, values: Mapping[str, float]) -> None:
        self._above(self._writer.logged(values))

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._above(self._writer.last_epoch())
            self._live.stop()

    def _above(self, line: str | None) -> None:
        if line is not None:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@functools.cache
def _plain_in_children() -> None:
    """Let forked data workers print straight to the terminal, because they draw no bar."""
    from rich.file_proxy import FileProxy

    def restore() -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if isinstance(stream, FileProxy):
                setattr(sys, name, stream.rich_proxied_file)

    os.register_at_fork(after_in_child=restore)
