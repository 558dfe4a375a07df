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
from paceline.notebook import Relay

SHARED_MEMORY = "/dev/shm"  # where Linux has memory as files
LAST_LINES = 20  # of a rank that died without an exception


def say(text: str) -> None:
    """Print whole lines on stderr, with no control characters of a script's or another host's. A rank's progress bar,
    whose line has no end yet, is wiped away first."""
    terminal = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown", None)
    print("\r\x1b[2K" * terminal + printable(text), end="", file=sys.stderr, flush=True)


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
        self._memory: str | None = None  # a folder in memory; None: nobody has asked for it
        self._remover = _start_remover(self.private)
        self._found = set(_compile_caches())  # before the run
        self._written: set[int] = set()  # ranks that have had a file in this run
        self._shown: dict[int, int] = {}  # rank -> bytes of its file that have been printed
        self._first: int | None = None
        self.relay: Relay | None = None  # of the picture that rank 0 draws for a notebook

    def memory(self) -> str:
        """A folder in the memory of this machine, removed with the private one; that itself where none can be made."""
        if self._memory is None:
            path = os.path.join(SHARED_MEMORY, os.path.basename(self.private))
            try:
                os.mkdir(path, mode=0o700)  # fails where another user has one of that name
            except OSError:
                path = os.path.join(self.private, "memory")
            self._memory = path
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
        try:
            file = open(self.path(rank), "ab" if rank in self._written else "wb")  # noqa: SIM115  # the caller closes it
        except OSError as error:
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
            with open(self.path(rank), "rb") as file:
                file.seek(start)
                data = file.read()
            whole = data if final else data[: data.rfind(b"\n") + 1]
            if not whole:
                continue
            self._shown[rank] = start + len(whole)
            mark = "" if rank == self._first else f"[rank {rank}] "
            for line in whole.decode(errors="replace").removesuffix("\n").split("\n"):
                sys.stdout.write(f"{mark}{line}\n")
            sys.stdout.flush()
        if self.relay is not None:
            self.relay.show()

    def last_lines(self, rank: int) -> list[str]:
        """The end of what `rank` printed, unless that was shown."""
        if rank not in self._written or rank in self._shown:
            return []
        with open(self.path(rank), "rb") as file:
            file.seek(max(0, os.path.getsize(self.path(rank)) - 100 * LAST_LINES))
            return file.read(100 * LAST_LINES).decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self, failed: bool) -> str:
        """Remove what need not be kept. Returns a line that says where the ranks' output is, or ""."""
        self.show(final=True)
        with contextlib.suppress(BrokenPipeError):  # it has been killed
            self._remover.communicate(b"done\n")
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        for path in _compile_caches():
            if path not in self._found:
                with contextlib.suppress(OSError):  # it holds something
                    os.rmdir(path)
        kept = [rank for rank in sorted(self._written) if os.path.getsize(self.path(rank))]
        if self.directory != self.private or not failed or not kept:
            shutil.rmtree(self.private, ignore_errors=True)
        else:
            for entry in os.scandir(self.private):
                if entry.is_dir(follow_symlinks=False):  # what ranks have left for the next start
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.endswith(".log"):
                    os.remove(entry.path)
        if not failed or not kept:
            return ""
        files = os.path.basename(self.path(kept[0])) + (", ..." if len(kept) > 1 else "")
        return f"What the other ranks printed is in {self.directory} ({files}).\n"
