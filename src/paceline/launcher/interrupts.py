"""Ctrl-C, SIGTERM and their like, while workers run."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Stopped(BaseException):
    """A signal told the launcher to stop. Not an Exception: nothing on the way may swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def report(self) -> int:
        """Print one line about it, and return the exit code that shells use for the signal."""
        what = "interrupted" if self.signum == signal.SIGINT else f"stopped by {signal.Signals(self.signum).name}"
        print(f"paceline: {what}; all ranks have ended.", file=sys.stderr, flush=True)
        return 128 + self.signum


class Interrupts:
    """A context in which signals are collected.

    Before workers run, a signal also raises Stopped at once. Once they run (`deferred`), an exception in the middle of
    starting or ending one could lose it, so that the agent calls `check` instead, some twenty times a second. A signal
    that the caller's shell told us to ignore (nohup and SIGHUP) stays ignored; torch's own handlers would not do that.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # the signals so far
        self.deferred = False  # does only `check` raise?
        self._before: dict[signal.Signals, Any] = {}

    @property
    def impatient(self) -> bool:
        """Has the user sent more than one signal?"""
        return len(self.received) > 1

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self.received:
            raise Stopped(self.received[0])

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)
        if not self.deferred:
            raise Stopped(signum)

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for signum in _HANDLED:
                if signal.getsignal(signum) not in (signal.SIG_IGN, None):  # None: a handler that is not Python's
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
