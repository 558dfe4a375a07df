"""The plan of a run, and the command line and environment of each worker.

Pure, except that it checks the script and ports, reads the settings file, and counts this machine's cores and GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import config
from paceline import world as names
from paceline.errors import LaunchError, SettingError
from paceline.launcher import checks
from paceline.launcher.nodes import ALONE, Nodes
from paceline.torch_private.variables import check_variables
from paceline.world import World

MOST_PROCESSES = 10_000  # on one machine; a larger number must be a typing error

StrategyCheck = Callable[[config.StrategySpec | None, int | None, int | None], int]
"""The type of strategies.check(strategy, number of processes, `reproducible`). None means unknown or not set. It raises
SettingError if these do not work together, and returns the number of processes that need no accelerator."""


@dataclass(frozen=True)
class Plan:
    """One run, as this machine's launcher sees it.

    Attributes:
        script: path of the user's script, as typed; a module's name; or the file of a pickled function.
        args: arguments of the script, passed unchanged.
        nproc: the number of workers on this machine.
        elastic: the minimum and maximum number of workers after a restart (restart_policy.py); None: always `nproc`.
        settings: settings from the command line, by name. "config" is the path of the settings file.
        kind: the kind of `script`: "script", "module" or "function".
        nodes: the machines of the run.
        max_restarts: the maximum number of restarts of all workers after failures.
        memory_every: steps between two in-memory checkpoints (state/memory_checkpoints.py); None: none.
        monitor_seconds: seconds between two polls of the workers.
        output: the directory for the ranks' output; None: a temporary directory.
        tee: the ranks to show besides the first, each line marked with its rank; None: all.
        timeout_seconds: end the run after this time; None: never.
        stall_seconds: seconds that a rank may wait for others before a report; None: based on the usual batch time.
        stall_action: the action after the report: "say" (none), "end" or "restart" (stalls.py).
        device: the device setting, if known to the launcher.
        on_cpu: the number of workers that need no accelerator, if known to the launcher.
        variables: additional environment variables of the workers.
        worker: the module that each worker runs, with the script as its arguments.
        hash_seed: PYTHONHASHSEED of the workers, unless the environment sets it. None: each process chooses one, as
            under torchrun. Without a common seed, ranks iterate over sets of strings in different orders, so a
            vocabulary built from a set would differ.
    """

    script: str
    args: tuple[str, ...]
    nproc: int
    settings: Mapping[str, object]
    elastic: tuple[int, int] | None = None
    kind: str = "script"
    nodes: Nodes = ALONE
    max_restarts: int = 0
    memory_every: int | None = None
    monitor_seconds: float = 0.05
    output: str | None = None
    tee: frozenset[int] | None = frozenset()
    timeout_seconds: float | None = None
    stall_seconds: float | None = None
    stall_action: str = "say"
    device: str | None = None
    on_cpu: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    worker: str = "paceline.launcher.worker"
    hash_seed: str | None = "0"


def make_plan(
    script: str,
    args: Sequence[str],
    nproc: str | int,
    settings: Mapping[str, object],
    check_strategy: StrategyCheck | None = None,
    **rest: Any,
) -> Plan:
    """Make a plan, and check everything that can be checked before a process starts.

    Args:
        check_strategy: called if the command line or the settings file sets `strategy` or `reproducible`.
        rest: other attributes of Plan. `tee` is as typed.

    Raises:
        LaunchError: an invalid option, such as `nproc`, or a `script` that cannot be read.
        SettingError: an invalid value in `settings`, the settings file, or torch's environment variables.
    """
    check_variables(os.environ)
    kind, nodes = rest.get("kind", "script"), rest.get("nodes", ALONE)
    if kind == "script":
        checks.check_script(script)
    elif kind == "module":
        checks.check_module(script)
    if rest.get("max_restarts", 0) < 0:
        raise LaunchError(f"--max-restarts {rest['max_restarts']}: give 0 or more.")
    _check_memory(rest.get("memory_every"), rest.get("max_restarts", 0))
    if rest.get("monitor_seconds", 1.0) <= 0:
        raise LaunchError(f"--monitor-interval {rest['monitor_seconds']}: give seconds above 0, such as 0.1.")
    checks.check_outer_world(os.environ, nodes)
    given, layers = _settings(script, kind, settings)
    device = config.resolve(*layers)[0].device
    fewest, elastic, most = str(nproc).rpartition(":")
    beside = 0  # workers without a GPU, in addition to one per GPU
    if check_strategy is not None and most in ("gpu", "auto") and not nodes.several:
        beside = _check_strategy(check_strategy, layers, None)
    if elastic:
        _check_range(str(nproc), fewest, most, rest.get("max_restarts", 0))
    count = count_processes(most, available_cores(), _visible_gpus, beside)
    if elastic:
        if int(fewest) > count:
            raise LaunchError(
                f"--nproc {nproc}: {most} is {count} on this machine, less than MIN. Give MIN:MAX, such as 6:8."
            )
        rest["elastic"] = (int(fewest), count)
    on_cpu = 0
    if check_strategy is not None:
        fixed = nodes.min_nodes == nodes.max_nodes
        sizes = range(int(fewest or count) * nodes.max_nodes, count * nodes.max_nodes + 1) if fixed else [None]
        for size in sizes if elastic else sizes[-1:]:  # keep the result for the largest size
            try:
                on_cpu = _check_strategy(check_strategy, layers, size)
            except SettingError as error:
                if size == sizes[-1]:
                    raise
                raise SettingError(f"{error} (--nproc {nproc} may result in {size} processes.)") from None
    most_ranks = count
    if elastic:
        capacity = checks.device_capacity(device, checks.device_count(), on_cpu)
        count = count if capacity is None else max(int(fewest), min(count, capacity))
    if not nodes.several and nodes.port:
        checks.check_port("127.0.0.1", nodes.port, "--master-port")
    elif nodes.backend == "static" and nodes.rank == 0:
        checks.check_port(nodes.host, nodes.port, "--master-port" if nodes.host else "--rdzv-endpoint")
    rest["tee"] = read_ranks(rest.get("tee", ""), None if nodes.several else most_ranks)
    return Plan(script, tuple(args), count, given, device=device, on_cpu=on_cpu, **rest)


Layers = list[tuple[str, Mapping[str, Any]]]
_CHECKED = ("strategy", "reproducible")


def _settings(script: str, kind: str, settings: Mapping[str, object]) -> tuple[dict[str, object], Layers]:
    """Return the settings for the workers, and the layers for `config.resolve`.

    The launcher resolves the settings too, because it finds errors seconds earlier than the workers.
    """
    given = dict(settings)
    path = given.pop("config", None)
    if path is not None:
        given["config"] = path = os.path.abspath(str(path))
    elif kind != "module":  # the file of a module is unknown here
        beside = config.file_beside(script if kind == "script" else None)
        path = str(beside) if beside is not None else None
    where = "paceline.launch(...)" if kind == "function" else "the command line"
    layers: Layers = [(where, {key: value for key, value in given.items() if key != "config"})]
    if path is not None:
        layers.insert(0, (path, config.read_file(path)))
    return given, layers


def _check_strategy(check: StrategyCheck, layers: Layers, size: int | None) -> int:
    """Check the strategy from the command line or the settings file, and return the check's result.

    An error says where the setting was made.
    """
    found = {key: (values[key], place) for place, values in layers for key in _CHECKED if values.get(key) is not None}
    if not found:  # the script may set a strategy, which is unknown here
        return 0
    strategy, shards = (found.get(key, (None, ""))[0] for key in _CHECKED)
    try:
        return check(None if strategy is None else config.parse_strategy(strategy), size, shards)
    except SettingError as error:
        named = (place for key, (_, place) in found.items() if key == "strategy" or key in str(error))
        raise SettingError(f"{error} (Set by {' and '.join(dict.fromkeys(named))}.)") from None


def read_ranks(text: str, size: int | None) -> frozenset[int] | None:
    """Parse "1,3" or "0-3,7" as a set of ranks, and "all" as None.

    Args:
        size: the number of ranks, if known.
    """
    if text == "all":
        return None
    ranks: set[int] = set()
    for part in filter(None, text.split(",")):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise LaunchError(f"--tee {text}: give ranks, such as 1,3 or 1-3, or `all`.")
        ranks |= set(range(int(first), int(last or first) + 1))
    if size is not None and ranks and max(ranks) >= size:
        raise LaunchError(
            f"--tee {text}: there is no rank {max(ranks)}, only 0 to {size - 1}. Give ranks, or `all` "
            "(torchrun's `--tee 3`)."
        )
    return frozenset(ranks)


def count_processes(nproc: str | int, cores: int, gpus: Callable[[], int], beside: int = 0) -> int:
    """Return the number of processes for `nproc`: a number, or torchrun's "gpu", "cpu" or "auto" (GPUs, else cores).

    Args:
        beside: the number of processes that need no GPU, in addition to one per GPU.
    """
    if str(nproc) in ("gpu", "auto"):
        count = gpus()
        if count == 0 and nproc == "gpu":
            raise LaunchError("--nproc gpu: no GPU is visible to torch. Give a number, or `--nproc cpu`.")
        return count + beside if count else cores
    if str(nproc) == "cpu":
        return cores
    try:
        count = int(nproc)
    except ValueError:
        count = 0
    if not 1 <= count <= MOST_PROCESSES:
        raise LaunchError(
            f"--nproc {nproc}: give the number of processes, from 1 to {MOST_PROCESSES} (or `gpu`, `cpu` or `auto`)."
        )
    return count


def _check_memory(every: int | None, max_restarts: int) -> None:
    if every is None:
        return
    if every < 1:
        raise LaunchError(f"--memory-every {every}: give a number of steps, at least 1, such as 20.")
    if max_restarts < 1:
        raise LaunchError(
            f"--memory-every {every}: in-memory checkpoints are for restarts, but no restart is allowed. Give "
            "--max-restarts N too."
        )


def _check_range(nproc: str, fewest: str, most: str, max_restarts: int) -> None:
    """Raise LaunchError for an invalid `--nproc MIN:MAX`."""
    if not fewest.isdecimal() or int(fewest) < 1 or not (most.isdecimal() or most in ("gpu", "cpu", "auto")):
        raise LaunchError(
            f"--nproc {nproc}: give MIN:MAX, such as 6:8. MIN must be at least 1. MAX may also be `gpu`, `cpu` or "
            "`auto`."
        )
    if max_restarts < 1:
        raise LaunchError(
            f"--nproc {nproc}: the number of processes changes only at a restart, but no restart is allowed. Give "
            "--max-restarts too (of paceline run), or one number."
        )


def available_cores() -> int:
    """Return the number of cores that this process may use. taskset and Slurm may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def command_line(plan: Plan) -> list[str]:
    """Return the command line of a worker. It is the same for all workers; only their environments differ."""
    return [sys.executable, "-m", plan.worker, plan.kind, plan.script, *plan.args]


