"""Operating-system processes that are started and ended together. Does not import torch.

Each process leads a separate session and process group. So Ctrl-C at the terminal reaches only the launcher, which
forwards it. Processes that a worker leaves behind are found by their process group. If they have started another
session, they are found by an inherited environment variable (Linux).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, NamedTuple

from paceline.errors import LaunchError
from paceline.launcher import process_state
from paceline.launcher.output import say
from paceline.world import ERROR_FILE, SHARED_MEMORY

GRACE_SECONDS = 3.0  # between the request to end and SIGKILL
BUSY_SECONDS = 300.0  # the same, for processes that are writing a checkpoint
_KILL_SECONDS = 1.0  # time for SIGKILL to take effect
_RELEASE_SECONDS = 10.0  # time for a killed process to release its memory, which is slow on a busy machine
_STRAY_SECONDS = 1.0  # between SIGTERM and SIGKILL to processes left behind in another session
_POLL_SECONDS = 0.02
_NAMED = 8  # maximum number of leftover processes in the message


class Command(NamedTuple):
    """A process to start.

    Attributes:
        arguments: its command line.
        environ: its whole environment.
        output: a file for its output (its stdin is then empty); None: use the launcher's streams.
    """

    arguments: Sequence[str]
    environ: Mapping[str, str]
    output: IO[bytes] | None = None


class Processes:
    """Started processes, by their index.

    Args:
        started: the processes.
        marks: for each process, a unique environment variable (NAME=VALUE) that its descendants inherit; b"" if none.
        folder: a folder to remove if the launcher is killed; None: none.
    """

    def __init__(
        self, started: Sequence[subprocess.Popen[bytes]], marks: Sequence[bytes] = (), folder: str | None = None
    ) -> None:
        self._started = list(started)
        self._marks = list(marks) or [b""] * len(self._started)
        # Process groups to kill at the end. Groups of processes that ended with exit code 0 are left out: their numbers
        # may have been reused, and a script may leave a process running on purpose, such as a server.
        self._sweep: set[int] = set()
        self._watcher = _watch(self.pids, folder) if self._started else None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

    def exits(self) -> dict[int, int]:
        """Return index -> exit code for the processes that have ended. The code is -n for signal n."""
        found = {}
        for index, process in enumerate(self._started):
            code = process.poll()
            if code is not None:
                found[index] = code
                if code != 0:
                    self._sweep.add(process.pid)
        return found

    def stop(
        self,
        signum: int = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Signal the running processes, wait GRACE_SECONDS, and kill those still running, with all descendants.

        Calling it again is harmless.

        Args:
            hurry: returns whether to stop waiting.
            busy: returns whether a process should not be aborted yet. If so, wait up to BUSY_SECONDS.
        """
        running = self._running()
        for process in running:
            self._sweep.add(process.pid)
            process.send_signal(signum)
            if process_state.read_state(process.pid).stopped:
                process.send_signal(signal.SIGCONT)  # a stopped process would not handle the signal
        _wait(lambda: not self._running() or hurry(), GRACE_SECONDS)
        if busy():
            _wait(lambda: not busy() or hurry(), BUSY_SECONDS)
            _wait(lambda: not self._running() or hurry(), GRACE_SECONDS)
        self.exits()
        # If a process failed or was stopped, also end processes left behind by processes that ended with exit code 0.
        marks = [mark for mark in self._marks if mark] if self._sweep else []
        for pid in self._sweep:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # an empty group (macOS: the second)
                os.killpg(pid, signal.SIGKILL)
        if not self._sweep:
            self._report_leftovers()
        self._sweep.clear()
        _end_strays(marks, hurry)
        self._dismiss_watcher()
        _wait(lambda: not self._running(), _KILL_SECONDS)
        if self._running():
            self._wait_for_the_killed()

    def _report_leftovers(self) -> None:
        """Report once, after all ranks ended with exit code 0, the processes that they left running."""
        marks, self._marks = [mark for mark in self._marks if mark], [b""] * len(self._marks)
        left = [f"{pid} ({name})" for pid in _find(marks) if (name := process_state.name_of(pid))]
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            what = "a child process of a rank is" if len(left) == 1 else "child processes of ranks are"
            listed = ", ".join(left[:_NAMED])
            say(f"paceline: {what} still running: {listed}{more}. The launcher does not end it; use `kill`.\n")

    def _wait_for_the_killed(self) -> None:
        """Wait longer for killed processes, and report the kernel's state of those that have not ended."""
        stuck = [p.pid for p in self._running() if process_state.read_state(p.pid).code == process_state.IN_KERNEL]
        if len(stuck) < len(self._running()):
            _wait(lambda: not self._running(), _RELEASE_SECONDS)
        for process in self._running():
            state = process_state.read_state(process.pid)
            if state.code == process_state.IN_KERNEL:
                channel = f" ({state.wait_channel})" if state.wait_channel else ""
                why = f"cannot be killed: it waits in the kernel for a disk or a device{channel}"
            else:
                why = f"was killed, but has not ended yet (its state is {state.code or 'unknown'})"
            say(f"paceline: process {process.pid} {why}.\n")

    def _dismiss_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            with contextlib.suppress(BrokenPipeError):  # the watcher was killed
                watcher.communicate(b"done\n")

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._started if process.poll() is None]


