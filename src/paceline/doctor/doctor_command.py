"""paceline doctor: run a script with recorders, apply the rules to their records, print the findings.

1. The launcher runs the script, with paceline.doctor.doctor_worker in place of its usual worker.
2. Meanwhile doctor compares the collectives of the ranks. It ends the run if they do not match, or if ranks wait for a
   collective that other ranks will never call.
3. The rules read the ranks' records, and doctor prints the findings.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.doctor.findings import MODEL, Finding, text
from paceline.doctor.rules import DIVERGENCE, find_faults
from paceline.doctor.rules.collective_rules import CollectiveChecker, refused_call, uneven_loop
from paceline.doctor.rules.recorded_run import RecordedRun, read_run
from paceline.errors import PacelineError, SettingError, printable
from paceline.launcher import streams
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.output import Output
from paceline.launcher.plan import Plan, make_plan
from paceline.world import DOCTOR

SCHEMA = 1
_POLL_SECONDS = 0.25
CLEAN, FOUND, UNWATCHED = 0, 1, 2


@dataclass(frozen=True)
class DoctorOptions:
    """The options of `paceline doctor` (cli.py)."""

    script: str
    args: Sequence[str] = ()
    nproc: str | int = 2
    module: bool = False
    steps: int | None = None  # end the script after this number of optimizer steps; None: it ends itself
    deadline: float | None = None  # end the script after this many seconds; None: never
    json_file: str | None = None
    tee: str = ""


class _DoctorInterrupts(Interrupts):
    """Ends the run on a signal, or when doctor decides to. The agent calls `check` many times a second."""

    def __init__(self, checker: CollectiveChecker, deadline: float | None) -> None:
        super().__init__()
        self._checker, self._next = checker, 0.0
        self._deadline, self._late = deadline, math.inf
        self.abort_reason = ""  # why doctor ends the run, as a clause

    def check(self) -> None:
        super().check()
        now = time.monotonic()
        if not self.deferred or now < self._next:
            return
        if self._late == math.inf and self._deadline is not None:  # the script has been started
            self._late = now + self._deadline
        self._next = now + _POLL_SECONDS
        if self._checker.poll(late=now >= self._late):
            self.abort_reason = self._checker.abort_reason
        elif now >= self._late:
            self.abort_reason = f"{self._deadline:g} seconds have passed"
        if self.abort_reason:
            raise Stopped(signal.SIGTERM)


def doctor(options: DoctorOptions) -> int:
    """Run the script, print the findings and write the JSON file.

    Returns the exit code: 0 if no fault changes the model, 1 if a fault changes it, 2 if the script could not be
    watched, 128 + n if signal n ended the command. Raises LaunchError or SettingError before anything starts.
    """
    check_limits(options.steps, options.deadline, options.json_file)
    plan = plan_run(options)
    output = Output(None, plan.tee)
    checker = CollectiveChecker(output.private, plan.nproc)
    failed, report, stopped = False, "", 0
    try:
        interrupts = _DoctorInterrupts(checker, options.deadline)
        with interrupts:
            try:
                failed, report = _supervise(plan, options, output, interrupts)
            except Stopped as signalled:
                if interrupts.abort_reason:
                    report = f"paceline doctor ended the run: {interrupts.abort_reason}.\n"
                else:
                    stopped = signalled.report()
            cut = bool(stopped or interrupts.abort_reason)
            run, found = diagnose(output.private, plan.nproc, checker, cut)
    finally:
        where = output.close(failed=failed)
    code = _report(options, run, found, report + where if report else "", failed)
    return stopped or code


def examine(options: DoctorOptions, interrupts: Interrupts) -> list[Finding]:
    """Run the script, hide its output, and return the findings. Raises LaunchError, SettingError or Stopped."""
    check_limits(options.steps, options.deadline, options.json_file)
    plan = plan_run(options)
    output = Output(None, plan.tee, silent=True)
    try:
        failed, _ = _supervise(plan, options, output, interrupts)
        return diagnose(output.private, plan.nproc, cut=failed)[1]
    finally:
        output.close(failed=False)


def diagnose(
    directory: str, processes: int, checker: CollectiveChecker | None = None, cut: bool = False
) -> tuple[RecordedRun, list[Finding]]:
    """Read the ranks' records in `directory` and apply the rules. Call it when the script has ended.

    cut: the script was ended from outside.
    """
    run = read_run(directory, processes, cut)
    checker = checker or CollectiveChecker(directory, processes)
    mismatch = checker.finding(cut) or refused_call(run)
    found = find_faults(run)
    if mismatch is not None:
        uneven = uneven_loop(run)
        mismatch = replace(mismatch, beside=uneven) if uneven else checker.with_exit(mismatch)
        # divergence that may follow from the mismatch is not reported separately
        found = [mismatch, *(f for f in found if f.cause not in (*DIVERGENCE, "lr_differs"))]
    return run, found


def check_limits(steps: int | None, deadline: float | None, json_file: str | None) -> None:
    """Raise SettingError if an option that limits or records a run cannot work."""
    if steps is not None and steps < 1:
        raise SettingError(f"--steps {steps}: give the number of optimizer steps to watch, 1 or more.")
    if deadline is not None and deadline <= 0:
        raise SettingError(f"--deadline {deadline:g}: give a number of seconds above 0, such as 300.")
    folder = os.path.dirname(json_file or "")
    if folder and not os.path.isdir(folder):
        raise SettingError(f"--json {json_file}: the folder {folder!r} does not exist. Name another file.")


def plan_run(options: DoctorOptions) -> Plan:
    """The plan of a run under doctor."""
    kind = "module" if options.module else "script"
    plan = make_plan(options.script, options.args, options.nproc, {}, kind=kind, tee=options.tee)
    # device: "cpu", so that the launcher chooses no GPU. The script chooses, and its choice may be a finding.
    # hash_seed: None leaves Python's hash seed random, to reveal faults that depend on the order of a set.
    return replace(plan, worker="paceline.doctor.doctor_worker", device="cpu", hash_seed=None)


def _supervise(plan: Plan, options: DoctorOptions, output: Output, interrupts: Interrupts) -> tuple[bool, str]:
    """Run the script. Returns (did it fail?, the launcher's report)."""
    from paceline.launcher.supervise import supervise

    order = json.dumps({"directory": output.private, "steps": options.steps})
    try:
        outcome = supervise(replace(plan, variables={DOCTOR: order}), interrupts, output)
    except PacelineError as error:
        return True, f"{error}\n"
    finally:
        interrupts.deferred = False
    return outcome.exit_code != 0, outcome.report


def _report(options: DoctorOptions, run: RecordedRun, found: list[Finding], report: str, failed: bool) -> int:
    sys.stdout.flush()
    if report:
        streams.write(sys.stderr, printable(report))
    grave = any(f.about.kind == MODEL for f in found)
    why = _unwatched(run, failed)
    code = FOUND if grave else UNWATCHED if why else CLEAN
    sys.stdout.write("\n")
    if found or not why:
        sys.stdout.write(printable(text(found, run.steps(), run.processes)))
    if code == CLEAN:
        sys.stdout.write(printable(_offer_of_verify(options)))
    if why:
        sys.stdout.write(f"paceline doctor: {why}\n")
    sys.stdout.flush()
    trouble = Counter(e["text"] for e in run.all_events("trouble"))
    if trouble:
        what, times = trouble.most_common(1)[0]
        streams.write(
            sys.stderr,
            f"paceline doctor: recording failed {trouble.total()} times ({times} of them with {printable(what)}). "
            "Findings that need those records may be missing.\n",
        )
    if options.json_file is not None:
        document = {
            "schema": SCHEMA,
            "script": options.script,
            "processes": run.processes,
            "steps": run.steps(),
            "exit_code": code,
            "not_watched": why or None,
            "findings": [f.as_json() for f in found],
        }
        with open(options.json_file, "w", encoding="utf-8") as file:
            file.write(json.dumps(document, indent=1) + "\n")
    return code


def _offer_of_verify(options: DoctorOptions) -> str:
    """What doctor has not compared, and the command that does."""
    script = shlex.join([*(["-m"] if options.module else []), options.script, *options.args])
    return (
        "Doctor looks for the faults that its rules describe. To compare the updates with those of one process:\n"
        f"  paceline verify --nproc {options.nproc} {script}\n"
    )


def _unwatched(run: RecordedRun, failed: bool) -> str:
    """A sentence that says why the script could not be watched to its end; "" if it was watched."""
    spawned = next(run.all_events("spawn"), None)
    if spawned is not None and not spawned["joined"]:
        return (
            "the script starts its processes itself (torch.multiprocessing), and doctor did not watch them. Start "
            "the script with one process per rank, as with torchrun."
        )
    if run.cut and run.steps() == 0:
        return "the run was ended before the script made an optimizer step."
    if failed:
        return "the script failed (see above) before doctor had watched all of it."
    if any(run.all_events("unseen")):
        return (
            "the script imported torch in a way that doctor cannot see, so nothing was watched. Import torch at the "
            "top of the script, before code that changes how Python finds modules (sys.meta_path, import hooks)."
        )
    if not any(run.ranks):
        return "the script never imported torch. Give doctor the training script that you would start with torchrun."
    if run.processes > 1 and run.world_size == 1:
        return (
            "the script never called torch.distributed.init_process_group, so each process trains an independent "
            "model. Call it before the model is wrapped."
        )
    if run.steps() == 0:
        return "the script made no optimizer step."
    return ""
