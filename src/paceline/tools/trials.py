"""One trial: the script for a few steps, in fresh processes, and the records that its ranks leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import strategies
from paceline.errors import PacelineError
from paceline.launcher import checks
from paceline.launcher.interrupts import Interrupts
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan, make_plan
from paceline.tools.cases import Case
from paceline.world import TRIAL

Record = Mapping[str, Any]
"""What one rank wrote: trial/probe.py."""

_WHO = re.compile(r"^rank \d+ (failed: )?")
_MODULE = re.compile(r"\bpaceline\.errors\.")
_MOST = 400  # characters of a reason


@dataclass(frozen=True)
class Script:
    """What is run in every trial. settings: those of the command line that all cases share."""

    path: str
    args: Sequence[str]
    module: bool
    settings: Mapping[str, object]


@dataclass(frozen=True)
class Length:
    """steps of a trial; the first `warmup` of them are not timed. seconds: after which a trial is ended."""

    steps: int
    warmup: int
    seconds: float


def plan(script: Script, case: Case, length: Length, strategy: bool = True) -> Plan:
    """Raises LaunchError or SettingError for what can be seen before anything starts. strategy: look at that too."""
    own = {"strategy": str(case.spec), "precision": case.precision}
    settings = {**script.settings, **{key: value for key, value in own.items() if value is not None}}
    rest: dict[str, Any] = {"kind": "module" if script.module else "script", "timeout_seconds": length.seconds}
    look = strategies.check if strategy else None
    return make_plan(script.path, script.args, case.processes, settings, look, **rest)


def run_trial(script: Script, case: Case, length: Length, interrupts: Interrupts) -> list[Record] | str:
    """The ranks' records, by rank; or why there are none, in one line. Nothing is left behind.

    Raises Stopped: a signal came; no process is left.
    """
    from paceline.launcher.supervise import supervise

    with _output() as output:
        order = {
            "directory": output.private,
            "steps": length.steps,
            "warmup": length.warmup,
            "began": time.time(),
            "global_batch": case.global_batch,
        }
        try:
            planned = replace(plan(script, case, length), variables={TRIAL: json.dumps(order)})
            outcome = supervise(planned, interrupts, output)
        except PacelineError as error:
            return _one_line(str(error))
        finally:
            interrupts.deferred = False  # nothing runs
        if outcome.exit_code != 0:
            return reason(outcome.story)
        return _read(output.private, case.processes, length)


@contextlib.contextmanager
def _output() -> Iterator[Output]:
    output = Output(None, frozenset(), silent=True)
    try:
        yield output
    finally:
        output.close(failed=False)


def _read(directory: str, processes: int, length: Length) -> list[Record] | str:
    records = []
    for rank in range(processes):
        try:
            with open(os.path.join(directory, f"rank-{rank}.json")) as file:
                records.append(json.load(file))
        except FileNotFoundError:
            return f"rank {rank} never called paceline.start, or ended at once (os._exit?)"
    made = max(len(record["steps"]) for record in records)
    if made <= length.warmup:
        return (
            f"the script ended after {made} steps, of which the first {length.warmup} are not timed: let it make more, "
            "or ask for fewer with --steps"
        )
    return records


def reason(story: str) -> str:
    """The launcher's story of a failure in one line, without the rank: what failed, failed on account of the case."""
    first, *rest = story.strip().splitlines() or ["it failed without a word"]
    if first.startswith("not done after"):
        first += " (" + "; ".join(line for line in rest[:4] if line.startswith("rank")) + ")"
    elif first.endswith(("exit code 1", "exit code 2")) or " was killed by " in first:
        first += "".join(f"; the last it printed: {line.strip()}" for line in rest[-1:])
    if first.endswith((",", ":")) and ". " in first:  # the remedy's code follows, in lines of its own
        first = first[: first.rindex(". ") + 1]
    return _one_line(_MODULE.sub("", _WHO.sub("", first)))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST else line[: _MOST - 1] + "…"


def check_script(script: Script) -> None:
    """Raises LaunchError where there is no such script or module."""
    if script.module:
        checks.check_module(script.path)
    else:
        checks.check_script(script.path)


def check(script: Script, cases: Sequence[Case], length: Length, named: bool) -> None:
    """Raises LaunchError or SettingError where a setting cannot work. named: the strategies are those that were asked
    for; else one that cannot work here is a row that says so."""
    for case in cases:
        plan(script, case, length, strategy=named)
