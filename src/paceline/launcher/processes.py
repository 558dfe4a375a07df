"""Operating-system processes that are started together and ended together. No torch.

Each process leads a session and a process group of its own. A Ctrl-C at the terminal therefore reaches the launcher
alone, which passes it on, and the processes that a worker leaves behind can be found by the group. Those of them that
have gone into a session of their own are found by an environment variable that they inherit (Linux).
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
BUSY_SECONDS = 300.0  # the same for those that write a checkpoint
_KILL_SECONDS = 1.0  # for SIGKILL to be seen to work
_RELEASE_SECONDS = 10.0  # for a process that is killed to give back its memory, which takes a busy machine some time
_STRAY_SECONDS = 1.0  # between SIGTERM and SIGKILL to what a worker left behind in a session of its own
_POLL_SECONDS = 0.02
_NAMED = 8  # of the processes that go on, at most


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
    """Started processes, by their index.

    Args:
        started: the processes.
        marks: for each, an environment variable with its value (NAME=VALUE) that is its own, and that all have which it
            has started; b"" where it has none.
        folder: what to remove should the launcher be killed; None: nothing.
    """

    def __init__(
        self, started: Sequence[subprocess.Popen[bytes]], marks: Sequence[bytes] = (), folder: str | None = None
    ) -> None:
        self._started = list(started)
        self._marks = list(marks) or [b""] * len(self._started)
        # Process groups to kill at the end. Not those of processes that ended well: their numbers may have been used
        # again, and such a script left a process (a server, say) running on purpose.
        self._sweep: set[int] = set()
        self._watcher = _watch(self.pids, folder) if self._started else None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._started]

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

    def stop(
        self,
        signum: int = signal.SIGTERM,
        hurry: Callable[[], bool] = lambda: False,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send a signal to those that run, wait GRACE_SECONDS or until `hurry()`, and kill what is left, with
        descendants. Calling it again is harmless.

        busy: does one of them end something that should not be broken off? It has up to BUSY_SECONDS.
        """
        running = self._running()
        for process in running:
            self._sweep.add(process.pid)
            process.send_signal(signum)
            if process_state.read_state(process.pid).stopped:
                process.send_signal(signal.SIGCONT)  # else it would not see the request
        _wait(lambda: not self._running() or hurry(), GRACE_SECONDS)
        if busy():
            _wait(lambda: not busy() or hurry(), BUSY_SECONDS)
            _wait(lambda: not self._running() or hurry(), GRACE_SECONDS)
        self.exits()
        # Where one has failed or was stopped, also what those have left that ended well.
        marks = [mark for mark in self._marks if mark] if self._sweep else []
        for pid in self._sweep:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left (macOS: the second)
                os.killpg(pid, signal.SIGKILL)
        if not self._sweep:
            self._tell_of_what_goes_on()
        self._sweep.clear()
        _end_strays(marks, hurry)
        self._dismiss_watcher()
        _wait(lambda: not self._running(), _KILL_SECONDS)
        if self._running():
            self._wait_for_the_killed()

    def _tell_of_what_goes_on(self) -> None:
        """All have ended well. What they have left, such as a server, is theirs: it goes on, and is named once."""
        marks, self._marks = [mark for mark in self._marks if mark], [b""] * len(self._marks)
        left = [f"{pid} ({name})" for pid in _find(marks) if (name := process_state.name_of(pid))]
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            what = "a process goes on that a rank has" if len(left) == 1 else "processes go on that ranks have"
            say(f"paceline: {what} started: {', '.join(left[:_NAMED])}{more}. `kill` ends it; no launcher will.\n")

    def _wait_for_the_killed(self) -> None:
        """Say what keeps processes that SIGKILL has not ended, as the kernel tells it."""
        stuck = [p.pid for p in self._running() if process_state.read_state(p.pid).code == process_state.IN_KERNEL]
        if len(stuck) < len(self._running()):
            _wait(lambda: not self._running(), _RELEASE_SECONDS)
        for process in self._running():
            state = process_state.read_state(process.pid)
            if state.code == process_state.IN_KERNEL:
                channel = f" ({state.wait_channel})" if state.wait_channel else ""
                why = f"cannot be killed: it waits in the kernel, for a disk or a device{channel}"
            else:
                why = f"has not ended yet, though it was killed (its state is {state.code or 'unknown'})"
            say(f"paceline: process {process.pid} {why}.\n")

    def _dismiss_watcher(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            with contextlib.suppress(BrokenPipeError):  # it has been killed
                watcher.communicate(b"done\n")

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._started if process.poll() is None]


def _watch(pids: Sequence[int], folder: str | None) -> subprocess.Popen[bytes]:
    """A shell that ends what is left when the launcher dies, however that dies: the kernel ends the ranks themselves,
    but not what they have started. It sees the end of its input.

    It kills their process groups, then whatever has inherited the name of a file in `folder`, and removes that folder
    and what has its name in SHARED_MEMORY.
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
    """End the processes that have inherited one of these environment variables: SIGTERM, and soon SIGKILL."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        found = _find(marks)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signum)
        if found:
            _wait(lambda pids=found: not any(map(_lives, pids)) or hurry(), _STRAY_SECONDS)  # type: ignore[misc]


def _find(marks: Sequence[bytes]) -> list[int]:
    """Living processes that have one of these environment variables."""
    pids = process_state.all_pids() if marks else []
    return [pid for pid in pids if process_state.has_variable(pid, marks) and _lives(pid) and pid != os.getpid()]


def _lives(pid: int) -> bool:
    state = process_state.read_state(pid)
    return state.code != "" and not state.gone


def start(commands: Sequence[Command], folder: str | None = None) -> Processes:
    """Start all of them. folder: what to remove should the launcher be killed.

    Raises:
        LaunchError: one could not be started; those before it are ended.
    """
    started: list[subprocess.Popen[bytes]] = []
    for command in commands:
        try:
            started.append(_popen(command))
        except OSError as error:
            Processes(started, [_mark(command) for command in commands[: len(started)]]).stop()
            raise LaunchError(
                f"Process {len(started)} of {len(commands)} could not be started: {error}. Check the limits on memory "
                f"and on processes (ulimit -u), or ask for fewer with --nproc."
            ) from error
    return Processes(started, [_mark(command) for command in commands], folder)


def _mark(command: Command) -> bytes:
    """Its own environment variable, as it stands in /proc/PID/environ; b"" where it has none."""
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
