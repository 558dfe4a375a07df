"""Functions run on several real processes, started by our own launcher, with a deadline.

    values = run_ranks(3, "tests.comm.checks:run_all", deadline=60)

calls `tests.comm.checks.run_all()` in each of 3 processes inside a gloo process group, and returns what each returned
(as JSON), in rank order.

Starting costs seconds, most of them torch's import. So `paceline run` starts a team once for each number of ranks, and
the team stays until the tests end; for each call every rank forks a process (tests/rank.py). What a target does to its
process ends with that process, as if it had been launched alone. `run_checks` runs many checks in one call.
`run_script` does the same for a script that plain python is to run.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0  # for a team on a busy machine
MOST_TEAMS = 3  # a rank holds some 200 MB
END_SECONDS = 10.0  # after a deadline, for the ranks to end their processes and to say so


def run_ranks(size: int, target: str, *arguments: str, deadline: float = 60.0) -> list[Any]:
    """What `target` ("module:function") returned, with these arguments, on each of `size` processes, in rank order.

    Raises AssertionError, with the tracebacks of all ranks and their last output, where one raised, died, or had not
    returned after `deadline` seconds (then with the line where each rank stood). No process of the target is left.
    """
    return _team(size).run({"target": target, "arguments": arguments}, deadline)


def run_script(path: Path, deadline: float = 60.0) -> None:
    """Run the script in its folder, as `python script.py` does: no launcher, no process group.

    Raises AssertionError, with its last output, where it does not end with exit code 0 within `deadline` seconds.
    """
    _team(0).run({"target": "a script", "script": str(path)}, deadline)


def _team(size: int) -> Team:
    team = _teams.pop(size, None)
    if team is not None and team.process.poll() is not None:
        team.close()  # it has died
        team = None
    if team is None:
        if len(_teams) == MOST_TEAMS:
            _teams.pop(next(iter(_teams))).close()
        team = Team(size)
    _teams[size] = team  # the latest used comes last
    return team


class Team:
    """Ranks that wait for what to run; of size 0, one process without a launcher. They see the end of their input when
    this process closes it, or dies, and end."""

    def __init__(self, size: int) -> None:
        self.size, self.jobs = max(size, 1), 0
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.environ = dict(os.environ)
        self._inputs = []
        for rank in range(self.size):
            path = self.folder / f"input.{rank}"
            os.mkfifo(path)
            self._inputs.append(os.open(path, os.O_RDWR))  # to write; for both, since then opening does not wait
        launcher = ["-m", "paceline", "run", "--nproc", str(size)] if size else []
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, str(ROOT / "tests" / "rank.py"), str(self.folder)],
                cwd=ROOT,
                env={**self.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def run(self, what: dict[str, Any], deadline: float) -> list[Any]:
        """What the ranks wrote as their results. `what`: the target and its arguments, or a script (tests/rank.py)."""
        job = self.folder / str(self.jobs)
        self.jobs += 1
        job.mkdir()
        changed = {name: value for name, value in os.environ.items() if self.environ.get(name) != value}
        changed |= dict.fromkeys(self.environ.keys() - os.environ.keys())
        line = json.dumps({**what, "folder": str(job), "seconds": deadline, "environ": changed}) + "\n"
        for input in self._inputs:
            os.write(input, line.encode())
        latest = time.monotonic() + deadline + START_SECONDS + END_SECONDS
        ends = [job / f"{rank}.end" for rank in range(self.size)]
        while not all(end.exists() for end in ends):
            if self.process.poll() is not None or time.monotonic() > latest:
                story = self._story(job)
                self.close()
                raise AssertionError(f"{what['target']}: the team ended\n{story}")
            time.sleep(0.01)
        results = [_read(job / f"{rank}.json") for rank in range(self.size)]
        if any(end.read_text() for end in ends):
            raise AssertionError(f"{what['target']}\n{self._story(job)}")
        shutil.rmtree(job)
        return [result.get("value") for result in results]  # a script has none

    def _story(self, job: Path) -> str:
        lines = []
        for rank in range(self.size):
            result, stood = _read(job / f"{rank}.json"), _text(job / f"{rank}.stood")
            told = "returned" if "value" in result else result.get("error") or stood or "?"
            lines.append(f"--- rank {rank} ({_text(job / f'{rank}.end') or 'ended well'}): {told}")
        outputs = [_text(path)[-4000:] for path in (job / "output", self.folder / "output")]
        return "\n".join([*lines, "--- output", *outputs])

    def close(self) -> None:
        """End the ranks, and forget what they left."""
        for input in self._inputs:
            with contextlib.suppress(OSError):
                os.close(input)
        self._inputs.clear()
        for signum in (None, signal.SIGTERM, signal.SIGKILL):
            if signum is not None:
                self.process.send_signal(signum)  # to the launcher, which ends the ranks; killed, the kernel does
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
                break
        shutil.rmtree(self.folder, ignore_errors=True)


_teams: dict[int, Team] = {}


@atexit.register
def end_teams() -> None:
    """Also called by conftest.py, at the end of the tests."""
    while _teams:
        _, team = _teams.popitem()
        team.close()


def children() -> list[psutil.Process]:
    """The processes that this one has started, with theirs, but for the teams."""
    teams = processes_of_teams()
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in teams]


def processes_of_teams() -> set[int]:
    """What conftest.py is not to take for left behind."""
    found = set()
    for team in _teams.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(team.process.pid)
            found |= {launcher.pid, *(child.pid for child in launcher.children(recursive=True))}
    return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def run_checks(checks: Iterable[Callable[[], None]]) -> dict[str, str]:
    """Run the checks one after the other on all ranks, and return the traceback of each that failed on this rank."""
    from paceline.comm import collectives

    failed = {}
    for check in checks:
        try:
            check()
        except Exception:
            failed[check.__name__] = traceback.format_exc()
            traceback.print_exc()  # also into the output, which is what remains when the ranks now miss each other
        # Together, so that a rank that failed does not run into the next check while others are in this one.
        collectives.gather_objects(None)
    return failed


def checks_in(namespace: dict[str, Any]) -> list[Callable[[], None]]:
    """The functions of a module whose name starts with check_."""
    return [value for name, value in namespace.items() if name.startswith("check_")]
