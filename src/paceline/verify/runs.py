"""What `paceline verify` is asked, and the runs that it makes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline import strategies
from paceline.config import StrategySpec, parse_strategy
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Script, Start, place_strategy, replica_devices
from paceline.verify.run_record import RunRecord

SINGLE = StrategySpec("single")  # of a run of one process that computes whole batches
SUBJECT = "A"  # the name of the run in question
RUN_DESCRIPTIONS = {  # by the name of the run
    "A": "the run in question",
    "A0": "the same, with dropout off",
    "B": "one process, the same shards in turn",
    "B0": "the same, with dropout off",
    "B1": "one process, the same shards at once",
    "B2": "one process, the same shards, once more",
    "C": "one process, whole batches",
    "C2": "the same, in reverse order and rounded elsewhere",
    "C3": "the same in order, and rounded elsewhere",
    "C4": "one process, whole batches, once more",
    "D": "the run in question, each process told that it is alone",
    "L": "the run in question, its lines watched",
    "LC": "one process, whole batches, its lines watched",
    "LD": "each process told that it is alone, its lines watched",
    "P": "the run in question, with one shard's loss alone",
    "T": "the run in question, each shard on another rank",
}


def describe_run(run: str) -> str:
    """What a run is, in words. The runs P0, P1, ... have one shard's loss alone. A name without a description is a run
    that is repeated."""
    return RUN_DESCRIPTIONS.get("P" if run.startswith("P") else run, "once more")


@dataclass(frozen=True)
class VerifyOptions:
    """What the command line asks for."""

    script: Script  # the script
    nproc: str | int  # processes: a number, or gpu, cpu, auto
    strategy: str | None = None  # of the run in question; None: the script's own
    precision: str | None = None  # None: the script's own
    steps: int = 20  # how many steps are compared
    deadline: float = 300.0  # seconds; a longer run is ended
    json_file: str | None = None  # write the answer there


class Runs:
    """The runs of one question. How a run is launched is left to a subclass.

    Args:
        folder: each run leaves its records in a subfolder of its name.
        count: counts the accelerators.

    Raises:
        SettingError: a strategy that cannot be.
    """

    def __init__(self, options: VerifyOptions, nproc: int, folder: str, count: Callable[[], int]) -> None:
        self.options, self.nproc, self._folder, self._count = options, nproc, folder, count
        self.start = Start(None, nproc, options.precision)  # of the run in question
        self.recorded: set[str] = set()  # the runs that have left records of steps
        self.may_trace = True  # whether further runs may be made to find the line of a fault
        if options.strategy is not None:
            asked = parse_strategy(options.strategy)
            strategies.check(StrategySpec(asked.name), None)  # the name; plan_trial checks its options
            spec, processes, _ = place_strategy(asked, nproc, self.devices(nproc))
            self.start = Start(spec, processes, options.precision)

    def devices(self, count: int) -> list[str]:
        """Devices for so many replicas in one process."""
        return replica_devices(str(self.options.script.settings.get("device") or ""), count, self._count)

    def shards_in_sequence(self, shards: int) -> StrategySpec:
        """The strategy of one process that computes so many shards, one after the other."""
        return parse_strategy(f"single:shards={shards}") if shards > 1 else StrategySpec("single")

    def folder(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def run(self, name: str, strategy: StrategySpec | None = None, **how: Any) -> str | None:
        """Make one run, to its end. Return None, or why it failed.

        Args:
            name: the name of the run (RUN_DESCRIPTIONS).
            strategy: the strategy of a run of one process. None: the run in question's own strategy and processes.
            how: fields of TrialSpec, such as dropout_off=True.
        """
        os.makedirs(self.folder(name))
        start = self.start if strategy is None else Start(strategy, 1, self.options.precision)
        spec = {
            "directory": self.folder(name),
            "steps": self.options.steps,
            "reference": self.folder(SUBJECT),
            "in_question": name == SUBJECT,
            "single_process": strategy is not None,
        }
        return self.launch_run(name, start, TrialSpec(**{**spec, **how}))

    def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
        """Launch the run in its processes and wait for its end. Return None, or why it failed."""
        raise NotImplementedError

    def run_single_process(self, name: str, strategy: StrategySpec, **how: Any) -> tuple[RunRecord | None, str | None]:
        """Make a run of one process. Return its record, or why there is none."""
        failed = self.run(name, strategy, **how)
        record = self.load(name, 1) if failed is None else None
        if record is not None and record.steps:
            return record, None
        return None, failed or "it made no step"

    def load(self, name: str, processes: int) -> RunRecord | None:
        """The record that a run has left; None where a rank has left nothing.

        A run with steps then counts as recorded.
        """
        try:
            record = RunRecord(self.folder(name), processes)
        except FileNotFoundError:
            return None
        if record.steps:
            self.recorded.add(name)
        return record
