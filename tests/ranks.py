"""Functions run on several real processes, started by our own launcher, with a deadline.

    values = run_ranks(3, "tests.comm.checks:run_all", deadline=60)

calls `tests.comm.checks.run_all()` in each of 3 processes inside a gloo process group, and returns what each returned
(as JSON), in rank order.

Starting costs seconds, most of them torch's import. So `paceline run` starts a team once for each number of ranks, and
the team stays until the tests end; for each call every rank forks a process (tests/rank.py). What a target does to its
process ends with that process, as if it had been launched alone.
`run_script` does the same for a script that plain python is to run.

Tests marked `ranks` (tests/ranks_marker.py) come to the ranks through a `Session`: every rank forks one process, which
then runs one test after the other.
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
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 90.0  # for a team on a busy machine
MOST_TEAMS = 3  # a rank holds some 200 MB
FOLLOW_SECONDS = 3.0  # how much longer a rank may go on when another has failed: it may have a story of its own
GROUP_SECONDS = 1800.0  # that a collective of a session may take; a test has a deadline of its own
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
        self.session: Session | None = None  # that these ranks are in
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

    def begin(self, what: dict[str, Any], job: Path) -> None:
        """Have every rank fork a process for this job. The ranks do one job at a time, so a session ends before it."""
        if self.session is not None:
            self.session.end()
        changed = {name: value for name, value in os.environ.items() if self.environ.get(name) != value}
        changed |= dict.fromkeys(self.environ.keys() - os.environ.keys())
        line = json.dumps({**what, "folder": str(job), "environ": changed}) + "\n"
        for input in self._inputs:
            os.write(input, line.encode())

    def folder_of_next_job(self) -> Path:
        job = self.folder / str(self.jobs)
        self.jobs += 1
        job.mkdir()
        return job

    def run(self, what: dict[str, Any], deadline: float) -> list[Any]:
        """What the ranks wrote as their results. `what`: the target and its arguments, or a script (tests/rank.py)."""
        job = self.folder_of_next_job()
        self.begin({**what, "seconds": deadline}, job)
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
        if self.session is not None:
            self.session.end()
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


class Session:
    """One forked process of each of `size` ranks, inside a gloo process group, which run one test after the other.

    What a test does to its process is there for the next test. A test that fails ends the session: its ranks may have
    missed each other. The next test then finds new processes. So does a test after another job of the same team.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fault = ""  # how a session ended that did not end well, though no test had failed
        self._team: Team | None = None  # while the processes are there
        self._inputs: list[int] = []
        self._tests = 0

    def run(self, test: dict[str, Any], arguments: bytes, deadline: float) -> tuple[str, str]:
        """Run one test (tests/rank.py, `run_test`) on all ranks: what they printed, and why they skipped it, if so.

        Raises AssertionError, with what every rank did, where one failed, died, or had not finished after `deadline`
        seconds; and where only some skipped it.
        """
        self.begin()
        number, self._tests = self._tests, self._tests + 1
        (self._job / f"{number}.arguments").write_bytes(arguments)
        start = len(self._printed())
        for input in self._inputs:
            os.write(input, (json.dumps({**test, "number": number}) + "\n").encode())
        answers = self._answers(f"{number}.json", deadline, f"{test['function']} on {self.size} ranks", start)
        skips = {answer["skipped"] for answer in answers}
        if len(skips) == 1:
            return _decoded(self._printed()[start:]), skips.pop()
        raise self._failure(answers, f"{test['function']} on {self.size} ranks", start, late=False)

    def begin(self) -> None:
        """Have the processes there, if they are not."""
        if self._team is not None:
            return
        self._team = team = _team(self.size)
        self._job = team.folder_of_next_job()
        for rank in range(self.size):
            path = self._job / f"tests.{rank}"
            os.mkfifo(path)
            self._inputs.append(os.open(path, os.O_RDWR))
        team.begin({"seconds": GROUP_SECONDS}, self._job)
        team.session = self
        self._answers("joined", START_SECONDS, f"{self.size} ranks before their first test", 0)

    def end(self) -> None:
        """Have the processes end by themselves. `fault` says what went wrong with that."""
        if self._team is None:
            return
        for input in self._inputs:
            os.close(input)
        self._inputs.clear()
        if not self._ended():
            self._kill()
        ends = [_text(self._job / f"{rank}.end") for rank in range(self.size)]
        if any(ends) and not self.fault:
            told = "; ".join(f"rank {rank}: {end}" for rank, end in enumerate(ends) if end)
            self.fault = f"after the last test its ranks did not end well: {told}\n{_decoded(self._printed())}"
        self._forget()

    def _answers(self, name: str, seconds: float, what: str, start: int) -> list[dict[str, Any]]:
        """What the ranks have written into their files of this name; AssertionError where one has no good answer."""
        try:
            late = self._await(name, time.monotonic() + seconds)
        except BaseException:  # Ctrl-C, or pytest's own deadline
            self._kill()
            self._forget()
            raise
        answers = [_read(self._job / f"{rank}.{name}") for rank in range(self.size)]
        if late or not all("skipped" in answer for answer in answers):
            raise self._failure(answers, what, start, late)
        return answers

    def _await(self, name: str, latest: float) -> bool:
        """Wait until every rank has answered or ended. Whether one had done neither at `latest`."""
        assert self._team is not None
        waiting, failed = list(range(self.size)), False
        while waiting:
            time.sleep(0.003)
            for rank in list(waiting):
                ended = (self._job / f"{rank}.end").exists()
                answer = _read(self._job / f"{rank}.{name}")
                if answer or ended:
                    waiting.remove(rank)
                    if not failed and "skipped" not in answer:
                        failed, latest = True, min(latest, time.monotonic() + FOLLOW_SECONDS)
            if waiting and (time.monotonic() > latest or self._team.process.poll() is not None):
                return True
        return False

    def _failure(self, answers: list[dict[str, Any]], what: str, start: int, late: bool) -> AssertionError:
        """What each rank did, once none of them is left."""
        assert self._team is not None
        self._kill()
        if self._team.process.poll() is not None:
            why = "the launcher had ended"
        elif late and not any("error" in answer for answer in answers):
            why = "not done at the deadline"
        else:
            why = "still in it when another rank had failed"
        lines = [what]
        for rank, answer in enumerate(answers):
            end, stood = _text(self._job / f"{rank}.end"), _text(self._job / f"{rank}.stood")
            if not answer:
                told = f"({end if 'exit code' in end else why}): {stood}"
            elif "error" in answer:
                told = f"failed: {answer['error']}"
            else:
                told = f"skipped it: {answer['skipped']}" if answer["skipped"] else "passed"
            lines.append(f"--- rank {rank} {told}")
        causes = [answer["error"].strip().splitlines()[-1] for answer in answers if "error" in answer]
        lines[0] = f"{causes[0]} ({what})" if causes else what  # what pytest's summary has room for
        lines += ["--- output", _decoded(self._printed()[start:])]
        if self._team.process.poll() is not None:
            lines.append(_text(self._team.folder / "output")[-2000:])
        self._forget()
        return AssertionError("\n".join(lines))

    def _printed(self) -> bytes:
        path = self._job / "output"
        return path.read_bytes() if path.exists() else b""

    def _kill(self) -> None:
        (self._job / "kill").touch()
        self._ended()

    def _ended(self) -> bool:
        """Wait until all processes have ended: whether they have."""
        latest = time.monotonic() + END_SECONDS
        ends = [self._job / f"{rank}.end" for rank in range(self.size)]
        while not all(end.exists() for end in ends):
            if time.monotonic() > latest or self._team is None or self._team.process.poll() is not None:
                return False
            time.sleep(0.003)
        return True

    def _forget(self) -> None:
        for input in self._inputs:
            os.close(input)
        self._inputs.clear()
        shutil.rmtree(self._job, ignore_errors=True)
        if self._team is not None:
            self._team.session = None
        self._team, self._tests = None, 0


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


def _decoded(output: bytes) -> str:
    return output.decode(errors="replace")[-4000:]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
