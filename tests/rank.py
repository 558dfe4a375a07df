"""One rank of a team (tests/ranks.py): forks a process for each function, script or session of tests.

    paceline run --nproc N rank.py FOLDER
    python rank.py FOLDER, for scripts that need no launcher

It reads lines of JSON from FOLDER/input.RANK until these end. What is imported here is there in every forked process;
nothing here starts a thread or joins a group. A fork begins with a generator of its own in `random` (Python's doing)
and in NumPy, and all else is as in a fresh process.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import math
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch._dynamo  # as the first optimizer does
import torch.distributed as dist

import paceline.run  # noqa: F401
from paceline.comm import process_group

RANK, SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FOLLOW_SECONDS = 3.0  # how much longer a rank may go on when another has failed: it may have a story of its own
STAND_SECONDS = 0.2  # for a process to write where it stands


def more_threads() -> list[str]:
    """Threads beside the main one, by name; not that of the launcher's, of which each fork starts its own."""
    others = [folder for folder in Path("/proc/self/task").glob("*") if folder.name != str(os.getpid())]
    names = [(folder / "comm").read_text().strip() for folder in others]
    return [name for name in names if name != "paceline-stack"]


def main(folder: Path) -> None:
    gc.collect()
    gc.freeze()  # a collection in a fork, also that at its exit, would else go through, and so copy, all of torch
    with open(folder / f"input.{RANK}") as lines:
        for line in lines:
            job = json.loads(line)
            assert not (more := more_threads()), f"threads {more}: a fork takes none of them along"
            child = os.fork()
            if child == 0:
                surround(Path(job["folder"]), job["environ"])
                if "script" in job:
                    os.chdir(Path(job["script"]).parent)
                    sys.argv, sys.path[0] = [job["script"]], str(Path(job["script"]).parent)
                    runpy.run_path(job["script"], run_name="__main__")
                elif "target" in job:
                    call(job["target"], job["arguments"], Path(job["folder"]), job["seconds"])
                else:
                    run_tests(Path(job["folder"]), job["seconds"])
                leave()
            deadline = time.monotonic() + (job["seconds"] if "target" in job or "script" in job else math.inf)
            end = await_end(child, Path(job["folder"]), deadline)
            Path(job["folder"], f"{RANK}.part").write_text(end)
            Path(job["folder"], f"{RANK}.part").rename(Path(job["folder"], f"{RANK}.end"))


def leave() -> NoReturn:
    """End a forked process as the interpreter does, but for its last act, to take all modules apart: that would copy
    nearly all of torch from the parent, 43,000 pages at each end."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def await_end(child: int, folder: Path, deadline: float) -> str:
    """Nothing where the process ended well, or how it ended. A rank that fails takes the others along.

    FOLDER/kill asks for the end of all of them. A process that does not end by itself writes first where it stood.
    """
    failed, kill = folder / "failed", folder / "kill"
    end, latest = "", deadline
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        now = time.monotonic()
        if latest == deadline and failed.exists():
            latest = min(deadline, now + FOLLOW_SECONDS)
        if now > latest or kill.exists():
            end = "not done at the deadline" if latest == deadline else "ended, since another rank failed"
            end = "ended as asked" if kill.exists() else end
            os.kill(child, signal.SIGUSR1)
            time.sleep(STAND_SECONDS)
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(status)
    if code or end:
        failed.touch()
    return end or (f"exit code {code}" if code else "")


def surround(folder: Path, environ: dict[str, str | None]) -> None:
    """In the forked process: its output, its environment, and draws of its own."""
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for name, value in environ.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})
    np.random.seed()


def join(folder: Path, seconds: float) -> None:
    """Join the process group of all ranks' processes; from now on SIGUSR1 has this one write where it stands."""
    faulthandler.register(signal.SIGUSR1, file=open(folder / f"{RANK}.stood", "w"))  # noqa: SIM115  # open to the end
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(folder.name, agent)
    timeout = timedelta(seconds=max(seconds, 1.0))
    dist.init_process_group("gloo", store=store, rank=RANK, world_size=SIZE, timeout=timeout)
    # a target without a collective could leave before the others have connected to this rank: their connecting fails
    store.set(f"joined/{RANK}", "")
    store.wait([f"joined/{rank}" for rank in range(SIZE)], timeout)


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
    answer(folder, "joined", {"skipped": ""})
    draws = torch.get_rng_state()
    with open(folder / f"tests.{RANK}") as lines:
        for line in lines:
            test = json.loads(line)
            torch.set_rng_state(draws)  # what a test draws does not depend on which tests have run before it
            answer(folder, f"{test['number']}.json", run_test(test, folder / f"{test['number']}.arguments"))
    process_group.leave()


def answer(folder: Path, name: str, result: dict[str, str]) -> None:
    """Written as a whole, since pytest's process looks for it all the time."""
    part = folder / f"{RANK}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{RANK}.{name}")


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
