"""`paceline submit`: check the job, then print the batch script or submit it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.config import StrategySpec
from paceline.errors import LaunchError
from paceline.launcher.nodes import read_nodes
from paceline.launcher.plan import make_plan
from paceline.submit.batch_job import BatchJob, Scheduler


@dataclass(frozen=True)
class SubmitOptions:
    """The options of the command line.

    Attributes:
        script, args, module: as for `paceline run`.
        settings: the settings of the run, to be checked.
        launch: other options of `paceline run` that are checked here: max_restarts, tee.
        run: all options for `paceline run`, as typed.
        nodes, gpus, time, partition, account, endpoint, more: as in BatchJob.
        nproc: processes per node; None: one per reserved GPU, or one without GPUs.
        name: the job's name; None: the script's name.
        requeue: requeue the job when it is preempted.
        notice: seconds between the scheduler's signal and the preemption.
        dry_run: print the script and submit nothing.
    """

    script: str
    args: tuple[str, ...]
    module: bool
    settings: Mapping[str, object]
    launch: Mapping[str, object]
    run: Sequence[str]
    nodes: int
    nproc: int | None
    gpus: int
    name: str | None
    time: str | None
    partition: str | None
    account: str | None
    endpoint: str | None
    requeue: bool
    notice: int
    more: tuple[str, ...]
    dry_run: bool


def submit(
    scheduler: Scheduler,
    options: SubmitOptions,
    check_strategy: Callable[[StrategySpec | None, int | None, int | None], int],
) -> str:
    """Submit the job. Return the text to print: the script, or the job's number and how to watch it.

    Raises:
        SettingError, LaunchError: the job cannot be run or submitted.
    """
    for name, value in (("nodes", options.nodes), ("nproc", options.nproc), ("signal", options.notice)):
        if value is not None and value < 1:
            raise LaunchError(f"--{name} {value}: give a whole number, 1 or more.")
    if options.gpus < 0:
        raise LaunchError(f"--gpus-per-node {options.gpus}: give a whole number, 0 or more.")
    nproc = options.nproc or options.gpus or 1
    if 0 < options.gpus < nproc and options.settings.get("device") is None:
        raise LaunchError(
            f"--nproc {nproc} --gpus-per-node {options.gpus}: each process needs its own GPU. Give the same number for "
            "both, or choose the processes' device with --device."
        )
    place = {"rdzv_endpoint": options.endpoint or "the-first-node"} if options.nodes > 1 else {}
    kind = "module" if options.module else "script"
    # The batch script creates the secret, so none is needed here.
    nodes = read_nodes(nnodes=str(options.nodes), rdzv_insecure=True, **place)  # type: ignore[arg-type]  # strings
    rest = {"kind": kind, "nodes": nodes, **options.launch}
    make_plan(options.script, options.args, nproc, options.settings, check_strategy, **rest)
    stem = options.script if options.module else os.path.splitext(os.path.basename(options.script))[0]
    job = BatchJob(
        name=options.name or stem,
        command=[sys.executable, "-m", "paceline", "run", *options.run],
        script=[options.script, *options.args],
        nodes=options.nodes,
        nproc=nproc,
        gpus=options.gpus,
        time=options.time,
        partition=options.partition,
        account=options.account,
        notice=options.notice if options.requeue else None,
        endpoint=options.endpoint,
        more=options.more,
    )
    if options.dry_run:
        return scheduler.script(job)
    done = scheduler.submit(job)
    machines = f"{job.nodes} nodes, " if job.nodes > 1 else ""
    never = f"The job will never start ({done.never}): the cluster cannot run it. Cancel it, and submit another.\n"
    return (
        f"submitted job {done.number}: {machines}{job.nodes * nproc} process{'es' * (job.nodes * nproc > 1)}\n"
        f"output:    {done.output}\n"
        f"state:     {done.watch}\n"
        f"cancel:    {done.cancel}\n"
    ) + (never if done.never else "")
