"""Forks the processes of the ranks of all teams (tests/ranks.py): for each function, script or session of tests one of
each rank.

    python rank.py FOLDER

It reads jobs, lines of JSON, from FOLDER/input until that ends. A process has the environment of its rank, as
`paceline run` has made it. What is imported here is there in every forked process, so that torch is imported once;
nothing here starts a thread or joins a group. A fork begins with a generator of its own in `random` (Python's doing)
and in NumPy, and all else is as in a fresh process.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import math
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch._dynamo  # as the first optimizer does
import torch.distributed as dist

import paceline.run  # noqa: F401
from paceline.comm import process_group

RANK = 0  # of this process, once it is forked
FOLLOW_SECONDS = 3.0  # how much longer a rank may go on when another has failed: it may have a story of its own
LOOK_SECONDS = 0.05  # from one look for the failure of another rank to the next
STAND_SECONDS = 5.0  # at most, for a process to write where it stands


@dataclass
class Process:
    """One rank's process of a job."""

    rank: int
    folder: Path
    pid: int
    exits: int  # a descriptor that can be read once it has ended
    latest: float  # when it is to have ended
    reason: str = "not done at the deadline"

    def look(self) -> bool:
        """Whether it has ended; then FOLDER/RANK.end says how, and nothing where it ended well.

        A rank that fails takes the others along. FOLDER/kill asks for the end of all. A process that does not end by
        itself writes first where it stood.
        """
        kill, failed, end = self.folder / "kill", self.folder / "failed", ""
        if not select.select([self.exits], [], [], 0)[0]:
            if failed.exists() and self.latest > time.monotonic() + FOLLOW_SECONDS:
                self.latest, self.reason = time.monotonic() + FOLLOW_SECONDS, "ended, since another rank failed"
            if time.monotonic() <= self.latest and not kill.exists():
                return False
            end = "ended as asked" if kill.exists() else self.reason
            os.kill(self.pid, signal.SIGUSR1)
            await_stand(self.folder / f"{self.rank}.stood")
            os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self.exits)
        code = os.waitstatus_to_exitcode(status)
        if code or end:
            failed.touch()
        tell(self.folder, f"{self.rank}.end", end or (f"exit code {code}" if code else ""))
        return True


def main(folder: Path) -> None:
    gc.collect()
    gc.freeze()  # a collection in a fork, also that at its exit, would else go through, and so copy, all of torch
    jobs, unread = os.open(folder / "input", os.O_RDONLY), b""
    running: list[Process] = []
    while True:
        ready, _, _ = select.select(
            [jobs, *(process.exits for process in running)], [], [], LOOK_SECONDS if running else None
        )
        if jobs in ready:
            read = os.read(jobs, 1 << 16)
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                running += begin(json.loads(line))
            if not read:  # pytest's process has ended
                for process in running:
                    os.kill(process.pid, signal.SIGKILL)
                os._exit(0)
        running = [process for process in running if not process.look()]


def begin(job: dict[str, Any]) -> list[Process]:
    """Fork a process of each rank. job: "folder", "environs" (of each rank), "seconds"; and what is to be run."""
    global RANK
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes no other thread along"
    folder, started = Path(job["folder"]), []
    latest = time.monotonic() + (job["seconds"] if "target" in job or "script" in job else math.inf)
    for rank, environ in enumerate(job["environs"]):
        child = os.fork()
        if child == 0:
            RANK = rank
            surround(folder, environ)
            run(job, folder)
            leave()
        started.append(Process(rank, folder, child, os.pidfd_open(child), latest))
    return started


def run(job: dict[str, Any], folder: Path) -> None:
    if "script" in job:
        os.chdir(Path(job["script"]).parent)
        sys.argv, sys.path[0] = [job["script"]], str(Path(job["script"]).parent)
        runpy.run_path(job["script"], run_name="__main__")
    elif "target" in job:
        call(job["target"], job["arguments"], folder, job["seconds"])
    else:
        run_tests(folder, job["seconds"])


