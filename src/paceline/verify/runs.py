"""The options of `paceline verify`, and the runs that it makes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline import strategies
from paceline.config import StrategySpec, parse_strategy
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Script, Start, place_strategy, replica_devices
from paceline.verify.run_record import RunRecord

SINGLE = StrategySpec("single")  # for a run of one process that computes whole batches
SUBJECT = "A"  # the name of the subject run
RUN_DESCRIPTIONS = {  # by the name of the run
    "A": "your run",
    "A0": "your run, with dropout off",
    "B": "one process, the same shards in sequence",
    "B0": "one process, the same shards, with dropout off",
    "B1": "one process, the same shards at once",
    "B2": "one process, the same shards, repeated",
    "C": "one process, whole batches",
    "C2": "one process, whole batches in reverse order, with different rounding",
    "C3": "one process, whole batches in order, with different rounding",
    "C4": "one process, whole batches, repeated",
    "D": "your run, with rank 0 of 1 reported to the script",
    "L": "your run, with its lines traced",
    "LC": "one process, whole batches, with its lines traced",
    "LD": "your run, with rank 0 of 1 reported to the script, with its lines traced",
    "P": "your run, with the loss of one shard only",
    "S": "one process, the batches of the ranks one after the other",
    "T": "your run, with each shard on another rank",
}


def describe_run(run: str) -> str:
    """Describe a run in words. P0, P1, ... share one description. A run without a description is a repetition."""
    return RUN_DESCRIPTIONS.get("P" if run.startswith("P") else run, "repeated")


@dataclass(frozen=True)
class VerifyOptions:
    """The options of the command line."""

    script: Script  # the script
    nproc: str | int  # processes: a number, or gpu, cpu, auto
    strategy: str | None = None  # of the subject run; None: the script's
    precision: str | None = None  # None: the script's
    steps: int = 20  # the number of steps to compare
    deadline: float = 300.0  # seconds; a longer run is ended
    json_file: str | None = None  # the file for the answer


class RunAhead(NamedTuple):
    """A run that was made before its result was needed."""

    spec: TrialSpec
    failed: str | None  # why it failed


class Runs:
    """The runs of one comparison. A subclass launches them.

    Args:
        folder: each run writes its records into a subfolder with its name.
        count: counts the accelerators.

    Raises:
        SettingError: the strategy is invalid.
    """

    def __init__(self, options: VerifyOptions, nproc: int, folder: str, count: Callable[[], int]) -> None:
        self.options, self.nproc, self._folder, self._count = options, nproc, folder, count
        self.start = Start(None, nproc, options.precision)  # of the subject run
        self.made_ahead: dict[str, RunAhead] = {}  # by the name of the run
        self.recorded: set[str] = set()  # the runs that left records of steps
        self.plain = True  # whether the script may be one that does not use Paceline
        self.may_trace = True  # whether further runs may be made to find the line of a fault
        if options.strategy is not None:
            asked = parse_strategy(options.strategy)
            strategies.check(StrategySpec(asked.name), None)  # only the name: plan_trial checks the options
            spec, processes, _ = place_strategy(asked, nproc, self.devices(nproc))
            self.start = Start(spec, processes, options.precision)

    def devices(self, count: int) -> list[str]:
        """Devices for this number of replicas in one process."""
        return replica_devices(str(self.options.script.settings.get("device") or ""), count, self._count)

    def shards_in_sequence(self, shards: int) -> StrategySpec:
        """The strategy of one process that computes this number of shards in sequence."""
        return parse_strategy(f"single:shards={shards}") if shards > 1 else StrategySpec("single")

    def folder(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def run(self, name: str, strategy: StrategySpec | None = None, **how: Any) -> str | None:
        """Make one run and wait for its end. Return None, or why it failed.

        Args:
            name: the name of the run (RUN_DESCRIPTIONS).
            strategy: the strategy of a run of one process. None: the strategy and the processes of the subject run.
            how: fields of TrialSpec, such as dropout_off=True.
        """
        start, spec = self.plan_run(name, strategy, how)
        made = self.made_ahead.pop(name, None)
        if made is not None and made.spec == spec and made.failed is None:
            return None
        if made is not None:
            self.discard(name)
        os.makedirs(self.folder(name))
        return self.launch_run(name, start, spec)

    def plan_run(self, name: str, strategy: StrategySpec | None, how: Mapping[str, Any]) -> tuple[Start, TrialSpec]:
        """The start and the task of a run (see `run`)."""
        start = self.start if strategy is None else Start(strategy, 1, self.options.precision)
        spec = {
            "directory": self.folder(name),
            "steps": self.options.steps,
            "reference": self.folder(SUBJECT),
            "is_subject": name == SUBJECT,
            "single_process": strategy is not None,
        }
        return start, TrialSpec(**{**spec, **how})

    def ahead(self, name: str, strategy: StrategySpec, **how: Any) -> contextlib.AbstractContextManager[None]:
        """Make a run of one process at the same time as another one, which the caller makes in this context.

        A later call of `run` with the same arguments returns its result. A subclass without room for two runs makes
        none.
        """
        return contextlib.nullcontext()

    def discard(self, name: str) -> None:
        """Remove the files of a run, so that it can be made again."""
        shutil.rmtree(self.folder(name))
        RunRecord.forget_files()

    def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
        """Launch the run in its processes and wait for its end. Return None, or why it failed."""
        raise NotImplementedError

    def find_faults(self) -> list[dict[str, Any]]:
        """The faults that `paceline doctor` finds in the script, as its JSON."""
        return []

    def run_single_process(self, name: str, strategy: StrategySpec, **how: Any) -> tuple[RunRecord | None, str | None]:
        """Make a run of one process. Return (its record, None), or (None, the reason why there is no record)."""
        failed = self.run(name, strategy, **how)
        record = self.load(name, 1) if failed is None else None
        if record is not None and record.steps:
            return record, None
        return None, failed or "it made no step"

    def load(self, name: str, processes: int) -> RunRecord | None:
        """Load the record of a run; None if a rank has written none.

        If the run made steps, its name is added to `recorded`.
        """
        try:
            record = RunRecord(self.folder(name), processes)
        except FileNotFoundError:
            return None
        if record.steps:
            self.recorded.add(name)
        return record
