"""Determine how a rank ended, from its exit code and the files that it wrote. report.py writes the report."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from paceline.launcher import process_state
from paceline.launcher.output import Output
from paceline.launcher.report import UNWRITTEN, Ending, Error
from paceline.launcher.stacks import in_collective, place_in_traceback, place_of_crash
from paceline.world import DONE, FAILING, LEFT, LOST_PEER, SAVED, read_message, was_sent

CRASHES = tuple(-signum for signum in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
"""Exit codes of a process that crashed in native code."""
_FULL_BYTES = 64 << 10  # a disk with less free space counts as full


def read_place(path: str) -> str:
    """Return the script's line at which a rank ended with exit code 0, or "" if the rank did not report it.

    Args:
        path: the rank's error file.
    """
    return read_message(path, LEFT) or ""


def reported_exit_code(path: str) -> int | None:
    """Return the nonzero exit code that a rank has announced, or None.

    Args:
        path: the rank's error file.
    """
    return _reported(path)[0]


def _reported(path: str) -> tuple[int | None, bool]:
    """Return the announced exit code, and whether the script was then handling an error about a lost rank."""
    code, _, why = (read_message(path, FAILING) or "").partition("\n")
    return (int(code), why == LOST_PEER) if code else (None, False)


def crashed_when_done(path: str, code: int | None) -> bool:
    """Return whether the rank finished with exit code 0 and crashed afterwards in native code.

    Libraries' destructors run after Python's last exit function, while the libraries' threads may still run. In rare
    cases, torch with gloo or OpenBLAS crashes in a destructor.

    Args:
        path: the rank's error file.
    """
    return code in CRASHES and was_sent(path, DONE)


def ended_when_saved(path: str, code: int | None) -> bool:
    """Return whether the rank saved its checkpoint after a request to stop, and was then killed before it exited.

    Schedulers send SIGTERM more than once.

    Args:
        path: the rank's error file.
    """
    return code is not None and code != 0 and was_sent(path, SAVED)


def make_ending(
    rank: int,
    code: int | None,
    time: float,
    error: Error | None,
    role: str,
    path: str,
    output: Output,
) -> Ending:
    """Build the Ending of a rank. `path` is its error file; `rank` to `role` become attributes of the Ending."""
    place, collective, unwritable, lost_peer = "", False, "", False
    if code == 0:
        place = read_place(path)
    elif error is not None:
        place = place_in_traceback(error.traceback)
    elif code is not None and code < 0:
        sample = place_of_crash(path)
        if sample is not None:
            place, collective = str(sample), in_collective(sample)
    else:
        unwritable, lost_peer = _why_unwritable(output, rank, code), _reported(path) == (code, True)
    return Ending(rank, code, time, error, role, place, collective, unwritable, lost_peer)


def _why_unwritable(output: Output, rank: int, code: int | None) -> str:
    """Return why the rank's output could not be written, if that may have caused its failure, else ""."""
    path = output.path(rank)
    if not output.has_file(rank):
        return ""
    try:
        disk = os.statvfs(os.path.dirname(path))
    except OSError:
        return ""
    if disk.f_bavail * disk.f_frsize < _FULL_BYTES:
        return f"Its output goes to {path}, and that disk is full. Free space, or set --output DIR or TMPDIR."
    if code == UNWRITTEN:
        return f"Its output goes to {path}. The disk may be full, or a quota used up. Set --output DIR or TMPDIR."
    return ""


def stopped_in_words(pids: Mapping[int, int], role: Callable[[int], str]) -> str:
    """Return a line for each rank that is stopped by a signal, because other ranks may have waited for it.

    Args:
        pids: rank -> process id.
        role: rank -> role, such as "a parameter server"; "" if all ranks have the same role.
    """
    states = {rank: process_state.read_state(pid) for rank, pid in pids.items()}
    return "".join(
        f"rank {rank}{(what := role(rank)) and f', {what},'} {process_state.describe(pids[rank], state)}\n"
        for rank, state in sorted(states.items())
        if state.stopped
    )
