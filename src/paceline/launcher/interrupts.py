"""Ctrl-C, SIGTERM and their like, while workers run."""

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
_final = False  # does the next signal end the run, whatever it means otherwise?


class Stopped(BaseException):
    """A signal told the launcher to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def report(self) -> int:
        """Print one line about it, and return the exit code that shells use for the signal."""
        what = "interrupted" if self.signum == signal.SIGINT else f"stopped by {signal.Signals(self.signum).name}"
        say(f"paceline: {what}; all ranks have ended.\n")
        return 128 + self.signum


class Interrupts:
    """A context in which signals are collected.

    Before workers run, a signal also raises Stopped at once. Once they run (`deferred`), an exception in the middle of
    starting or ending one could lose it, so that the agent calls `check` instead, some twenty times a second. A signal
    that the caller's shell told us to ignore (nohup and SIGHUP) stays ignored; torch's own handlers would not do that.

    Args:
        stoppable: SIGUSR1 asks the run to save a checkpoint and end (stop_request.py).
        grace: so does SIGTERM while workers run. After this many seconds the run ends. None: SIGTERM ends the run at
            once.
        if_able: SIGTERM asks the run only if its ranks can save now (`consult`), and otherwise ends it at once.
    """

    def __init__(self, *, stoppable: bool = False, grace: float | None = None, if_able: bool = False) -> None:
        self.received: list[int] = []  # the signals so far
        self.deferred = False  # does only `check` raise?
        self.stoppable, self._grace = stoppable, grace
        self._able: Callable[[], bool] = lambda: not if_able
        self._if_able = if_able
        self.asked: int | None = None  # the signal that asked the run to save and end
        self._grace_ends: float | None = None  # when that must be done, by time.monotonic
        self._before: dict[signal.Signals, Any] = {}

    @property
    def notices(self) -> bool:
        """Can SIGTERM ask the run to save a checkpoint and end?"""
        return self._grace is not None

    def consult(self, able: Callable[[], bool]) -> None:
        """able: can the ranks save a checkpoint now?"""
        if self._if_able:
            self._able = able

    @property
    def impatient(self) -> bool:
        """Has the user sent more than one signal?"""
        return len(self.received) > 1

    @property
    def overdue(self) -> bool:
        """Is the time up that SIGTERM gave the run to save a checkpoint?"""
        return self._grace_ends is not None and time.monotonic() > self._grace_ends

    @property
    def breaks_writes_off(self) -> bool:
        """Is the time up that the user gave? Where the user gave none, a checkpoint that is being written may take
        longer: the scheduler knows when it ends that."""
        return self.overdue and not self._if_able

    @property
    def due(self) -> int | None:
        """The signal by which the run must end now: one that has come, if the time that it gave is up."""
        if self.overdue and not self.received:
            self.received.append(signal.SIGTERM)
        return self.received[0] if self.received else None

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
        """Does this SIGTERM ask the run to save, as opposed to ending it?"""
        if self._grace is None or not self.deferred or _final:
            return False
        return self._able() if self._grace_ends is None else not self.overdue

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for signum in (*_HANDLED, signal.SIGUSR1) if self.stoppable else _HANDLED:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            # A request to stop that comes when all is done must not kill the launcher, whose exit code would then say
            # that it is not. (Not SIG_IGN, which processes started later would inherit.)
            signal.signal(signum, _too_late if signum == signal.SIGUSR1 else handler)


def _too_late(signum: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


def end(signum: int) -> None:
    """End the run of this process by a signal, from any thread. SIGTERM is then no request to save a checkpoint."""
    global _final
    _final = True
    os.kill(os.getpid(), signum)
