"""paceline doctor --resume: does a training that is killed and resumed continue as if nothing had happened?

1. The script runs undisturbed, to its end or for --steps updates.
2. It runs again, and all ranks are killed some updates after the first checkpoint has appeared.
3. The command to resume runs, and its updates are compared with those of the killed run (resume_rules.py).
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.doctor.doctor_command import DoctorOptions, check_limits, plan_run
from paceline.doctor.resume.resume_rules import CAUSES, Difference, Judged, Recorded, compare, save_in_second_epoch
from paceline.errors import LaunchError, PacelineError, SettingError, printable
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan
from paceline.observe.records import read_records
from paceline.world import DOCTOR

SCHEMA = 1
SAME, DIFFERENT, NOT_COMPARED = 0, 1, 2
LATEST = "{latest}"
_UNFINISHED = (".part", ".tmp", ".partial")
_LEFT = 2  # updates of the undisturbed run after the kill, if it is long enough


@dataclass(frozen=True)
class ResumeOptions(DoctorOptions):
    """The options of `paceline doctor --resume` (cli.py). Limits hold for each run."""

    checkpoints: str = ""  # the folder that the script writes checkpoints into; empty or missing at the start
    resume_args: str | None = None  # the arguments of the resumed run, as on a command line; None: the same
    resume_nproc: str | int | None = None  # the processes of the resumed run; None: the same number
    seed: int | None = None  # chooses the update of the kill; None: by chance


class _Deadline(Interrupts):
    """Ends a run after a number of seconds."""

    def __init__(self, seconds: float | None) -> None:
        super().__init__()
        self._ends = None if seconds is None else time.monotonic() + seconds
        self.late = False

    def check(self) -> None:
        super().check()
        if self._ends is not None and time.monotonic() > self._ends:
            self.late = True
            raise Stopped(signal.SIGTERM)


class _NotCompared(Exception):
    """The runs cannot be compared. The message says why."""


def doctor_resume(options: ResumeOptions) -> int:
    """Run the script three times and print what a resumed training does differently.

    Returns the exit code: 0 if the resumed run continues as the killed one, 1 if it does not, 2 if they could not be
    compared, 128 + n if signal n ended the command. Raises LaunchError or SettingError before anything starts.
    """
    plan, resumed = _plans(options)
    existed = os.path.isdir(options.checkpoints)
    judged: Judged | None = None
    runs: list[Recorded] = []
    why = ""
    with tempfile.TemporaryDirectory(prefix="paceline-resume-") as records:
        try:
            judged = _three_runs(options, plan, resumed, Path(records), runs)
        except Stopped as stopped:
            return stopped.report()
        except KeyboardInterrupt:  # between two runs
            return Stopped(signal.SIGINT).report()
        except _NotCompared as error:
            why = str(error)
        finally:
            _empty(options.checkpoints)
            if not existed:
                shutil.rmtree(options.checkpoints, ignore_errors=True)
    code = NOT_COMPARED if judged is None else DIFFERENT if judged.found else SAME
    _report(judged, why)
    if options.json_file is not None:
        document = {
            "schema": SCHEMA,
            "script": options.script,
            "exit_code": code,
            "not_compared": why or None,
            "updates": [run.updates for run in runs],
            "begins": judged and judged.begins,
            "compared": judged and judged.compared,
            "findings": [found.as_json() for found in judged.found] if judged else [],
            "notes": judged.notes if judged else [],
        }
        Path(options.json_file).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return code


def _plans(options: ResumeOptions) -> tuple[Plan, Plan]:
    """The plans of the first two runs, and of the resumed run."""
    check_limits(options.steps, options.deadline, options.json_file)
    folder = options.checkpoints
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise SettingError(
            f"--checkpoints {folder}: the folder is not empty. The runs write into it, and it is emptied between them. "
            "Name an empty or new folder, and give it to the script too."
        )
    args = options.args if options.resume_args is None else _split(options)
    resumed = replace(options, args=args, nproc=options.resume_nproc or options.nproc)
    return plan_run(options), plan_run(resumed)


def _split(options: ResumeOptions) -> list[str]:
    try:
        return shlex.split(options.resume_args or "")
    except ValueError as error:
        raise SettingError(f"--resume-args {options.resume_args!r}: {error}. Close the quotation mark.") from None


def _three_runs(options: ResumeOptions, plan: Plan, resumed: Plan, records: Path, runs: list[Recorded]) -> Judged:
    steps = options.steps
    first, report = _run(options, plan, records / "1", steps)
    runs.append(first)
    if report:
        raise _NotCompared(f"The script failed before it was disturbed.\n{report}")
    _say(f"run 1, undisturbed: {first.updates} updates")
    if not first.updates:
        raise _NotCompared("The script made no update. Give doctor the training script that torchrun would start.")
    appeared = next((i for i, update in enumerate(first.ranks[0], 1) if update["files"]), None)
    room = first.updates - (appeared or first.updates) - 1
    if appeared is None or room < 1:
        when = "No file appeared" if appeared is None else f"The first file appeared before update {appeared}"
        raise _NotCompared(
            f"{when} in {options.checkpoints}, and the run ended at update {first.updates}. Let the script save "
            "earlier, or name the folder of its checkpoints by --checkpoints."
        )
    _empty(options.checkpoints)
    latest = max(1, room - _LEFT)
    earliest = min(latest, max(room // 2, save_in_second_epoch(first.ranks[0]) - appeared + 1, 1))
    kill = random.Random(options.seed).randint(earliest, latest)
    killed, report = _run(options, plan, records / "2", steps, kill)
    runs.append(killed)
    if not (records / "2" / "killed").exists():
        raise _NotCompared(f"The second run ended before it could be killed.\n{report}")
    _say(f"run 2, killed after update {killed.updates}, {kill} after the first checkpoint appeared")
    resumed = replace(resumed, args=tuple(with_latest(arg, options.checkpoints) for arg in resumed.args))
    again, report = _run(options, resumed, records / "3", steps)
    runs.append(again)
    if report or not again.updates:
        seen = report or "It ended without an update."
        return Judged(None, 0, [Difference("failed" if report else "length", seen.strip())], [])
    judged = compare(first, killed, again, whole=steps is None)
    begins = "" if judged.begins is None else f", from update {judged.begins + 1}"
    _say(f"run 3, resumed{begins}: {again.updates} updates")
    return judged


def _run(
    options: ResumeOptions, plan: Plan, records: Path, steps: int | None, kill: int | None = None
) -> tuple[Recorded, str]:
    """Run the script. Returns its records, and the launcher's report if it failed."""
    from paceline.launcher.supervise import supervise

    records.mkdir()
    order = {
        "directory": str(records),
        "checkpoints": os.path.abspath(options.checkpoints),
        "steps": steps,
        "kill": kill,
    }
    output = Output(None, plan.tee, silent=True)
    report, failed = "", True
    interrupts = _Deadline(options.deadline)
    try:
        with interrupts:
            outcome = supervise(replace(plan, variables={DOCTOR: json.dumps(order)}), interrupts, output)
            failed, report = outcome.exit_code != 0, outcome.report
    except Stopped:
        if not interrupts.late:
            raise
        report = f"It was ended after {options.deadline:g} s (--deadline).\n"
    except LaunchError:
        raise
    except PacelineError as error:
        report = f"{error}\n"
    finally:
        interrupts.deferred = False
        output.close(failed=False)
    ranks, loads, ended = [], [], not failed
    for rank in range(plan.nproc):
        found = read_records(str(records / f"rank-{rank}.jsonl"))
        ranks.append([record for record in found if record["k"] == "update"])
        if rank == 0:
            loads = [record for record in found if record["k"] == "load"]
    return Recorded(ranks, loads, ended), report if failed else ""


