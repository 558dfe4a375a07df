"""A run that is to be handed over to a scheduler, and what a scheduler must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class BatchJob:
    """One run, in words that every scheduler has.

    Attributes:
        name: by which the scheduler lists it.
        command: what starts on each node, up to the place to meet: python -m paceline run ... The first word is the
            interpreter.
        script: the script with its arguments, or `-m` and a module's.
        nodes: how many machines.
        nproc: processes on each of them.
        gpus: to reserve on each; 0: none.
        time: the limit on its running time, as the scheduler writes it; None: the scheduler's own.
        partition: the queue; None: the default one.
        account: who pays; None: the default one.
        notice: put the job back into the queue when it must make room, after the scheduler's signal so many seconds
            before; None: do not.
        endpoint: HOST:PORT where the nodes meet; None: at the first node of the job.
        more: options of the scheduler's own, as KEY=VALUE or KEY.
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
    """A job that a scheduler has taken."""

    number: str  # its id
    output: str  # the file of what it prints
    watch: str  # the command that shows how it stands
    cancel: str  # the command that ends it
    never: str | None  # why it will not start although it was taken; None: it will


class Scheduler(Protocol):
    """Makes a batch script of a job, and hands it over."""

    def script(self, job: BatchJob) -> str:
        """The script. Raises SettingError where the job cannot be said to this scheduler."""

    def submit(self, job: BatchJob) -> Submitted:
        """Raises LaunchError where the scheduler is not there, or refuses the job."""
