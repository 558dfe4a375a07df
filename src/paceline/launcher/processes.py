"""Operating-system processes that are started together and ended together. No torch.

Each process leads a session and a process group of its own. A Ctrl-C at the terminal therefore reaches the launcher
alone, which passes it on, and the processes that a worker leaves behind can be found by the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from paceline.errors import LaunchError

GRACE_SECONDS = 3.0  # between the request to end and SIGKILL
_KILL_SECONDS = 1.0  # for SIGKILL: a process that waits in the kernel, for a disk or a GPU, cannot die
_POLL_SECONDS = 0.02


class Command(NamedTuple):
    """A process to start.

    Attributes:
        arguments: its command line.
        environ: its whole environment.
        output: a file for what it prints, with nothing to read from; None: the launcher's own streams.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    output: IO[bytes] | None = None


class Processes:
    """Started processes, by their index."""

    def __init__(self, started: Sequence[subprocess.Popen[bytes]]) -> None:
        self._started = list(started)
        # Process groups to kill at the end. Not those of processes that ended well: their numbers may have been used
        # again, and such a script left a process (a server, say) running on purpose.
        self._sweep: set[int] = set()
        self._watcher = _watch(self.pids) if self._started else None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    def restart(self, index: int, command: Command) -> None:
        """Start a process that has ended once more. What the former one left behind is killed."""
        former = self._started[index].pid
        self._sweep.discard(former)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(former, signal.SIGKILL)
        self._started[index] = _popen(command)
        self._dismiss_watcher()
        self._watcher = _watch(self.pids)

    def exits(self) -> dict[int, int]:
        """index -> exit code, of the processes that have ended; -n where signal n ended one."""
        found = {}
        for index, process in enumerate(self._started):
            code = process.poll()
            if code is not None:
                found[index] = code
                if code != 0:
                    self._sweep.add(process.pid)
        return found

    def stop(self, signum: int = signal.SIGTERM, hurry: Callable[[], bool] = lambda: False) -> None:
        """Send a signal to those that run, wait GRACE_SECONDS or until `hurry()`, and kill what is left, with
        descendants. Calling it again is harmless."""
        running = self._running()
        for process in running:
            self._sweep.add(process.pid)
            process.send_signal(signum)
        _wait(lambda: not self._running() or hurry(), GRACE_SECONDS)
        self.exits()
        for pid in self._sweep:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: the second)
                os.killpg(pid, signal.SIGKILL)
        self._sweep.clear()
        self._dismiss_watcher()
        _wait(lambda: not self._running(), _KILL_SECONDS)
        for process in self._running():
            print(
                f"paceline: process {process.pid} cannot be killed: it waits in the kernel, for a disk or a device.",
                file=sys.stderr,
            )

    def _dismiss_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            with contextlib.suppress(BrokenPipeError):  # it has been killed
                watcher.communicate(b"done\n")

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._started if process.poll() is None]


def _watch(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """A shell that kills these process groups when the launcher dies, however that dies: the kernel ends the ranks
    themselves, but not what they have started. It sees the end of its input."""
    script = 'read line || kill -s KILL -- "$@" 2>/dev/null'
    groups = [f"-{pid}" for pid in pids]
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "paceline-watcher", *groups],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def start(commands: Sequence[Command]) -> Processes:
    """Start all of them.

    Raises:
        LaunchError: one could not be started; those before it are ended.
    """
    started: list[subprocess.Popen[bytes]] = []
    for command in commands:
        try:
            started.append(_popen(command))
        except OSError as error:
            Processes(started).stop()
            raise LaunchError(
                f"Process {len(started)} of {len(commands)} could not be started: {error}. Check the limits on memory "
                f"and on processes (ulimit -u), or ask for fewer with --nproc."
            ) from error
    return Processes(started)


def _popen(command: Command) -> subprocess.Popen[bytes]:
    arguments, environ, output = command
    stdin = None if output is None else subprocess.DEVNULL
    return subprocess.Popen(arguments, env=environ, stdin=stdin, stdout=output, stderr=output, start_new_session=True)


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
