"""One trial: the script for a few steps, in fresh processes, and the records that its ranks leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline import strategies
from paceline.config import StrategySpec
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


class Start(NamedTuple):
    """How a trial is started. strategy, precision: None where the script's own stand."""

    strategy: StrategySpec | None
    processes: int
    precision: str | None = None


def plan(script: Script, start: Start, length: Length, look: bool = True) -> Plan:
    """Raises LaunchError or SettingError for what can be seen before anything starts. look: at the strategy too."""
    own = {"strategy": None if start.strategy is None else str(start.strategy), "precision": start.precision}
    settings = {**script.settings, **{key: value for key, value in own.items() if value is not None}}
    rest: dict[str, Any] = {"kind": "module" if script.module else "script", "timeout_seconds": length.seconds}
    check_strategy = strategies.check if look else None
    return make_plan(script.path, script.args, start.processes, settings, check_strategy, **rest)


def _start(case: Case) -> Start:
    return Start(case.spec, case.processes, case.precision)


def run_trial(script: Script, case: Case, length: Length, interrupts: Interrupts) -> list[Record] | str:
    """The ranks' records, by rank; or why there are none, in one line. Nothing is left behind.

    Raises Stopped: a signal came; no process is left.
    """
    with quiet_output() as output:
        order = {
            "directory": output.private,
            "steps": length.steps,
            "warmup": length.warmup,
            "began": time.time(),
            "global_batch": case.global_batch,
        }
        failed = launch(script, _start(case), length, order, interrupts, output)
        return _read(output.private, case.processes, length) if failed is None else failed


def launch(
    script: Script,
    start: Start,
    length: Length,
    order: Mapping[str, Any],
    interrupts: Interrupts,
    output: Output,
    tidy: bool = False,
) -> str | None:
    """Runs one trial to its end. None, or why it failed, in one line. order: of trial/order.py. tidy: modules that lie
    beside the script leave no compiled files there.

    Raises Stopped: a signal came; no process is left.
    """
    from paceline.launcher.supervise import supervise

    own = {TRIAL: json.dumps(order)} | ({"PYTHONDONTWRITEBYTECODE": "1"} if tidy else {})
    planned = replace(plan(script, start, length), variables=own)
    try:
        outcome = supervise(planned, interrupts, output)
    except PacelineError as error:
        return _one_line(str(error))
    finally:
        interrupts.deferred = False  # nothing runs
    return reason(outcome.story) if outcome.exit_code != 0 else None


@contextlib.contextmanager
def quiet_output() -> Iterator[Output]:
    """What the ranks print is not shown; its private directory is gone at the end."""
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
        plan(script, _start(case), length, look=named)
