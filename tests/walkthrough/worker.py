"""One process of a launch: runs the cases of a plan one after another, and saves each result or traceback.

    paceline run --nproc N worker.py PLAN.pt FOLDER

A case that raises on any process is given up by all of them: the process group is torn down, which wakes the peers, and
the next case starts afresh. A case that hangs ends this process, and so the launch; the harness launches what is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import paceline
from walkthrough.common import Case, Result
from walkthrough.matrix import MODULES

CASE_SECONDS = 90  # a case takes about one second; four processes on two busy cores some more


def attempt(case: Case) -> Result | str:
    """The case's result, or the traceback of what stopped it."""
    run = None
    try:
        job = importlib.import_module(f"walkthrough.{MODULES[case.job]}")
        run = paceline.start(seed=case.seed)
        result = job.paceline_job(run, case)
        run.close()
        return result
    except Exception:
        error = traceback.format_exc()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        if run is not None:
            with contextlib.suppress(Exception):
                run.close()
        return error


def main(plan: str, folder: str) -> None:
    rank = os.environ.get("RANK", "0")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name, case in torch.load(plan, weights_only=False):
        target = Path(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        (target / f"started.{rank}").touch()
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        torch.manual_seed(hash(name) % 2**31)  # what an earlier case left in the generators must not matter
        outcome = attempt(case)
        faulthandler.cancel_dump_traceback_later()
        torch.save(outcome, target / f"part.{rank}")
        (target / f"part.{rank}").rename(target / f"result.{rank}")


if __name__ == "__main__":
    main(*sys.argv[1:])
