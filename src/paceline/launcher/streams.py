"""The standard streams, which may be closed, full, or a pipe that nobody reads. None of that ends a run. No torch.

1. A stream that was closed when the process began (`paceline run ... >&-`) becomes os.devnull: otherwise the next file
   that is opened would get its number, and what the ranks print would land in it.
2. A message of the launcher's that cannot be written is dropped. The launcher never waits long for a reader, since it
   would not see meanwhile that a rank fails, or that a signal comes.
3. What a rank prints into a file of the launcher's own is dropped where the disk is full.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import time
from typing import Any, TextIO

_PIPE_BYTES = 4096  # a pipe that takes any bytes takes these (PIPE_BUF)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def reopen_closed() -> None:
    """Open each of the three streams that is closed, on os.devnull."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(handle, number)
                os.close(handle)
        if getattr(sys, name) is None:
            errors = "backslashreplace" if name == "stderr" else None
            stream = open(number, "w" if number else "r", errors=errors, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def write(stream: TextIO | None, text: str, seconds: float | None = None) -> bool:
    """Write to a stream now, and return whether all of it was written.

    seconds: how long to wait for who reads it; None: without end.
    """
    if stream is None:
        return False
    try:
        if seconds is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):  # a notebook's, too
            stream.write(text)
            stream.flush()
            return True
        stream.flush()
        data = text.encode(stream.encoding, stream.errors or "strict")
        return not unwritten(stream.fileno(), data, time.monotonic() + seconds)
    except (OSError, ValueError):  # closed; nobody reads it any more; the disk is full
        return False


def unwritten(number: int, data: bytes, deadline: float) -> bytes:
    """Write to a descriptor, without blocking and until the deadline. Returns what is left. Raises OSError."""
    while data and select.select([], [number], [], min(3600.0, max(0.0, deadline - time.monotonic())))[1]:
        data = data[os.write(number, data[:_PIPE_BYTES]) :]
    return data


class _Log(io.FileIO):
    """A file from which nobody needs all: what the disk has no room for is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def drop_what_has_no_room(folder: str) -> None:
    """Have sys.stdout and sys.stderr drop what cannot be written, where they are files in this folder (on Linux)."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        try:
            inside = os.path.dirname(os.readlink(f"/proc/self/fd/{number}")) == os.path.realpath(folder)
        except OSError:
            continue
        if inside:
            former = getattr(sys, name)
            log = io.BufferedWriter(_Log(number, "w", closefd=False))
            stream = io.TextIOWrapper(log, former.encoding, former.errors, line_buffering=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
