"""paceline verify: is it the same model? Runs one script several times and compares the runs step by step.

1. A, the subject run, saves the state at the start of each step.
2. The reference runs repeat each step from that state:
   - C: one process computes each global batch whole, with dropout off.
   - C2: C with each batch in reverse order and with different rounding, for the tolerances (tolerances.py).
   - B: one process computes the same shards in sequence.
   - A0: A with dropout off, if A draws random numbers.
3. The answer: the first step with a difference, the first quantity that differs (decision.py), the cause
   (cause_rules.py) and its line in the script (traced_runs.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

from paceline.config import StrategySpec
from paceline.doctor.doctor_command import DoctorOptions, examine
from paceline.doctor.findings import MODEL
from paceline.errors import SettingError, printable
from paceline.launcher import streams
from paceline.launcher.checks import device_count
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.plan import available_cores, count_processes
from paceline.trials.json_file import check_writable, write_json
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Length, Start
from paceline.trials.trial import check_script, launch_trial, plan_trial, quiet_output
from paceline.verify.decision import decide
from paceline.verify.runs import RunAhead, Runs, VerifyOptions, describe_run

PLAIN_WORKER = "paceline.verify.plain_worker.rank_program"
_AT_ONCE = 2  # runs of one process, on a machine without accelerators
_WATCHED = 24  # doctor watches more steps than a short comparison: some faults show in a second epoch only


def verify(options: VerifyOptions) -> int:
    """Make the runs, print the answer, and write the JSON file.

    Returns SAME, DIFFERENT or UNKNOWN, or 128 + n if signal n ended the command.

    Raises:
        LaunchError, SettingError: the command cannot work.
    """
    if options.steps < 1:
        raise SettingError(f"--steps {options.steps}: give at least 1.")
    if options.deadline <= 0:
        raise SettingError(f"--deadline {options.deadline:g}: give a number of seconds above 0, such as 300.")
    if options.json_file is not None:
        check_writable(options.json_file)
    check_script(options.script)
    nproc = count_processes(options.nproc, available_cores(), device_count)
    if nproc < 2:
        raise SettingError(f"--nproc {nproc}: verify compares several processes with one. Give at least 2.")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, Interrupts() as interrupts:
        runs = LaunchedRuns(options, nproc, folder, interrupts)
        plan_trial(options.script, runs.start, runs.length)  # raise errors before anything starts
        try:
            answer = decide(runs)
        except Stopped as stopped:
            return stopped.report()
    sys.stdout.write(printable("\n".join([answer.text, *(f"  {note.text}" for note in answer.notes)])) + "\n")
    sys.stdout.flush()
    if options.json_file is not None:
        write_json(options.json_file, answer.document())
    return answer.code


class LaunchedRuns(Runs):
    """Runs that are launched in fresh processes."""

    def __init__(self, options: VerifyOptions, nproc: int, folder: str, interrupts: Interrupts) -> None:
        super().__init__(options, nproc, folder, device_count)
        self._interrupts = interrupts
        self.length = Length(options.steps, 0, options.deadline)
        self._beside: Future[str | None] | None = None  # the run that `ahead` makes now

    @contextlib.contextmanager
    def ahead(self, name: str, strategy: StrategySpec, **how: Any) -> Iterator[None]:
        cores = available_cores()
        if cores < _AT_ONCE or device_count() > 0:  # both runs would use the first accelerator
            yield
            return
        if self.made_ahead.pop(name, None) is not None:
            self.discard(name)
        start, spec = self.plan_run(name, strategy, how)
        os.makedirs(self.folder(name))
        with ThreadPoolExecutor(1) as pool:
            self._beside = pool.submit(self._launch, name, start, spec, self._interrupts.beside(), _AT_ONCE)
            try:
                yield
            finally:
                made, self._beside = self._beside, None
                self._wait(made)
        self.made_ahead[name] = RunAhead(spec, made.result())

    def _wait(self, run: Future[str | None]) -> None:
        """Wait for the end of a run in another thread. A signal ends it too, before it ends this thread."""
        self._interrupts.deferred = True
        wait([run])
        self._interrupts.deferred = False
        self._interrupts.check()

    def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
        if self._beside is None:
            return self._launch(name, start, spec, self._interrupts, 1)
        failed = self._launch(name, start, spec, self._interrupts, _AT_ONCE)
        if failed is None:
            return None
        # The two runs may have disturbed each other, because the script writes files. So make this one again, alone.
        self._wait(self._beside)
        self.discard(name)
        os.makedirs(self.folder(name))
        return self._launch(name, start, spec, self._interrupts, 1)

    def _launch(self, name: str, start: Start, spec: TrialSpec, interrupts: Interrupts, at_once: int) -> str | None:
        """Launch a run while this number of runs share the cores. So each may take longer."""
        strategy = f" ({start.strategy})" if start.strategy is not None else ""
        streams.write(sys.stderr, f"{name}: {describe_run(name)}{strategy} ...\n")
        with quiet_output() as output:
            worker = PLAIN_WORKER if self.plain else None
            length = replace(self.length, seconds=self.length.seconds * at_once)
            # As many threads as a process of the subject run has: a script may compute its data or a teacher at its
            # start, and the number of threads changes their last bits.
            threads = max(1, available_cores() // self.start.processes)
            return launch_trial(
                self.options.script, start, length, spec, interrupts, output, tidy=True, worker=worker, threads=threads
            )

    def find_faults(self) -> list[dict[str, Any]]:
        streams.write(sys.stderr, "doctor: the script, watched by paceline doctor ...\n")
        script = self.options.script
        steps = max(_WATCHED, self.options.steps)
        options = DoctorOptions(script.path, script.args, self.nproc, script.module, steps, self.options.deadline)
        return [found.as_json() for found in examine(options, self._interrupts) if found.about.kind == MODEL]