def thread_budget(nproc: int, cores: int) -> int:
    """Return the number of threads per worker: an equal share of the cores, at least 1."""
    return max(1, cores // nproc)


def loopback_interface() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


def worker_environment(
    plan: Plan,
    world: World,
    *,
    error_file: str,
    run_id: str,
    launcher_pid: int,
    cores: int,
    environ: Mapping[str, str],
    restarts: int = 0,
) -> dict[str, str]:
    """Return the whole environment of one worker: `environ`, torchrun's variables, and Paceline's.

    Args:
        world: the worker's world, which `from_env` reads from the result.
        error_file: the worker's file for the exception that ended it.
        run_id: the name of the run, the same for all workers.
        launcher_pid: the launcher's process id. The worker ends when that process ends.
        cores: the number of cores to divide among the workers.
        environ: the launcher's environment.
        restarts: the number of earlier starts, the same on all nodes.
    """
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
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # so that rank 0 opens no store on all interfaces
        "TORCHELASTIC_ERROR_FILE": "",  # do not write to the file of an outer torchrun
        names.LAUNCHER_PID: str(launcher_pid),
        names.ERROR_FILE: error_file,
        names.SETTINGS: json.dumps(dict(plan.settings)),
    }
    if plan.nodes.loopback:  # all workers are on this machine, so nothing needs to be reachable from outside
        lo = loopback_interface()
        added |= {"GLOO_SOCKET_IFNAME": lo, "NCCL_SOCKET_IFNAME": lo, "TP_SOCKET_IFNAME": lo}  # TP: for RPC
    defaults = {
        "OMP_NUM_THREADS": str(thread_budget(plan.nproc, cores)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
    }
    if plan.hash_seed is not None:
        defaults["PYTHONHASHSEED"] = plan.hash_seed
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in plan.variables:
        added[names.THREAD_BUDGET] = defaults["OMP_NUM_THREADS"]
    return {**defaults, **environ, **added, **plan.variables}
