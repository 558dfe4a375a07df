"""One trial, from its start to its end: the script for a few steps, in fresh processes."""

from __future__ import annotations

import contextlib
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
from paceline.world import TRIAL

_WHO = re.compile(r"^rank \d+ (failed: )?")
_MODULE = re.compile(r"\bpaceline\.errors\.")
_MOST = 400  # characters of a reason


def plan_trial(script: Script, start: Start, length: Length, check_strategy: bool = True) -> Plan:
    """Plan a trial: what can be seen before anything starts.

    Args:
        check_strategy: whether the strategy is checked too.

    Raises:
        LaunchError, SettingError: what cannot work, a library that is not installed among it.
    """
    own = {"strategy": None if start.strategy is None else str(start.strategy), "precision": start.precision}
    settings = {**script.settings, **{key: value for key, value in own.items() if value is not None}}
    rest: dict[str, Any] = {"kind": "module" if script.module else "script", "timeout_seconds": length.seconds}
    check = strategies.check if check_strategy else None
    try:
        return make_plan(script.path, script.args, start.processes, settings, check, **rest)
    except ImportError as error:  # of the strategy's module
        raise SettingError(missing_library(start.strategy, error)) from error


def missing_library(strategy: StrategySpec | None, error: ImportError) -> str:
    """What to say of a strategy whose module cannot be imported."""
    package = f"the package {error.name!r}" if error.name else "a package"
    return (
        f"strategy {strategy}: {package} cannot be imported here ({error}). Install it into this Python, or leave the "
        "strategy out."
    )


def launch_trial(
    script: Script,
    start: Start,
    length: Length,
    spec: TrialSpec,
    interrupts: Interrupts,
    output: Output,
    tidy: bool = False,
) -> str | None:
    """Run one trial to its end. Return None, or in one line why it failed.

    Args:
        spec: what the workers are asked to do.
        tidy: leave no compiled files beside the script's modules.

    Raises:
        Stopped: a signal came, and no process is left.
    """
    from paceline.launcher.supervise import supervise

    own = {TRIAL: spec.to_json()} | ({"PYTHONDONTWRITEBYTECODE": "1"} if tidy else {})
    try:
        planned = replace(plan_trial(script, start, length), variables=own)
        outcome = supervise(planned, interrupts, output)
    except PacelineError as error:
        return _one_line(str(error))
    finally:
        interrupts.deferred = False  # nothing runs
    return one_line_reason(outcome.story) if outcome.exit_code != 0 else None


@contextlib.contextmanager
def quiet_output() -> Iterator[Output]:
    """Output that shows nothing of what the ranks print. Its private directory is removed at the end."""
    output = Output(None, frozenset(), silent=True)
    try:
        yield output
    finally:
        output.close(failed=False)


def one_line_reason(story: str) -> str:
    """The launcher's report of a failure in one line, without the rank: what failed, failed on account of the case."""
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
