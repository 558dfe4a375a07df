"""What the ranks print: the first rank of each machine straight to the console, every other one into a file.

A rank whose output was asked for (--tee) is shown too, from its file: whole lines, each marked with the rank. A worker
writes to a file and not to a pipe, so that it never waits for the launcher. When the launcher is killed, files in a
directory that was asked for (--output) stay; temporary ones, of which nobody is told then, are removed (processes.py).
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import tempfile
from typing import IO

from paceline.errors import LaunchError, printable
from paceline.launcher import streams
from paceline.notebook import Relay
from paceline.world import SHARED_MEMORY, is_private

LAST_LINES = 20  # of a rank that died without an exception


SAY_SECONDS = 5.0
_reads = True  # did who reads stderr take the last message in time?


def say(text: str, last: bool = False) -> None:
    """Print whole lines on stderr, if that can be written (streams.py), with no control characters of a script's or
    another host's. A rank's progress bar, whose line has no end yet, is wiped away first.

    last: has the run ended? Then this waits for a slow reader, as other programs do.
    """
    global _reads
    terminal = os.environ.get("TERM") not in ("dumb", "unknown", None) and streams.is_terminal(sys.stderr)
    seconds = None if last else SAY_SECONDS if _reads else 0.0
    _reads = streams.write(sys.stderr, "\r\x1b[2K" * terminal + printable(text), seconds)


def _start_remover(folder: str) -> subprocess.Popen[bytes]:
    """A shell that removes a launcher's folder, and what has its name in SHARED_MEMORY, when the launcher dies, at
    whatever moment: while ranks run, what watches them (processes.py) ends first those that may write there."""
    script = 'trap "" USR1; read line && exit; rm -rf -- "$@" 2>/dev/null; sleep 1; rm -rf -- "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "paceline-remover", folder, os.path.join(SHARED_MEMORY, os.path.basename(folder))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _compile_caches() -> list[str]:
    """The folders for compiled code in TMPDIR. torch makes one at the first optimizer, also for a script that compiles
    nothing."""
    return glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "torchinductor_*"))


class Output:
    """The files of one run on this machine.

    Args:
        directory: where to put them; None: a temporary directory, which only a failed run leaves.
        tee: the ranks to show; None: all.
        console: does the first rank write to the launcher's own streams? If not, it is shown from its file.
        silent: show no rank.
    """

    def __init__(
        self, directory: str | None, tee: frozenset[int] | None, console: bool = True, silent: bool = False
    ) -> None:
        self._tee = tee
        self._console, self._silent = console and not silent, silent
        try:
            # a directory for this run alone, with the workers' error files
            self.private = tempfile.mkdtemp(prefix="paceline-")
        except OSError as error:
            raise LaunchError(f"No temporary directory can be made: {error.strerror}. Set TMPDIR to another.") from None
        self.directory = self.private if directory is None else os.path.abspath(directory)  # of the ranks' output
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            os.rmdir(self.private)
            raise LaunchError(
                f"--output {directory}: the directory cannot be made: {error.strerror}. Name one that you may write to."
            ) from None
        # A folder in memory, for `memory` and for what the disk of the private one has no room for (world.py).
        self._spare = os.path.join(SHARED_MEMORY, os.path.basename(self.private))
        self._memory: str | None = None  # what `memory` returns, once it has been asked
        self._remover = _start_remover(self.private)
        self._found = set(_compile_caches())  # before the run
        self._written: set[int] = set()  # ranks that have had a file in this run
        self._shown: dict[int, int] = {}  # rank -> bytes of its file that have been printed
        self._unwritten = b""  # of them, those for which a pipe had no room yet
        self._deaf = False  # can nothing be printed any more?
        self._first: int | None = None
        self.relay: Relay | None = None  # of the picture that rank 0 draws for a notebook

    def memory(self) -> str:
        """A folder in the memory of this machine, removed with the private one; that itself where none can be made."""
        if self._memory is None:
            path = self._spare
            with contextlib.suppress(OSError):
                os.mkdir(path, mode=0o700)
            self._memory = path if is_private(path) else os.path.join(self.private, "memory")
        return self._memory

    def path(self, rank: int) -> str:
        return os.path.join(self.directory, f"rank-{rank}.log")

    def has_file(self, rank: int) -> bool:
        """Does the rank print into a file, and not to the console?"""
        return rank in self._written

    def open(self, rank: int, first: bool) -> IO[bytes] | None:
        """A file for the output of `rank`, which is about to start; None: the console. A restart continues it."""
        if first and self._console:
            return None
        if first:
            self._first = rank
        again = rank in self._written
        try:
            file = open(self.path(rank), "ab" if again else "wb")  # noqa: SIM115  # the caller closes it
        except OSError as error:
            if again:  # a run that was under way goes on without it
                say(f"paceline: {self.path(rank)} cannot be written any more ({error.strerror}).\n")
                return open(os.devnull, "wb")
            raise LaunchError(
                f"The output of rank {rank} cannot be written to {self.path(rank)}: {error.strerror}. Name another "
                "directory with --output."
            ) from None
        self._written.add(rank)
        if not self._silent and (first or self._tee is None or rank in self._tee):
            self._shown.setdefault(rank, 0)
        return file

    def show(self, final: bool = False) -> None:
        """Print what has been written since the last call, in whole lines; with `final`, all of it."""
        for rank, start in self._shown.items():
            if not self._print("", final):
                break
            data = self._read(rank, start)
            whole = data if final else data[: data.rfind(b"\n") + 1]
            if not whole:
                continue
            self._shown[rank] = start + len(whole)
            mark = "" if rank == self._first else f"[rank {rank}] "
            lines = whole.decode(errors="replace").removesuffix("\n").split("\n")
            self._print("".join(f"{mark}{line}\n" for line in lines), final)
        if self.relay is not None:
            self.relay.show()

    def _print(self, text: str, final: bool) -> bool:
        """Print on stdout. Where that is a pipe that has no room now, the rest is printed at the next call. Returns
        whether there is no rest. Unlike stderr, nothing is dropped while somebody reads."""
        stream = sys.stdout
        if self._deaf or stream is None:
            return False
        if stream is not sys.__stdout__:  # a notebook's, or a test's
            return not text or streams.write(stream, text)
        assert stream is not None
        try:
            stream.flush()
            self._unwritten += text.encode(stream.encoding, stream.errors or "strict")
            until = float("inf") if final else 0.0
            self._unwritten = streams.unwritten(stream.fileno(), self._unwritten, until)
        except (OSError, ValueError):  # closed; nobody reads it any more; the disk is full
            self._deaf = True
        return not self._unwritten and not self._deaf

    def _read(self, rank: int, start: int) -> bytes:
        """A rank's file from this byte on; b"" where somebody has removed it."""
        with contextlib.suppress(OSError), open(self.path(rank), "rb") as file:
            file.seek(start)
            return file.read()
        return b""

    def _size(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return os.path.getsize(self.path(rank))
        return 0

    def last_lines(self, rank: int) -> list[str]:
        """The end of what `rank` printed, unless that was shown."""
        if rank not in self._written or rank in self._shown:
            return []
        data = self._read(rank, max(0, self._size(rank) - 100 * LAST_LINES))
        return data.decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self, failed: bool) -> str:
        """Remove what need not be kept. Returns a line that says where the ranks' output is, or ""."""
        self.show(final=True)
        with contextlib.suppress(BrokenPipeError):  # it has been killed
            self._remover.communicate(b"done\n")
        if is_private(self._spare):
            shutil.rmtree(self._spare, ignore_errors=True)
        for path in _compile_caches():
            if path not in self._found:
                with contextlib.suppress(OSError):  # it holds something
                    os.rmdir(path)
        kept = [rank for rank in sorted(self._written) if self._size(rank)]
        if self.directory != self.private or not failed or not kept:
            shutil.rmtree(self.private, ignore_errors=True)
        else:
            for entry in os.scandir(self.private):
                if entry.is_dir(follow_symlinks=False):  # what ranks have left for the next start
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.endswith(".log"):
                    with contextlib.suppress(OSError):
                        os.remove(entry.path)
        if not failed or not kept:
            return ""
        files = os.path.basename(self.path(kept[0])) + (", ..." if len(kept) > 1 else "")
        return f"What the other ranks printed is in {self.directory} ({files}).\n"
