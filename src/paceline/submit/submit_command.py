"""`paceline submit`: check what can be checked here, then print the batch script, or hand the job over."""

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
    """What the command line said.

    Attributes:
        script, args, module: as of `paceline run`.
        settings: of the run, by name, to be checked.
        launch: other options of `paceline run` that can be checked here: max_restarts, tee.
        run: all options that `paceline run` is to be given, as typed.
        nodes, gpus, time, partition, account, endpoint, more: as of BatchJob.
        nproc: processes on each node; None: one for each GPU, or one.
        name: of the job; None: that of the script.
        requeue: put the job back into the queue when it must make room.
        notice: seconds before that, at which the scheduler sends its signal.
        dry_run: print the script, and submit nothing.
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
    """What to print: the script, or where the job is and how to watch it.

    Raises:
        SettingError, LaunchError: what cannot be run, or cannot be handed over.
    """
    for name, value in (("nodes", options.nodes), ("nproc", options.nproc), ("signal", options.notice)):
        if value is not None and value < 1:
            raise LaunchError(f"--{name} {value}: give a whole number, 1 or more.")
    if options.gpus < 0:
        raise LaunchError(f"--gpus-per-node {options.gpus}: give a whole number, 0 or more.")
    nproc = options.nproc or options.gpus or 1
    if 0 < options.gpus < nproc and options.settings.get("device") is None:
        raise LaunchError(
            f"--nproc {nproc} --gpus-per-node {options.gpus}: each process needs a GPU of its own. Give the same "
            "number twice, or say with --device what the processes use."
        )
    place = {"rdzv_endpoint": options.endpoint or "the-first-node"} if options.nodes > 1 else {}
    kind = "module" if options.module else "script"
    # The job makes its secret itself, and none is needed here.
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
    never = f"It will not start as it is ({done.never}): what it asks for is not there. End it, and submit another.\n"
    return (
        f"job {done.number} is submitted: {machines}{job.nodes * nproc} process{'es' * (job.nodes * nproc > 1)}\n"
        f"output:    {done.output}\n"
        f"its state: {done.watch}\n"
        f"to end it: {done.cancel}\n"
    ) + (never if done.never else "")
