"""What is to be run, and with what command line and environment each worker starts.

Pure, but for a look at the script and at this machine's cores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline import config
from paceline import world as names
from paceline.errors import LaunchError
from paceline.world import World


@dataclass(frozen=True)
class Plan:
    """One run on this machine.

    Attributes:
        script: path of the user's script, as typed.
        args: its arguments, untouched.
        nproc: the number of workers.
        settings: what was given on the command line, by name; only what was given.
    """

    script: str
    args: tuple[str, ...]
    nproc: int
    settings: Mapping[str, object]


def make_plan(script: str, args: Sequence[str], nproc: str | int, settings: Mapping[str, object]) -> Plan:
    """Check what can be checked before anything starts.

    Raises:
        LaunchError: `nproc` is no number of processes, or `script` is no file that can be read.
        SettingError: one of `settings` cannot work.
    """
    if os.path.isdir(script):
        inside = os.path.join(script, "train.py")
        raise LaunchError(f"{script!r} is a directory. Name the Python script in it, for example {inside!r}.")
    if not os.path.isfile(script):
        raise LaunchError(
            f"There is no script {script!r} in {os.getcwd()!r}. The options of paceline come before the script, the "
            f"script's own after it: `paceline run --nproc 2 train.py --epochs 3`."
        )
    if not os.access(script, os.R_OK):
        raise LaunchError(f"The script {script!r} may not be read by this user. Change its permissions.")
    config.resolve(("the command line", settings))  # the workers would say the same, but seconds later
    return Plan(script, tuple(args), count_processes(nproc, available_cores(), _visible_gpus), dict(settings))


def count_processes(nproc: str | int, cores: int, gpus: Callable[[], int]) -> int:
    """The number that `nproc` says: a number, or torchrun's words "gpu", "cpu" and "auto" (gpus, else cores)."""
    if str(nproc) in ("gpu", "auto"):
        count = gpus()
        if count == 0 and nproc == "gpu":
            raise LaunchError("--nproc gpu: no GPU is visible to torch. Give a number, or `--nproc cpu`.")
        return count or cores
    if str(nproc) == "cpu":
        return cores
    try:
        count = int(nproc)
    except ValueError:
        count = 0
    if count < 1:
        raise LaunchError(f"--nproc {nproc}: give the number of processes, 1 or more (or `gpu`, `cpu` or `auto`).")
    return count


def available_cores() -> int:
    """The cores that this process may use, which taskset and Slurm limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def command_line(plan: Plan) -> list[str]:
    """The same for every worker: what differs is in the environment."""
    return [sys.executable, "-m", "paceline.launcher.worker", plan.script, *plan.args]


def thread_budget(nproc: int, cores: int) -> int:
    """Threads for each worker, so that together they do not ask for more than there are cores."""
    return max(1, cores // nproc)


def loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def worker_environment(
    plan: Plan, world: World, *, error_file: str, run_id: str, launcher_pid: int, cores: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of one worker: `environ`, and over it what torchrun would set and what Paceline adds.

    Args:
        world: the worker's place; `from_env` of the result gives it back.
        error_file: where the worker writes the exception that ends it.
        run_id: the name of the run, alike for all workers.
        launcher_pid: the process whose end is to end the worker.
        cores: the number of cores to share out.
        environ: the launcher's environment.
    """
    lo = loopback_interface()
    added = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "GROUP_RANK": str(world.node),
        "GROUP_WORLD_SIZE": str(world.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(world.rank),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": str(world.master_addr),
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own, which would listen everywhere
        "TORCHELASTIC_ERROR_FILE": "",  # an outer torchrun's, if any, is not ours to write
        # All workers are on this machine, so that nothing needs to be reachable from outside it.
        "GLOO_SOCKET_IFNAME": lo,
        "NCCL_SOCKET_IFNAME": lo,
        "TP_SOCKET_IFNAME": lo,  # torch.distributed.rpc
        names.LAUNCHER_PID: str(launcher_pid),
        names.ERROR_FILE: error_file,
        names.SETTINGS: json.dumps(dict(plan.settings)),
    }
    defaults = {
        "OMP_NUM_THREADS": str(thread_budget(plan.nproc, cores)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
    }
    return {**defaults, **environ, **added}
