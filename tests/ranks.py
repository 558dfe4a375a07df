"""Functions run on several real processes, started by our own launcher, with a deadline.

    values = run_ranks(3, "tests.comm.checks:run_all", deadline=60)

calls `tests.comm.checks.run_all()` in each of 3 processes inside a gloo process group, and returns what each returned
(as JSON), in rank order.

Starting costs seconds, most of them torch's import. So one process imports torch (tests/rank.py), and forks one for
each rank of each call, with the environment of that rank: `paceline run` starts a team once for each number of ranks
(tests/idle_rank.py), whose launcher stays until the tests end. What a target does to its process ends with that
process, as if it had been launched alone. `run_script` does the same for a script that plain python is to run.

Tests marked `ranks` (tests/ranks_marker.py) come to the ranks through a `Session`: every rank forks one process, which
then runs one test after the other.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
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
START_SECONDS = 300.0  # for a team on a busy machine
MOST_TEAMS = 4  # a launcher holds some 200 MB
FOLLOW_SECONDS = 3.0  # how much longer a rank may go on when another has failed: it may have a story of its own
GROUP_SECONDS = 1800.0  # that a collective of a session may take; a test has a deadline of its own
LOOK_SECONDS = 0.2  # from one look whether the launcher lives to the next
END_SECONDS = 20.0  # after a deadline, for the ranks to end their processes and to say so


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
    if team is not None and team.ended():
        team.close()
        team = None
    if team is None:
        if len(_teams) == MOST_TEAMS:
            _teams.pop(next(iter(_teams))).close()
        team = Team(size)
    _teams[size] = team  # the latest used comes last
    return team


class Forker:
    """The process that has imported torch, and forks those of all ranks. It ends when this process closes its input, or
    dies."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        os.mkfifo(self.folder / "input")
        self._input = os.open(self.folder / "input", os.O_RDWR)  # to write; for both, since then opening does not wait
        command = [sys.executable, str(ROOT / "tests" / "rank.py"), str(self.folder)]
        self.process = _start(command, self.folder, dict(os.environ))

    def begin(self, job: dict[str, Any]) -> None:
        os.write(self._input, (json.dumps(job) + "\n").encode())

    def close(self) -> None:
        os.close(self._input)
        _end(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(command: list[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    environ = {**environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "output", "wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that is to end by itself; else end it."""
    for signum in (None, signal.SIGTERM, signal.SIGKILL):
        if signum is not None:
            process.send_signal(signum)  # a launcher ends its ranks; killed, the kernel does
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
            return


def _forker() -> Forker:
    if _forkers and _forkers[0].process.poll() is not None:
        _forkers.pop().close()  # it has died
    if not _forkers:
        _forkers.append(Forker())
    return _forkers[0]


class Team:
    """A launcher and its ranks, of whose environment are the processes that run something; of size 0, the environment
    alone. They end when this process closes FOLDER/stay, or dies."""

    def __init__(self, size: int) -> None:
        self.size, self.jobs = max(size, 1), 0
        self.session: Session | None = None  # that these ranks are in
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.environ = dict(os.environ)
        for name in ("stay", "bell"):
            os.mkfifo(self.folder / name)
        # bell: rung by a rank that has written a file
        self._stay, self._bell = os.open(self.folder / "stay", os.O_RDWR), os.open(self.folder / "bell", os.O_RDWR)
        self._forker = _forker()  # which imports torch meanwhile
        self.launcher: subprocess.Popen[bytes] | None = None
        self._of_ranks = [{**self.environ, "OMP_NUM_THREADS": "1"}]
        if size:
            ranks = [str(ROOT / "tests" / "idle_rank.py"), str(self.folder)]
            command = [sys.executable, "-m", "paceline", "run", "--nproc", str(size), *ranks]
            self.launcher = _start(command, self.folder, self.environ)
            self._of_ranks = self._environments()

    def _environments(self) -> list[dict[str, str]]:
        """What the launcher has given to each rank."""
        files, latest = [self.folder / f"environ.{rank}" for rank in range(self.size)], time.monotonic() + START_SECONDS
        while not all(file.exists() for file in files):
            if self.ended() or time.monotonic() > latest:
                told = _text(self.folder / "output")
                self.close()
                raise AssertionError(f"the launcher does not start its ranks\n{told}")
            time.sleep(0.02)
        return [_read(file) for file in files]

    def ended(self) -> bool:
        """Whether the launcher or who forks has ended: then no process of the ranks is left, or will be."""
        return any(one is not None and one.poll() is not None for one in (self.launcher, self._forker.process))

    def begin(self, what: dict[str, Any], job: Path) -> None:
        """Have a process forked of each rank for this job. The ranks do one at a time, so a session ends before it."""
        if self.session is not None:
            self.session.end()
        changed = {name: value for name, value in os.environ.items() if self.environ.get(name) != value}
        gone = self.environ.keys() - os.environ.keys()
        environs = [
            {name: value for name, value in {**own, **changed}.items() if name not in gone} for own in self._of_ranks
        ]
        self._forker.begin({**what, "folder": str(job), "environs": environs})

    def folder_of_next_job(self) -> Path:
        job = self.folder / str(self.jobs)
        self.jobs += 1
        job.mkdir()
        return job

    def await_news(self) -> None:
        """Return when a rank has written a file, or after a moment."""
        if select.select([self._bell], [], [], LOOK_SECONDS)[0]:
            os.read(self._bell, 4096)

    def run(self, what: dict[str, Any], deadline: float) -> list[Any]:
        """What the ranks wrote as their results. `what`: the target and its arguments, or a script (tests/rank.py)."""
        job = self.folder_of_next_job()
        self.begin({**what, "seconds": deadline}, job)
        latest = time.monotonic() + deadline + START_SECONDS + END_SECONDS
        ends = [job / f"{rank}.end" for rank in range(self.size)]
        while not all(end.exists() for end in ends):
            if self.ended() or time.monotonic() > latest:
                story = self._story(job)
                self.close()
                raise AssertionError(f"{what['target']}: the team ended\n{story}")
            self.await_news()
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
        if self._stay < 0:
            return
        if self.session is not None:
            self.session.end()
        os.close(self._stay)
        os.close(self._bell)
        self._stay = -1
        if self.launcher is not None:
            _end(self.launcher)
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
            self._team.await_news()
            for rank in list(waiting):
                ended = (self._job / f"{rank}.end").exists()
                answer = _read(self._job / f"{rank}.{name}")
                if answer or ended:
                    waiting.remove(rank)
                    if not failed and "skipped" not in answer:
                        failed, latest = True, min(latest, time.monotonic() + FOLLOW_SECONDS)
            if waiting and (time.monotonic() > latest or self._team.ended()):
                return True
        return False

    def _failure(self, answers: list[dict[str, Any]], what: str, start: int, late: bool) -> AssertionError:
        """What each rank did, once none of them is left."""
        assert self._team is not None
        self._kill()
        if self._team.ended():
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
        if self._team.ended():
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
            if time.monotonic() > latest or self._team is None or self._team.ended():
                return False
            self._team.await_news()
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
_forkers: list[Forker] = []  # one at most


@atexit.register
def end_teams() -> None:
    """Also called by conftest.py, at the end of the tests."""
    while _teams:
        _, team = _teams.popitem()
        team.close()
    while _forkers:
        _forkers.pop().close()


def children() -> list[psutil.Process]:
    """The processes that this one has started, with theirs, but for the teams."""
    teams = processes_of_teams()
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in teams]


def processes_of_teams() -> set[int]:
    """What conftest.py is not to take for left behind."""
    found = set()
    for started in (*(team.launcher for team in _teams.values()), *(forker.process for forker in _forkers)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if started is not None:
                process = psutil.Process(started.pid)
                found |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return found


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _decoded(output: bytes) -> str:
    return output.decode(errors="replace")[-4000:]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
