"""Launchers of a test, in a directory of its own: `paceline run`, and nothing is left of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.ports import free_port

DEADLINE_SECONDS = 150.0  # for what takes some six seconds on an idle machine
MARK = "PACELINE_TEST_MARK"  # every descendant of a launch inherits it


def wait_for(condition: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> float:
    """Seconds waited."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - start


def marked(mark: str) -> list[psutil.Process]:
    """All living processes that descend from a launch, also those whose parent has gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


class Launches:
    """Starts `paceline run` in a directory of its own, and ends what a failed test leaves."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        # Short: sockets' paths end at 107 characters, and DataLoader's workers, which have theirs here, wait for ever.
        self.temporary = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.environ = {**os.environ, MARK: self.mark, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        self.launchers: list[subprocess.Popen[str]] = []

    def script(self, code: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(textwrap.dedent(code))
        return name

    def start(self, *line: str, program: tuple[str, str] = ("-m", "paceline")) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *program, "run", *line],
            cwd=self.directory,
            env=self.environ,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.launchers.append(process)
        return process

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        """(exit code, stdout, stderr); nothing is left of the launch, no process and no file."""
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        assert marked(self.mark) == []
        assert list(self.temporary.iterdir()) == []
        return process.returncode, out, err

    def run(self, *line: str) -> tuple[int, str, str]:
        return self.end(self.start(*line))

    def end_all(self) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each launcher."""
        found = [(launcher.communicate(timeout=DEADLINE_SECONDS), launcher.returncode) for launcher in self.launchers]
        return [(code, out, err) for (out, err), code in found]

    def wait_for_file(self, *names: str) -> None:
        wait_for(lambda: all((self.directory / name).exists() for name in names), f"the files {names}")

    def close(self) -> list[int]:
        left = [process.pid for process in marked(self.mark)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for process in self.launchers:
            process.communicate(timeout=DEADLINE_SECONDS)
        shutil.rmtree(self.temporary)
        return left


class Machines(Launches):
    """Launchers that meet, as those of several machines do. The arguments of `start` are options and the mode."""

    def __init__(self, directory: Path, code: str) -> None:
        super().__init__(directory)
        self.script(code)
        self.port = free_port()

    def start_elastic(self, mode: str, *options: str) -> None:
        """One of one or two machines, which c10d numbers."""
        place = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-conf", "last_call_timeout=1"]
        self.start(*place, *options, "script.py", mode)

    def start_numbered(self, node: int, mode: str, *options: str) -> None:
        """One of two machines, with its number."""
        place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port"]
        self.start(*place, str(self.port), *options, "script.py", mode)

    def start_two(self, mode: str, *options: str) -> None:
        for node in range(2):
            self.start_numbered(node, mode, *options)

    def wait_until_listening(self) -> None:
        def listens() -> bool:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return True
            except OSError:
                return False

        wait_for(listens, "a launcher that listens")

    @staticmethod
    def wait_for_word(launcher: subprocess.Popen[str], word: str) -> None:
        """Until a line with it comes on the launcher's stderr. What comes before it is read and dropped."""
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if word in line:
                return
        pytest.fail(f"it ended without a line that has {word!r}")
