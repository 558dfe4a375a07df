"""Plan and run one trial: the script for a few steps, in fresh processes."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from paceline import strategies
from paceline.config import StrategySpec
from paceline.errors import PacelineError, SettingError
from paceline.launcher import checks
from paceline.launcher.interrupts import Interrupts
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan, make_plan
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Length, Script, Start
from paceline.world import THREAD_BUDGET, TRIAL

_WHO = re.compile(r"^rank \d+ (failed: )?")
_MODULE = re.compile(r"\bpaceline\.errors\.")
_MOST = 400  # the maximum length of a reason, in characters


def plan_trial(script: Script, start: Start, length: Length, check_strategy: bool = True) -> Plan:
    """Plan a trial. Raises the errors that can be detected before a process starts.

    Args:
        check_strategy: whether to check the strategy too.

    Raises:
        LaunchError, SettingError: the trial cannot work, for example because a library is not installed.
    """
    own = {"strategy": None if start.strategy is None else str(start.strategy), "precision": start.precision}
    settings = {**script.settings, **{key: value for key, value in own.items() if value is not None}}
    rest: dict[str, Any] = {"kind": "module" if script.module else "script", "timeout_seconds": length.seconds}
    check = strategies.check if check_strategy else None
    try:
        return make_plan(script.path, script.args, start.processes, settings, check, **rest)
    except ImportError as error:  # from the strategy's module
        raise SettingError(missing_library(start.strategy, error)) from error


def missing_library(strategy: StrategySpec | None, error: ImportError) -> str:
    """The error message if a strategy's module cannot be imported."""
    package = f"the package {error.name!r}" if error.name else "a package"
    return (
        f"strategy {strategy}: {package} cannot be imported here ({error}). Install it in this environment, or leave "
        "out the strategy."
    )


def launch_trial(
    script: Script,
    start: Start,
    length: Length,
    spec: TrialSpec,
    interrupts: Interrupts,
    output: Output,
    tidy: bool = False,
    worker: str | None = None,
    threads: int | None = None,
) -> str | None:
    """Run one trial to its end. Return None, or the reason for its failure in one line.

    Args:
        spec: the task of the workers.
        worker: the module that each worker runs; None: the usual one.
        tidy: do not let Python write compiled files beside the script's modules.
        threads: the number of threads of each process, unless the user has set OMP_NUM_THREADS. None: a process's share
            of the cores.

    Raises:
        Stopped: a signal came; all processes have ended.
    """
    from paceline.launcher.supervise import supervise

    own = {TRIAL: spec.to_json()} | ({"PYTHONDONTWRITEBYTECODE": "1"} if tidy else {})
    if threads is not None and "OMP_NUM_THREADS" not in os.environ:
        own |= {"OMP_NUM_THREADS": str(threads), THREAD_BUDGET: str(threads)}
    try:
        planned = replace(plan_trial(script, start, length), variables=own)
        planned = planned if worker is None else replace(planned, worker=worker)
        outcome = supervise(planned, interrupts, output)
    except PacelineError as error:
        return _one_line(str(error))
    finally:
        interrupts.deferred = False  # no process is running
    return one_line_reason(outcome.report) if outcome.exit_code != 0 else None


@contextlib.contextmanager
def quiet_output() -> Iterator[Output]:
    """Yield an Output that hides everything that the ranks print. Its private directory is removed at the end."""
    output = Output(None, frozenset(), silent=True)
    try:
        yield output
    finally:
        output.close(failed=False)


def one_line_reason(report: str) -> str:
    """Reduce the launcher's report of a failure to one line, without the rank, which does not matter here."""
    first, *rest = report.strip().splitlines() or ["it failed without a message"]
    if first.startswith("not done after"):
        first += " (" + "; ".join(line for line in rest[:4] if line.startswith("rank")) + ")"
    elif first.endswith(("exit code 1", "exit code 2")) or " was killed by " in first:
        first += "".join(f"; last line printed: {line.strip()}" for line in rest[-1:])
    if first.endswith((",", ":")) and ". " in first:  # the code of the remedy is on the next lines
        first = first[: first.rindex(". ") + 1]
    return _one_line(_MODULE.sub("", _WHO.sub("", first)))


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST else line[: _MOST - 1] + "…"


def check_script(script: Script) -> None:
    """Raises LaunchError if there is no such script or module."""
    if script.module:
        checks.check_module(script.path)
    else:
        checks.check_script(script.path)
