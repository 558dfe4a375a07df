"""What can be found out of how a rank ended, for report.py: from its exit code and the files that it left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from paceline.launcher import process_state
from paceline.launcher.output import Output
from paceline.launcher.report import UNWRITTEN, Ending, Error
from paceline.launcher.stacks import in_collective, place_in_traceback, place_of_crash
from paceline.world import DONE, FAILING, LEFT, LOST_PEER, SAVED, told, was_told

CRASHES = tuple(-signum for signum in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
"""Exit codes of a process that its own native code ended."""
_FULL_BYTES = 64 << 10  # a disk with less to spare counts as full


def read_place(path: str) -> str:
    """Where in the script a rank ended with exit code 0; "" where it did not say. path: of its error file."""
    return told(path, LEFT) or ""


def told_exit_code(path: str) -> int | None:
    """With which exit code, other than 0, the rank is about to end; None where it did not say. path: of its error
    file."""
    return _told(path)[0]


def _told(path: str) -> tuple[int | None, bool]:
    """(the exit code, whether the script has caught an exception that only told of another rank's end)."""
    code, _, why = (told(path, FAILING) or "").partition("\n")
    return (int(code), why == LOST_PEER) if code else (None, False)


def crashed_when_done(path: str, code: int | None) -> bool:
    """Did the rank do all that it had to do, with exit code 0, and crash after that in native code?

    Destructors of libraries run after the last of Python's exit functions, while threads of theirs may still run: torch
    with gloo or OpenBLAS crashes there, rarely. path: of the rank's error file.
    """
    return code in CRASHES and was_told(path, DONE)


def ended_when_saved(path: str, code: int | None) -> bool:
    """Was the rank asked to stop, and ended in some other way than by itself once the checkpoint was on the disk?
    Schedulers send SIGTERM more than once. path: of the rank's error file."""
    return code is not None and code != 0 and was_told(path, SAVED)


def make_ending(
    rank: int,
    code: int | None,
    time: float,
    error: Error | None,
    role: str,
    path: str,
    output: Output,
) -> Ending:
    """The Ending of a rank. path: of its error file. For the rest see Ending."""
    place, collective, unwritable, lost_peer = "", False, "", False
    if code == 0:
        place = read_place(path)
    elif error is not None:
        place = place_in_traceback(error.traceback)
    elif code is not None and code < 0:
        stand = place_of_crash(path)
        if stand is not None:
            place, collective = str(stand), in_collective(stand)
    else:
        unwritable, lost_peer = _why_unwritable(output, rank, code), _told(path) == (code, True)
    return Ending(rank, code, time, error, role, place, collective, unwritable, lost_peer)


def _why_unwritable(output: Output, rank: int, code: int | None) -> str:
    """Why the rank could not print, if that may be why it failed; or else ""."""
    path = output.path(rank)
    if not output.has_file(rank):
        return ""
    try:
        disk = os.statvfs(os.path.dirname(path))
    except OSError:
        return ""
    if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
        return f"The disk is full that takes its output, {path}. Make room, or name another by --output DIR or TMPDIR."
    if code == UNWRITTEN:
        return f"Its output goes to {path}: is there no room, or a quota? --output DIR or TMPDIR name another disk."
    return ""


def stopped_in_words(pids: Mapping[int, int], role: Callable[[int], str]) -> str:
    """A line for each of these ranks that is stopped by a signal: others may have waited for it.

    Args:
        pids: the process of each.
        role: of a rank, what it is for the others; "" where all are alike.
    """
    states = {rank: process_state.read_state(pid) for rank, pid in pids.items()}
    return "".join(
        f"rank {rank}{(what := role(rank)) and f', {what},'} {process_state.describe(pids[rank], state)}\n"
        for rank, state in sorted(states.items())
        if state.stopped
    )
