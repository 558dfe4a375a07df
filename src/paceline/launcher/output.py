"""The ranks' output. The first rank of each machine prints to the console; every other rank prints to a file.

The launcher also shows the ranks that --tee selects: it reads their files, and prints whole lines, each marked with the
rank. Workers write to files instead of pipes, so they never wait for the launcher. If the launcher is killed, files in
--output stay, and temporary files are removed (processes.py).
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

LAST_LINES = 20  # lines of output to show for a rank that died without an exception


SAY_SECONDS = 5.0
_reads = True  # whether the reader of stderr accepted the last message in time


def say(text: str, last: bool = False) -> None:
    """Print whole lines on stderr, without control characters from scripts or other hosts.

    A line is dropped if stderr's reader is too slow (streams.py). On a terminal, an unfinished line, such as a rank's
    progress bar, is erased first.

    Args:
        last: the run has ended, so wait for a slow reader as other programs do.
    """
    global _reads
    terminal = os.environ.get("TERM") not in ("dumb", "unknown", None) and streams.is_terminal(sys.stderr)
    seconds = None if last else SAY_SECONDS if _reads else 0.0
    _reads = streams.write(sys.stderr, "\r\x1b[2K" * terminal + printable(text), seconds)


def _start_remover(folder: str) -> subprocess.Popen[bytes]:
    """Start a shell that removes `folder`, and the folder of that name in SHARED_MEMORY, if the launcher dies.

    While ranks run, their watcher (processes.py) first ends the processes that may write to these folders.
    """
    script = 'trap "" USR1; read line && exit; rm -rf -- "$@" 2>/dev/null; sleep 1; rm -rf -- "$@"'
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "paceline-remover", folder, os.path.join(SHARED_MEMORY, os.path.basename(folder))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _compile_caches() -> list[str]:
    """List TMPDIR's folders for compiled code. Even without compiling, torch creates one with the first optimizer."""
    return glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), "torchinductor_*"))


