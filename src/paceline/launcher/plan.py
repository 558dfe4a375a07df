"""What is run, with which command line and environment each worker starts.

Pure, but for a look at the script and at this machine's cores.
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

MOST_PROCESSES = 10_000  # of one machine. More is a typing error.

StrategyCheck = Callable[[config.StrategySpec | None, int | None, int | None], int]
"""Raises SettingError for a strategy (None: not known) that cannot work on so many processes (likewise), or not with
this `reproducible` (None: without). Returns how many of the processes need no accelerator: strategies.check."""


@dataclass(frozen=True)
class Plan:
    """One run, as this machine's launcher sees it.

    Attributes:
        script: path of the user's script, as typed; a module's name; or the file of a pickled function.
        args: its arguments, untouched.
        nproc: the number of workers on this machine.
        elastic: the fewest and the most workers that a restart may come to (restart_policy.py); None: always `nproc`.
        settings: what was given on the command line, by name. "config" is a file's path.
        kind: what `script` is: "script", "module" or "function".
        nodes: which machines take part.
        max_restarts: how often all workers are started again after a failure.
        memory_every: steps between two checkpoints in memory (state/memory_checkpoints.py); None: there are none.
        monitor_seconds: between two polls of the workers.
        output: the directory for what the ranks print; None: a temporary one.
        tee: ranks whose output is shown as well, each line marked; None: all.
        timeout_seconds: end the run after so long; None: never.
        stall_seconds: how long a rank may wait for others before it is said; None: by the usual time of a batch.
        stall_action: what is done besides: "say" (nothing), "end" or "restart" (stalls.py).
        device: the device setting, where the launcher can know it.
        on_cpu: how many workers need no accelerator, as far as the launcher can know it.
        variables: environment variables that the workers get besides.
        worker: the module that each worker runs, with the script as its arguments.
        hash_seed: PYTHONHASHSEED of the workers where the environment has none; None: each process chooses its own, as
            under torchrun. Without a common seed, a vocabulary that is numbered in the order of a set differs between
            ranks.
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
    """Check what can be checked before anything starts. `rest` are the other attributes of Plan, `tee` as typed.

    check_strategy is called if the command line or the settings file names a strategy.

    Raises:
        LaunchError: `nproc` is no number of processes, `script` is no file that can be read, or the like.
        SettingError: one of `settings`, of the settings file, or of torch's environment variables, cannot work.
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
        raise LaunchError(f"--monitor-interval {rest['monitor_seconds']}: give seconds, above 0, such as 0.1.")
    checks.check_outer_world(os.environ, nodes)
    given, layers = _settings(script, kind, settings)
    device = config.resolve(*layers)[0].device
    fewest, elastic, most = str(nproc).rpartition(":")
    beside = 0  # workers beside those that have a GPU each
    if check_strategy is not None and most in ("gpu", "auto") and not nodes.several:
        beside = _check_strategy(check_strategy, layers, None)
    if elastic:
        _check_range(str(nproc), fewest, most, rest.get("max_restarts", 0))
    count = count_processes(most, available_cores(), _visible_gpus, beside)
    if elastic:
        if int(fewest) > count:
            raise LaunchError(f"--nproc {nproc}: {most} is {count} here, which is less. Give MIN:MAX, such as 6:8.")
        rest["elastic"] = (int(fewest), count)
    on_cpu = 0
    if check_strategy is not None:
        fixed = nodes.min_nodes == nodes.max_nodes
        sizes = range(int(fewest or count) * nodes.max_nodes, count * nodes.max_nodes + 1) if fixed else [None]
        for size in sizes if elastic else sizes[-1:]:  # the last result is that of all
            try:
                on_cpu = _check_strategy(check_strategy, layers, size)
            except SettingError as error:
                if size == sizes[-1]:
                    raise
                raise SettingError(f"{error} (--nproc {nproc} may come to {size}.)") from None
    most_ranks = count
    if elastic:
        room = checks.room_for(device, checks.device_count(), on_cpu)
        count = count if room is None else max(int(fewest), min(count, room))
    if not nodes.several and nodes.port:
        checks.check_port("127.0.0.1", nodes.port, "--master-port")
    elif nodes.backend == "static" and nodes.rank == 0:
        checks.check_port(nodes.host, nodes.port, "--master-port" if nodes.host else "--rdzv-endpoint")
    rest["tee"] = read_ranks(rest.get("tee", ""), None if nodes.several else most_ranks)
    return Plan(script, tuple(args), count, given, device=device, on_cpu=on_cpu, **rest)


Layers = list[tuple[str, Mapping[str, Any]]]
_CHECKED = ("strategy", "reproducible")


def _settings(script: str, kind: str, settings: Mapping[str, object]) -> tuple[dict[str, object], Layers]:
    """(settings for the workers, layers for `config.resolve`). The launcher resolves them too, since the workers would
    find faults only seconds later."""
    given = dict(settings)
    path = given.pop("config", None)
    if path is not None:
        given["config"] = path = os.path.abspath(str(path))
    elif kind != "module":  # a module's file is not known here
        beside = config.file_beside(script if kind == "script" else None)
        path = str(beside) if beside is not None else None
    where = "paceline.launch(...)" if kind == "function" else "the command line"
    layers: Layers = [(where, {key: value for key, value in given.items() if key != "config"})]
    if path is not None:
        layers.insert(0, (path, config.read_file(path)))
    return given, layers


def _check_strategy(check: StrategyCheck, layers: Layers, size: int | None) -> int:
    """Check the strategy on the command line or else in the settings file. An error says where it is from. Returns what
    the check does."""
    found = {key: (values[key], place) for place, values in layers for key in _CHECKED if values.get(key) is not None}
    if not found:  # what the script says is not known here
        return 0
    strategy, shards = (found.get(key, (None, ""))[0] for key in _CHECKED)
    try:
        return check(None if strategy is None else config.parse_strategy(strategy), size, shards)
    except SettingError as error:
        named = (place for key, (_, place) in found.items() if key == "strategy" or key in str(error))
        raise SettingError(f"{error} (It is from {' and '.join(dict.fromkeys(named))}.)") from None


def read_ranks(text: str, size: int | None) -> frozenset[int] | None:
    """ "1,3" and "0-3,7" as a set of ranks, "all" as None. size: the number of ranks, where it is known."""
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
    """The number of processes for `nproc`: a number, or torchrun's words "gpu", "cpu" and "auto" (gpus, else cores).

    beside: how many processes need no GPU, so that they come on top of one for each.
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
            f"--memory-every {every}: what is kept in memory is for a restart, and none is allowed. Give "
            "--max-restarts N too."
        )