def leave() -> NoReturn:
    """End a forked process as the interpreter does, but for its last act, to take all modules apart: that would copy
    nearly all of torch from the parent, 43,000 pages at each end."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def await_stand(file: Path) -> None:
    """Wait until the process has written where it stands: until the file grows no more. It has none before it joins."""
    latest, size = time.monotonic() + STAND_SECONDS, -1
    while file.exists() and time.monotonic() < latest:
        before, size = size, file.stat().st_size
        if size == before > 0:
            return
        time.sleep(0.1)


def surround(folder: Path, environ: dict[str, str]) -> None:
    """In the forked process: its output, its environment, and draws of its own."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as the launcher's workers have it
    os.environ.clear()
    os.environ.update(environ)
    np.random.seed()


def join(folder: Path, seconds: float) -> None:
    """Join the process group of all ranks' processes; from now on SIGUSR1 has this one write where it stands."""
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{RANK}.stood", "w"))  # noqa: SIM115  # open to the end
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(folder.name, agent)
    timeout = timedelta(seconds=max(seconds, 1.0))
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=size, timeout=timeout)
    # a target without a collective could leave before the others have connected to this rank: their connecting fails
    store.set(f"joined/{RANK}", "")
    store.wait([f"joined/{rank}" for rank in range(size)], timeout)


def call(target: str, arguments: list[str], folder: Path, seconds: float) -> None:
    """Call the target inside a process group, and write what it returned or raised."""
    result: dict[str, Any] = {}
    try:
        join(folder, seconds)
        module, function = target.split(":")
        result["value"] = getattr(importlib.import_module(module), function)(*arguments)
    except Exception:
        result["error"] = traceback.format_exc()
    (folder / f"{RANK}.json").write_text(json.dumps(result))
    if "error" in result:
        os._exit(1)  # no clean end: other ranks may be in a collective
    process_group.leave()


def run_tests(folder: Path, seconds: float) -> None:
    """Run the tests that FOLDER/tests.RANK names, one a line, until it ends. Write how each went into
    FOLDER/RANK.NUMBER.json."""
    join(folder, seconds)
    tell(folder, f"{RANK}.joined", json.dumps({"skipped": ""}))
    draws = torch.get_rng_state()
    with open(folder / f"tests.{RANK}") as lines:
        for line in lines:
            test = json.loads(line)
            torch.set_rng_state(draws)  # what a test draws does not depend on which tests have run before it
            found = run_test(test, folder / f"{test['number']}.arguments")
            tell(folder, f"{RANK}.{test['number']}.json", json.dumps(found))
    process_group.leave()


def tell(folder: Path, name: str, text: str) -> None:
    """Write FOLDER/name as a whole, and wake pytest's process, which looks for it."""
    part = folder / f"{name}.part"
    part.write_text(text)
    part.rename(folder / name)
    with contextlib.suppress(OSError):  # who has not read the last words will look anyway, or has gone
        bell = os.open(folder.parent / "bell", os.O_WRONLY | os.O_NONBLOCK)
        os.write(bell, b".")
        os.close(bell)


def run_test(test: dict[str, Any], arguments: Path) -> dict[str, str]:
    """Call the test: "error" is the traceback of its failure, or "skipped" the reason why it was skipped, or ""."""
    before = leaks.snapshots(leaving_out=("listening port",))  # every group that a test makes listens to the end
    try:
        module = importlib.import_module(test["module"])
        sys.modules.setdefault(test["pytest_module"], module)  # the name by which its classes are pickled
        getattr(module, test["function"])(**pickle.loads(arguments.read_bytes()))
    except pytest.skip.Exception as skipped:
        return {"skipped": str(skipped)}
    except BaseException as error:  # pytest.fail raises no Exception; and a test that exits has failed
        assert error.__traceback__ is not None
        told = traceback.format_exception(type(error), error, error.__traceback__.tb_next)
        return {"error": "".join(told)}
    left = leaks.left_behind(before)
    return {"error": "the test left behind: " + "; ".join(left)} if left else {"skipped": ""}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests import leaks

    main(Path(sys.argv[1]))
