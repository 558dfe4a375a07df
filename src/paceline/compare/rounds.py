"""Trials in rounds: in each round every case once, in fresh processes, one after the other.

Each round begins with another case. So no case always has the same place, and a machine that others use as well is as
noisy for every case.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from paceline.compare.cases import Case, CompareOptions, baseline_case
from paceline.compare.figures import Record, Row, compute_figures, examples_per_second, loss_difference
from paceline.compare.table import number
from paceline.errors import printable
from paceline.launcher import streams
from paceline.launcher.interrupts import Interrupts
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Length, Script, Start
from paceline.trials.trial import launch_trial, plan_trial, quiet_output


def check_cases(script: Script, cases: Sequence[Case], length: Length, named: bool) -> None:
    """Raises LaunchError or SettingError where a setting cannot work.

    named: the user named these strategies. Else a strategy that cannot work here becomes a row that says so.
    """
    for case in cases:
        plan_trial(script, _start_of(case), length, check_strategy=named)


def run_rounds(options: CompareOptions, asked: Sequence[Case], length: Length, interrupts: Interrupts) -> list[Row]:
    """Run all rounds. Return a row for each case."""
    rounds: dict[str, list[list[Record]]] = {case.name: [] for case in asked}
    failed: dict[str, str] = {}
    for turn in range(options.rounds):
        for case in _rotated(asked, turn):
            if case.name in failed:
                continue
            _say(f"round {turn + 1} of {options.rounds}: {case.name} ... ")
            found = run_trial(options.script, case, length, interrupts)
            if isinstance(found, str):
                failed[case.name] = found
                _say("failed\n")
            else:
                rounds[case.name].append(found)
                _say(f"{number(examples_per_second(found))} examples/s\n")
    return _rows(asked, rounds, failed)


def _rotated(asked: Sequence[Case], turn: int) -> Iterator[Case]:
    """Each case once. The first case is another one in every round."""
    for place in range(len(asked)):
        yield asked[(place + turn) % len(asked)]


def _rows(asked: Sequence[Case], rounds: Mapping[str, list[list[Record]]], failed: Mapping[str, str]) -> list[Row]:
    measured = {case.name: compute_figures(rounds[case.name]) for case in asked if case.name not in failed}
    rows = []
    for case in asked:
        if case.name in failed:
            rows.append(Row(case, failed=failed[case.name]))
            continue
        own, base = measured[case.name], measured.get(baseline_case(case, asked).name)
        difference = None if base is None else loss_difference(own.losses, base.losses)
        rows.append(Row(case, own, difference=difference))
    return rows


def _say(text: str) -> None:
    streams.write(sys.stderr, printable(text))  # that nobody reads it ends no measurement


def _start_of(case: Case) -> Start:
    return Start(case.spec, case.processes, case.precision)


def run_trial(script: Script, case: Case, length: Length, interrupts: Interrupts) -> list[Record] | str:
    """Run one trial. Return the ranks' records, by rank; or in one line why there are none. Nothing is left behind.

    Raises:
        Stopped: a signal came, and no process is left.
    """
    with quiet_output() as output:
        spec = TrialSpec(output.private, length.steps, length.warmup, time.time(), case.global_batch)
        failed = launch_trial(script, _start_of(case), length, spec, interrupts, output)
        return _read_records(output.private, case.processes, length) if failed is None else failed


def _read_records(directory: str, processes: int, length: Length) -> list[Record] | str:
    records = []
    for rank in range(processes):
        try:
            with open(os.path.join(directory, f"rank-{rank}.json")) as file:
                records.append(json.load(file))
        except FileNotFoundError:
            return (
                f"rank {rank} never called paceline.start, or ended at once (os._exit?). Compare runs scripts that "
                "train with Paceline; `paceline doctor` watches others"
            )
    made = max(len(record["steps"]) for record in records)
    if made <= length.warmup:
        return (
            f"the script ended after {made} steps, of which the first {length.warmup} are not timed: let it make more, "
            "or ask for fewer with --steps"
        )
    return records