class Output:
    """The files of one run on this machine.

    Args:
        directory: the directory for the files. None: a temporary directory, which is kept only if the run fails.
        tee: the ranks to show; None: all.
        console: whether the first rank writes to the launcher's streams. If not, the launcher shows its file.
        silent: show no rank.
    """

    def __init__(
        self, directory: str | None, tee: frozenset[int] | None, console: bool = True, silent: bool = False
    ) -> None:
        self._tee = tee
        self._console, self._silent = console and not silent, silent
        try:
            # a directory for this run only; it also holds the workers' error files
            self.private = tempfile.mkdtemp(prefix="paceline-")
        except OSError as error:
            raise LaunchError(
                f"Cannot create a temporary directory: {error.strerror}. Set TMPDIR to another directory."
            ) from None
        self.directory = self.private if directory is None else os.path.abspath(directory)  # of the ranks' output
        try:
            os.makedirs(self.directory, exist_ok=True)
        except OSError as error:
            os.rmdir(self.private)
            raise LaunchError(
                f"--output {directory}: cannot create the directory: {error.strerror}. Give a directory that you can "
                "write to."
            ) from None
        # A folder in shared memory: for `memory`, and for the ranks' messages if the private folder's disk is full.
        self._spare = os.path.join(SHARED_MEMORY, os.path.basename(self.private))
        self._memory: str | None = None  # the result of `memory`, after its first call
        self._remover = _start_remover(self.private)
        self._found = set(_compile_caches())  # before the run
        self._written: set[int] = set()  # ranks that had an output file in this run
        self._shown: dict[int, int] = {}  # rank -> number of bytes of its file that have been printed
        self._unwritten = b""  # printed bytes that a full pipe has not accepted yet
        self._deaf = False  # whether printing has failed for good
        self._first: int | None = None
        self.relay: Relay | None = None  # shows rank 0's progress display in a notebook

    def memory(self) -> str:
        """Return a folder in shared memory. If it cannot be created, return a folder in the private folder.

        The returned folder is removed with the private folder.
        """
        if self._memory is None:
            path = self._spare
            with contextlib.suppress(OSError):
                os.mkdir(path, mode=0o700)
            self._memory = path if is_private(path) else os.path.join(self.private, "memory")
        return self._memory

    def path(self, rank: int) -> str:
        return os.path.join(self.directory, f"rank-{rank}.log")

    def has_file(self, rank: int) -> bool:
        """Return whether the rank prints to a file, not to the console."""
        return rank in self._written

    def open(self, rank: int, first: bool) -> IO[bytes] | None:
        """Open the output file of `rank`, which is about to start. Return None if the rank writes to the console.

        After a restart, the file is appended to.
        """
        if first and self._console:
            return None
        if first:
            self._first = rank
        again = rank in self._written
        try:
            file = open(self.path(rank), "ab" if again else "wb")  # noqa: SIM115  # the caller closes it
        except OSError as error:
            if again:  # the run continues without this output
                say(f"paceline: cannot write to {self.path(rank)} any more ({error.strerror}).\n")
                return open(os.devnull, "wb")
            raise LaunchError(
                f"Cannot write the output of rank {rank} to {self.path(rank)}: {error.strerror}. Set another directory "
                "with --output."
            ) from None
        self._written.add(rank)
        if not self._silent and (first or self._tee is None or rank in self._tee):
            self._shown.setdefault(rank, 0)
        return file

    def show(self, final: bool = False) -> None:
        """Print the new whole lines of the shown ranks. With `final`, print incomplete lines too."""
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
        """Print on stdout, and return whether everything was printed.

        If stdout is a full pipe, the next call prints the remaining text. Unlike `say`, this drops nothing while the
        pipe has a reader.
        """
        stream = sys.stdout
        if self._deaf or stream is None:
            return False
        if stream is not sys.__stdout__:  # replaced, for example by a notebook
            return not text or streams.write(stream, text)
        assert stream is not None
        try:
            stream.flush()
            self._unwritten += text.encode(stream.encoding, stream.errors or "strict")
            until = float("inf") if final else 0.0
            self._unwritten = streams.unwritten(stream.fileno(), self._unwritten, until)
        except (OSError, ValueError):  # closed, no reader, or the disk is full
            self._deaf = True
        return not self._unwritten and not self._deaf

    def _read(self, rank: int, start: int) -> bytes:
        """Return the content of a rank's file from byte `start` on; b"" if the file was removed."""
        with contextlib.suppress(OSError), open(self.path(rank), "rb") as file:
            file.seek(start)
            return file.read()
        return b""

    def _size(self, rank: int) -> int:
        with contextlib.suppress(OSError):
            return os.path.getsize(self.path(rank))
        return 0

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines of the rank's output, or [] if the launcher has shown its output."""
        if rank not in self._written or rank in self._shown:
            return []
        data = self._read(rank, max(0, self._size(rank) - 100 * LAST_LINES))
        return data.decode(errors="replace").splitlines()[-LAST_LINES:]

    def close(self, failed: bool) -> str:
        """Remove temporary files. Return "", or after a failure a line with the location of the ranks' output."""
        self.show(final=True)
        with contextlib.suppress(BrokenPipeError):  # the remover was killed
            self._remover.communicate(b"done\n")
        if is_private(self._spare):
            shutil.rmtree(self._spare, ignore_errors=True)
        for path in _compile_caches():
            if path not in self._found:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(path)
        kept = [rank for rank in sorted(self._written) if self._size(rank)]
        if self.directory != self.private or not failed or not kept:
            shutil.rmtree(self.private, ignore_errors=True)
        else:
            for entry in os.scandir(self.private):
                if entry.is_dir(follow_symlinks=False):  # the ranks' state for a restart
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.endswith(".log"):
                    with contextlib.suppress(OSError):
                        os.remove(entry.path)
        if not failed or not kept:
            return ""
        files = os.path.basename(self.path(kept[0])) + (", ..." if len(kept) > 1 else "")
        return f"The output of the other ranks is in {self.directory} ({files}).\n"
