"""Handle Ctrl-C, SIGTERM and similar signals in the launcher."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from paceline.launcher.output import say

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_final = False  # whether the next SIGTERM ends the run at once, without asking for a checkpoint


class Stopped(BaseException):
    """A signal stopped the launcher. Not an Exception, so that no `except Exception` swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def report(self) -> int:
        """Print one line, and return the exit code that shells use for the signal."""
        what = "interrupted" if self.signum == signal.SIGINT else f"stopped by {signal.Signals(self.signum).name}"
        say(f"paceline: {what}; all ranks have ended.\n")
        return 128 + self.signum


class Interrupts:
    """A context that collects signals.

    Before workers run, a signal also raises Stopped at once. Once workers run (`deferred`), an exception while a worker
    is being started or ended could lose that worker. So the agent calls `check`, about twenty times a second.

    A signal that was ignored when the launcher started, such as SIGHUP under nohup, stays ignored. torch's handlers
    would not respect that.

    Args:
        stoppable: SIGUSR1 asks the run to save a checkpoint and end (stop_request.py).
        grace: while workers run, SIGTERM asks the run to save a checkpoint and end, and ends it after this number of
            seconds. None: SIGTERM ends the run at once.
        if_able: SIGTERM asks for a checkpoint only if the ranks can save one now (`consult`). Otherwise it ends the run
            at once.
    """

    def __init__(self, *, stoppable: bool = False, grace: float | None = None, if_able: bool = False) -> None:
        self.received: list[int] = []  # the signals so far
        self.deferred = False  # whether only `check` raises
        self.stoppable, self._grace = stoppable, grace
        self._able: Callable[[], bool] = lambda: not if_able
        self._if_able = if_able
        self.asked: int | None = None  # the signal that asked the run to save and end
        self._grace_ends: float | None = None  # the end of the grace period, by time.monotonic
        self._before: dict[signal.Signals, Any] = {}

    @property
    def notices(self) -> bool:
        """Whether SIGTERM can ask the run to save a checkpoint and end."""
        return self._grace is not None

    def consult(self, able: Callable[[], bool]) -> None:
        """Set the function that returns whether the ranks can save a checkpoint now. Used with `if_able`."""
        if self._if_able:
            self._able = able

    @property
    def impatient(self) -> bool:
        """Whether the user has sent more than one signal."""
        return len(self.received) > 1

    @property
    def overdue(self) -> bool:
        """Whether the grace period after SIGTERM is over."""
        return self._grace_ends is not None and time.monotonic() > self._grace_ends

    @property
    def breaks_writes_off(self) -> bool:
        """Whether to abort a checkpoint that is being written, because the user's grace period is over.

        If the user set no grace period, the write may continue until the scheduler kills the run.
        """
        return self.overdue and not self._if_able

    @property
    def due(self) -> int | None:
        """The signal that requires the run to end now, or None. SIGTERM counts after its grace period."""
        if self.overdue and not self.received:
            self.received.append(signal.SIGTERM)
        return self.received[0] if self.received else None

    def beside(self) -> Interrupts:
        """Interrupts for another run at the same time, in another thread. They see the signals that this one gets."""
        other = Interrupts()
        other.received = self.received
        return other

    def check(self) -> None:
        """Raise Stopped if the run must end now."""
        if (signum := self.due) is not None:
            raise Stopped(signum)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1 or (signum == signal.SIGTERM and self._is_notice()):
            self.asked = self.asked or signum
            if signum == signal.SIGTERM and self._grace_ends is None:  # schedulers send it more than once
                self._grace_ends = time.monotonic() + (self._grace or 0.0)
            return
        self.received.append(signum)
        if not self.deferred:
            raise Stopped(signum)

    def _is_notice(self) -> bool:
        """Return whether this SIGTERM asks the run to save a checkpoint, instead of ending it at once."""
        if self._grace is None or not self.deferred or _final:
            return False
        return self._able() if self._grace_ends is None else not self.overdue

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # only it can set handlers
            for signum in (*_HANDLED, signal.SIGUSR1) if self.stoppable else _HANDLED:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a handler not installed by Python
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            # A request to stop that arrives after the run has finished must not kill the launcher: its exit code would
            # report a failure. (SIG_IGN is not used, because later child processes would inherit it.)
            signal.signal(signum, _too_late if signum == signal.SIGUSR1 else handler)


def _too_late(signum: int, frame: FrameType | None) -> None:
    """Do nothing (a signal handler)."""


def end(signum: int) -> None:
    """End the run of this process with a signal, from any thread. Even SIGTERM does not ask for a checkpoint."""
    global _final
    _final = True
    os.kill(os.getpid(), signum)