def with_latest(arg: str, folder: str) -> str:
    """The argument, with the newest entry of the folder in place of {latest}.

    A script gives a checkpoint its name when it is whole: hidden entries and those with a suffix of _UNFINISHED do not
    count.
    """
    if LATEST not in arg:
        return arg
    entries = [e for e in Path(folder).iterdir() if not e.name.startswith(".") and e.suffix not in _UNFINISHED]
    return arg.replace(LATEST, str(max(entries, key=lambda entry: entry.stat().st_mtime)) if entries else folder)


def _empty(folder: str) -> None:
    for entry in Path(folder).iterdir() if os.path.isdir(folder) else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def _say(text: str) -> None:
    sys.stdout.write(printable(f"paceline doctor --resume: {text}\n"))
    sys.stdout.flush()


def _report(judged: Judged | None, why: str) -> None:
    lines = [""]
    if judged is None:
        lines.append(f"paceline doctor --resume: could not compare. {why.strip()}")
    else:
        for number, found in enumerate(judged.found, 1):
            lines.append(_one(number, found))
        lines += [f"note: {note}" for note in judged.notes]
        if judged.found:
            count = len(judged.found)
            lines.append(
                f"paceline doctor --resume: {count} difference{'s' if count > 1 else ''} from the run that was killed."
            )
        else:
            lines.append(
                f"paceline doctor --resume: the same. Before update {(judged.begins or 0) + 1}, the resumed run has "
                "the weights, buffers, optimizer state and learning rates of the killed run, and the next "
                f"{judged.compared} updates use the same examples."
            )
    sys.stdout.write(printable("\n".join(lines) + "\n"))
    sys.stdout.flush()


def _one(number: int, found: Difference) -> str:
    title, remedy = CAUSES[found.cause]
    where = f"{os.path.relpath(found.at)}: " if found.at else ""
    lines = [f"{number}. {where}{title}  [{found.cause}]"]
    for name, value in (("seen", found.seen), ("fix", remedy)):
        if "\n" in value:
            lines.append(f"   {name + ':':10}" + value.strip().replace("\n", "\n" + " " * 13))
        else:
            lines.append(textwrap.fill(value, 116, initial_indent=f"   {name + ':':10}", subsequent_indent=" " * 13))
    return "\n".join(lines) + "\n"
