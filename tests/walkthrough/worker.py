"""One process of a launch: runs the cases of a plan one after another, and saves each result or traceback.

    paceline run --nproc N worker.py PLAN.pt FOLDER

Where a case raises alike on all processes, they go on with the next. Where it does not, or hangs, the launch ends:
what is left of its collectives could disturb the next case. The harness launches again for what remains.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import paceline
from walkthrough.common import Case, Result
from walkthrough.matrix import MODULES

CASE_SECONDS = 60  # a case takes about one second; four processes on two busy cores some more
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def attempt(case: Case) -> Result | str:
    """The case's result, or the traceback of what stopped it."""
    run = None
    try:
        job = importlib.import_module(f"walkthrough.{MODULES[case.job]}")
        run = paceline.start(seed=case.seed)
        result: Result = job.paceline_job(run, case)
        run.close()
        return result
    except Exception:
        error = traceback.format_exc()
        if run is not None:
            with contextlib.suppress(Exception):
                run.close()
        return error


def alike_everywhere(target: Path) -> bool:
    """Whether, within five seconds, every process has failed in this case, and with the same message."""
    deadline = time.monotonic() + 5
    results = [target / f"result.{rank}" for rank in range(WORLD)]
    while time.monotonic() < deadline and not all(result.exists() for result in results):
        time.sleep(0.05)
    if not all(result.exists() for result in results):
        return False
    errors = [torch.load(result, weights_only=False) for result in results]
    return len({error.strip().splitlines()[-1] if isinstance(error, str) else "" for error in errors}) == 1


def main(plan: str, folder: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name, case in torch.load(plan, weights_only=False):
        target = Path(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        torch.manual_seed(hash(name) % 2**31)  # what an earlier case left in the generators must not matter
        outcome = attempt(case)
        faulthandler.cancel_dump_traceback_later()
        torch.save(outcome, target / f"part.{RANK}")
        (target / f"part.{RANK}").rename(target / f"result.{RANK}")
        if isinstance(outcome, str) and not alike_everywhere(target):
            sys.exit(f"{name} failed on rank {RANK}\n{outcome}")


if __name__ == "__main__":
    main(*sys.argv[1:])
