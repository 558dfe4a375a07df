"""One rank (tests/ranks.py): runs the cases of a plan one after another, and saves each result or traceback.

    run_ranks(N, "walkthrough.worker:main", PLAN.pt, FOLDER)

Where a case raises alike on all processes, they go on with the next. Where it does not, or hangs, the processes end:
what is left of its collectives could disturb the next case. The harness takes new ones for what remains.

A process that a strategy has serve the others (parameter_server) ends in `prepare` with exit code 0: here it goes on
with the next case instead, and saves None.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import paceline
from paceline.comm.mesh import world_group
from paceline.world import Served
from walkthrough import strategies
from walkthrough.common import Case, Result
from walkthrough.matrix import MODULES

CASE_SECONDS = 300  # a case takes about one second on an idle machine
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def attempt(case: Case, world: int, folder: Path) -> Result | str | None:
    """The case's result, or the traceback of what stopped it, or None of a server."""
    run = None
    try:
        job = importlib.import_module(f"walkthrough.{MODULES[case.job]}")
        run = paceline.start(seed=case.seed, strategy=strategies.spec(case.strategy, world), progress="off")
        shared = job.result_of.__globals__
        shared["whole_state"] = partial(whole_state, run, folder / f"export.{RANK}")
        shared["optimizer_state"] = partial(optimizer_state, run)
        result: Result = job.paceline_job(run, case)
        run.close()
        return result
    except Served:
        return None
    except Exception:
        error = traceback.format_exc()
        if run is not None:
            with contextlib.suppress(Exception):
                run.close()
        return error


def whole_state(run: paceline.Run, path: Path, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and buffers of a prepared model as `run.export` writes them; of another one, as they are."""
    if model not in run._models:
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    path = Path(world_group().broadcast(str(path)))
    run.export(path, model)
    world_group().barrier()
    return load_file(path)


def optimizer_state(run: paceline.Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state_dict; with what the strategy has of it, where the process itself has nothing."""
    state = optimizer.state_dict()
    if state["state"]:
        return state
    whole = run._strategy.state_dict()["optimizers"][run._optimizers.index(optimizer)]
    names = [name for group in whole["groups"] for name in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    own = {number: whole["state"][name] for number, name in zip(numbers, names, strict=True) if name in whole["state"]}
    return {**state, "state": own}


def alike_everywhere(target: Path) -> bool:
    """Whether, within a minute, every process has failed in this case, and with the same message."""
    deadline = time.monotonic() + 60
    results = [target / f"result.{rank}" for rank in range(WORLD)]
    while time.monotonic() < deadline and not all(result.exists() for result in results):
        time.sleep(0.05)
    if not all(result.exists() for result in results):
        return False
    errors = [torch.load(result, weights_only=False) for result in results]
    workers = [error for error in errors if error is not None]
    return len({error.strip().splitlines()[-1] if isinstance(error, str) else "" for error in workers}) == 1


def forbid_pickles() -> None:
    """No strategy, and nothing of torch's that it uses, reads a pickle of another process."""
    import torch.distributed.distributed_c10d as torchs

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a pickle of another process would be read")

    assert callable(torchs._tensor_to_object)  # type: ignore[attr-defined]
    torchs._tensor_to_object = refuse  # type: ignore[attr-defined]


def main(plan: str, folder: str) -> None:
    forbid_pickles()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    for name, case, world in torch.load(plan, weights_only=False):
        target = Path(folder, name)
        target.mkdir(parents=True, exist_ok=True)
        faulthandler.dump_traceback_later(CASE_SECONDS, exit=True)
        torch.manual_seed(hash(name) % 2**31)  # what an earlier case left in the generators must not matter
        outcome = attempt(case, world, target)
        faulthandler.cancel_dump_traceback_later()
        torch.save(outcome, target / f"part.{RANK}")
        (target / f"part.{RANK}").rename(target / f"result.{RANK}")
        if isinstance(outcome, str) and not alike_everywhere(target):
            raise RuntimeError(f"{name} failed on rank {RANK}\n{outcome}")
