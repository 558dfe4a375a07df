"""The excepthook: explains an uncaught exception to the user."""

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
    """Install an excepthook that explains errors, and then calls the previous excepthook.

    It removes Paceline's frames from the traceback of a PacelineError. It adds a note to an error in the loop if the
    shard was empty, or too small for batch norm.

    Args:
        latest: returns the loader that yielded last.
        before: called first, with the error.
        better: returns a better error or None. The better error's message is added to the error as a note.
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
    """A note if the current yield explains the error (an empty or small shard); otherwise empty."""
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
