"""Trials in rounds: each round runs every case once, in fresh processes, one after the other.

Each round starts with a different case, so that noise from other programs on the machine affects all cases equally.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.compare.cases import BASELINE, Case, CompareOptions, baseline_case
from paceline.compare.figures import Record, Row, compute_figures, loss_difference
from paceline.compare.loss_causes import cause_of_difference
from paceline.compare.table import number
from paceline.config import StrategySpec
from paceline.errors import PacelineError, printable
from paceline.launcher import streams
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Length, Script, Start
from paceline.trials.trial import launch_trial, one_line_reason, plan_trial, quiet_output


def check_cases(script: Script, cases: Sequence[Case], length: Length, named: bool) -> None:
    """Raises LaunchError or SettingError if the command cannot work.

    named: whether the user named these strategies. Then a wrong option is an error. A strategy that cannot run with any
    option (a library is missing, or there are too few processes) becomes a row that reports this. It is an error only
    if no named strategy remains besides `single`.
    """
    for case in cases:
        plan_trial(script, _start_of(case), length, check_strategy=False)
    if not named:
        return
    refused: list[PacelineError] = []
    asked = [case for case in cases if case.spec.name != BASELINE]
    for case in asked:
        try:
            plan_trial(script, _start_of(case), length)
        except PacelineError as error:
            if _can_run(script, case, length):
                raise
            refused.append(error)
    if refused and len(refused) == len(asked):
        raise refused[0]


def _can_run(script: Script, case: Case, length: Length) -> bool:
    """Whether the case's strategy can run on this machine without options."""
    try:
        plan_trial(script, Start(StrategySpec(case.spec.name), case.processes, case.precision), length)
    except PacelineError:
        return False
    return True


def run_rounds(options: CompareOptions, asked: Sequence[Case], length: Length, interrupts: Interrupts) -> list[Row]:
    """Run all rounds. Return a row for each case.

    A signal ends the rounds; `interrupts.due` is then its number. The rows contain the results so far.
    """
    rounds: dict[str, list[list[Record]]] = {case.name: [] for case in asked}
    failed: dict[str, str] = {}
    try:
        for turn in range(options.rounds):
            for case in _rotated(asked, turn):
                if case.name in failed:
                    continue
                _say(f"round {turn + 1} of {options.rounds}: {case.name} ... ")
                try:
                    found = run_trial(options.script, case, length, interrupts)
                    speed = number(compute_figures([found]).examples_per_second) if not isinstance(found, str) else ""
                except Exception as error:  # only this case fails; the others continue (Stopped is not one)
                    found = one_line_reason(f"{type(error).__name__}: {error}")
                if isinstance(found, str):
                    failed[case.name] = f"in round {turn + 1}: {found}" if rounds[case.name] else found
                    _say("failed\n")
                else:
                    rounds[case.name].append(found)
                    _say(f"{speed} examples/s\n")
    except Stopped:
        _say("\n")
        for case in asked:
            if not rounds[case.name]:
                failed.setdefault(case.name, "not tried: the command was stopped first")
    return _rows(asked, rounds, failed)


def _rotated(asked: Sequence[Case], turn: int) -> Iterator[Case]:
    """Each case once, starting with a different case in every round."""
    for place in range(len(asked)):
        yield asked[(place + turn) % len(asked)]


def _rows(asked: Sequence[Case], rounds: Mapping[str, list[list[Record]]], failed: Mapping[str, str]) -> list[Row]:
    measured = {name: compute_figures(records) for name, records in rounds.items() if records}
    rows = []
    for case in asked:
        own, reference = measured.get(case.name), baseline_case(case, asked)
        base = measured.get(reference.name)
        difference = loss_difference(own.losses, base.losses) if own is not None and base is not None else None
        row = Row(case, own, failed.get(case.name), difference)
        rows.append(row if base is None else replace(row, cause=cause_of_difference(row, reference, base)))
    return rows


def _say(text: str) -> None:
    streams.write(sys.stderr, printable(text))  # a closed stderr does not end the measurement


def _start_of(case: Case) -> Start:
    return Start(case.spec, case.processes, case.precision)


def run_trial(script: Script, case: Case, length: Length, interrupts: Interrupts) -> list[Record] | str:
    """Run one trial. Return the records of all ranks, in rank order; or why it failed, in one line. Leaves no files.

    Raises:
        Stopped: a signal came; all processes have ended.
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
                f"rank {rank} never called paceline.start, or ended immediately (os._exit?). compare runs scripts that "
                "train with Paceline; `paceline doctor` watches other scripts"
            )
    made = max(len(record["steps"]) for record in records)
    if made <= length.warmup:
        return (
            f"the script ended after {made} steps, and the first {length.warmup} are not timed: let it make more "
            "steps, or lower --steps"
        )
    return records