def _check_range(nproc: str, fewest: str, most: str, max_restarts: int) -> None:
    """Raises LaunchError for a `--nproc MIN:MAX` that cannot work."""
    if not fewest.isdecimal() or int(fewest) < 1 or not (most.isdecimal() or most in ("gpu", "cpu", "auto")):
        raise LaunchError(
            f"--nproc {nproc}: give MIN:MAX, two numbers of processes, such as 6:8. MIN is at least 1, and MAX may be "
            "`gpu`, `cpu` or `auto`."
        )
    if max_restarts < 1:
        raise LaunchError(
            f"--nproc {nproc}: a run goes on with fewer processes after a restart, and there is none. Give "
            "--max-restarts too (paceline run takes it), or one number."
        )


def available_cores() -> int:
    """The cores that this process may use, which taskset and Slurm limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def command_line(plan: Plan) -> list[str]:
    """The command line of a worker, the same for all: they differ in their environment."""
    return [sys.executable, "-m", plan.worker, plan.kind, plan.script, *plan.args]


def thread_budget(nproc: int, cores: int) -> int:
    """Threads for each of `nproc` workers: their share of the cores, at least one."""
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
    """The whole environment of one worker: `environ`, what torchrun would set, and what Paceline adds.

    Args:
        world: the worker's place; `from_env` of the result gives it back.
        error_file: where the worker writes the exception that ends it.
        run_id: the name of the run, alike for all workers.
        launcher_pid: the process whose end is to end the worker.
        cores: the number of cores to share out.
        environ: the launcher's environment.
        restarts: how often workers have been started before, alike on all nodes.
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
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 opens no store of its own, which would listen everywhere
        "TORCHELASTIC_ERROR_FILE": "",  # an outer torchrun's, if any, is not ours to write
        names.LAUNCHER_PID: str(launcher_pid),
        names.ERROR_FILE: error_file,
        names.SETTINGS: json.dumps(dict(plan.settings)),
    }
    if plan.nodes.loopback:  # all workers are on this machine: nothing needs to be reachable from outside it
        lo = loopback_interface()
        added |= {"GLOO_SOCKET_IFNAME": lo, "NCCL_SOCKET_IFNAME": lo, "TP_SOCKET_IFNAME": lo}  # the last: rpc
    defaults = {
        "OMP_NUM_THREADS": str(thread_budget(plan.nproc, cores)),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun sets it
    }
    if plan.hash_seed is not None:
        defaults["PYTHONHASHSEED"] = plan.hash_seed
    if "OMP_NUM_THREADS" not in environ and "OMP_NUM_THREADS" not in plan.variables:
        added[names.THREAD_BUDGET] = defaults["OMP_NUM_THREADS"]
    return {**defaults, **environ, **added, **plan.variables}
