"""The description of a batch job, and the interface of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class BatchJob:
    """One run, described independently of the scheduler.

    Attributes:
        name: the job's name in the scheduler.
        command: the `paceline run` command for each node, without rendezvous options. Its first word is the Python
            interpreter.
        script: the script with its arguments, or `-m` and a module with its arguments.
        nodes: the number of machines.
        nproc: processes per machine.
        gpus: GPUs to reserve per machine; 0: none.
        time: limit on the running time, in the scheduler's format; None: the scheduler's default.
        partition: the queue; None: the default.
        account: the account to charge; None: the default.
        notice: requeue the job when it is preempted. The scheduler sends a signal this many seconds before. None: do
            not requeue.
        endpoint: HOST:PORT of the rendezvous; None: a port on the first node of the job.
        more: further options of the scheduler, as KEY=VALUE or KEY.
    """

    name: str
    command: Sequence[str]
    script: Sequence[str]
    nodes: int = 1
    nproc: int = 1
    gpus: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    notice: int | None = None
    endpoint: str | None = None
    more: Sequence[str] = ()


class Submitted(NamedTuple):
    """A job that a scheduler has accepted."""

    number: str  # the job's id
    output: str  # the file with the job's output
    watch: str  # the command that shows the job's state
    cancel: str  # the command that cancels the job
    never: str | None  # the reason why the job will never start; None if no such reason is known


class Scheduler(Protocol):
    """Writes and submits the batch script of a job."""

    def script(self, job: BatchJob) -> str:
        """Write the batch script. Raises SettingError if this scheduler cannot express the job."""

    def submit(self, job: BatchJob) -> Submitted:
        """Submit the job. Raises LaunchError if the scheduler is not available, or refuses the job."""
