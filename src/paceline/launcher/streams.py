"""Survive standard streams that are closed, full, or pipes without a reader. Does not import torch.

1. A stream that was closed when the process started (`paceline run ... >&-`) is opened on os.devnull. Otherwise the
   next opened file would get the stream's number, and the ranks' output would be written to that file.
2. A launcher message that cannot be written is dropped. The launcher never waits long for a reader, because while it
   waits it cannot react to failed ranks and signals.
3. If the disk is full, a rank's output to a file of the launcher is dropped.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
import time
from typing import Any, TextIO

_PIPE_BYTES = 4096  # a writable pipe accepts at least this number of bytes (PIPE_BUF)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def reopen_closed() -> None:
    """Open stdin, stdout and stderr on os.devnull, if they are closed."""
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
    """Write to a stream and flush it. Return whether everything was written.

    Args:
        seconds: the time limit for a slow reader; None: no limit.
    """
    if stream is None:
        return False
    try:
        if seconds is None or not any(stream is own for own in (sys.__stdout__, sys.__stderr__)):  # e.g. a notebook's
            stream.write(text)
            stream.flush()
            return True
        stream.flush()
        data = text.encode(stream.encoding, stream.errors or "strict")
        return not unwritten(stream.fileno(), data, time.monotonic() + seconds)
    except (OSError, ValueError):  # closed, no reader, or the disk is full
        return False


def unwritten(number: int, data: bytes, deadline: float) -> bytes:
    """Write to a descriptor without blocking, until the deadline. Return the unwritten data. Raises OSError.

    If possible, a write ends at a line end. Otherwise rank 0, which writes to the same pipe, could split a line.
    """
    while data and select.select([], [number], [], min(3600.0, max(0.0, deadline - time.monotonic())))[1]:
        end = data.rfind(b"\n", 0, _PIPE_BYTES) + 1 or _PIPE_BYTES
        data = data[os.write(number, data[:end]) :]
    return data


class _Log(io.FileIO):
    """A file that drops data when the disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def drop_output_on_full_disk(folder: str) -> None:
    """Make sys.stdout and sys.stderr drop data when the disk is full, if they are files in this folder (Linux)."""
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