def _watch(pids: Sequence[int], folder: str | None) -> subprocess.Popen[bytes]:
    """Start a shell that ends leftover processes when the launcher dies for any reason.

    The kernel ends the ranks themselves, but not their descendants. When the launcher dies, the shell's input ends. The
    shell then kills the ranks' process groups, and all processes that have inherited an ERROR_FILE in `folder`. Finally
    it removes `folder`, and the folder of that name in SHARED_MEMORY.
    """
    script = (
        'trap "" USR1; read line && exit; folder=$1; shift; kill -s KILL -- "$@" 2>/dev/null; '
        '[ -n "$folder" ] || exit; '
        f'for file in $(grep -lsaF -- "{ERROR_FILE}=$folder/" /proc/[0-9]*/environ); do '
        'pid=${file#/proc/}; kill -s KILL "${pid%/environ}" 2>/dev/null; done; '
        f'set -- "$folder" "{SHARED_MEMORY}/${{folder##*/}}"; '
        'rm -rf -- "$@" 2>/dev/null || { sleep 1; rm -rf -- "$@"; }'
    )
    groups = [f"-{pid}" for pid in pids]
    return subprocess.Popen(
        ["/bin/sh", "-c", script, "paceline-watcher", folder or "", *groups],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end_strays(marks: Sequence[bytes], hurry: Callable[[], bool] = lambda: False) -> None:
    """End the processes that have inherited one of these environment variables, with SIGTERM and then SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        found = _find(marks)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        if found:
            _wait(lambda pids=found: not any(map(_lives, pids)) or hurry(), _STRAY_SECONDS)  # type: ignore[misc]


def _find(marks: Sequence[bytes]) -> list[int]:
    """Return the running processes that have one of these environment variables."""
    pids = process_state.all_pids() if marks else []
    return [pid for pid in pids if process_state.has_variable(pid, marks) and _lives(pid) and pid != os.getpid()]


def _lives(pid: int) -> bool:
    state = process_state.read_state(pid)
    return state.code != "" and not state.gone


def start(commands: Sequence[Command], folder: str | None = None) -> Processes:
    """Start all processes.

    Args:
        folder: a folder to remove if the launcher is killed.

    Raises:
        LaunchError: a process could not be started. Processes already started are ended first.
    """
    started: list[subprocess.Popen[bytes]] = []
    for command in commands:
        try:
            started.append(_popen(command))
        except OSError as error:
            Processes(started, [_mark(command) for command in commands[: len(started)]]).stop()
            raise LaunchError(
                f"Process {len(started)} of {len(commands)} could not be started: {error}. Check the limits on memory "
                f"and processes (ulimit -u), or reduce --nproc."
            ) from error
    return Processes(started, [_mark(command) for command in commands], folder)


def _mark(command: Command) -> bytes:
    """Return the process's unique environment variable, as in /proc/PID/environ; b"" if none."""
    path = command.environ.get(ERROR_FILE)
    return f"{ERROR_FILE}={path}".encode(errors="surrogateescape") if path else b""


def _popen(command: Command) -> subprocess.Popen[bytes]:
    arguments, environ, output = command
    stdin = None if output is None else subprocess.DEVNULL
    return subprocess.Popen(arguments, env=environ, stdin=stdin, stdout=output, stderr=output, start_new_session=True)


def _wait(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
