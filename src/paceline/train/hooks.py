"""What a user sees of an exception that nobody caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

from paceline.errors import PacelineError
from paceline.train.loader import Loader
from paceline.train.messages import empty_message

_PACKAGE = __name__.partition(".")[0]


def explain_uncaught(latest: Callable[[], Loader | None]) -> None:
    """From now on a PacelineError that nobody caught is shown without frames from inside Paceline, and an error in the
    loop over an empty shard is explained. The hook that was there is called as ever."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, PacelineError):
            trace = without_package(trace)
            error.__traceback__, error.__cause__, error.__suppress_context__ = trace, None, True
        previous(kind, error, trace)
        loader = latest()
        empty = loader is not None and loader.current is not None and loader.examples == 0
        if empty and not isinstance(error, (PacelineError, KeyboardInterrupt)):
            print(f"paceline: {empty_message(error)}", file=sys.stderr)

    sys.excepthook = hook


def without_package(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without its frames from inside Paceline."""
    frames = []
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            frames.append(trace)
        trace = trace.tb_next
    rebuilt = None
    for frame in reversed(frames):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt
