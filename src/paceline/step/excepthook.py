"""The excepthook: what a user sees of an uncaught exception."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from paceline.data.loader import Loader
from paceline.errors import PacelineError
from paceline.step.messages import DROP_LAST, ONE_VALUE, empty_message, one_value_message

_PACKAGE = __name__.partition(".")[0]


def explain_uncaught(
    latest: Callable[[], Loader | None],
    before: Callable[[BaseException], None],
    better: Callable[[BaseException], Exception | None],
) -> None:
    """Install an excepthook that calls the one before it. before: is called first, with the error. better: returns a
    better error, whose message is added to this one; None: there is none.

    It shows a PacelineError without frames from inside Paceline. It adds a note to an error in the loop where the shard
    was empty, or too small for batch norm. latest: returns the loader that yielded last.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(error)
        if isinstance(error, PacelineError):
            trace = _without_package(trace)
            error.__traceback__, error.__cause__, error.__suppress_context__ = trace, None, True
        note = _note(error, latest()) or str(better(error) or "")
        noted = note and hasattr(error, "add_note")  # Python 3.11
        if noted:
            error.add_note(f"paceline: {note}")
        previous(kind, error, trace)
        if note and not noted:
            print(f"paceline: {note}", file=sys.stderr)

    sys.excepthook = hook


def _note(error: BaseException, loader: Loader | None) -> str:
    """What the current yield has to do with the error. Empty where nothing is known."""
    if isinstance(error, (PacelineError, KeyboardInterrupt)) or loader is None:
        return ""
    request, at = loader.current, loader.loop_exit
    if request is None and at is not None:
        lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        request = at.request if (at.code, at.line) in lines else None
    if request is None:
        return ""
    if ONE_VALUE in str(error):
        return "" if DROP_LAST in str(error) else one_value_message(request.examples, request.total)
    return empty_message(error, request.total) if request.examples == 0 else ""


def _without_package(trace: TracebackType | None) -> TracebackType | None:
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
