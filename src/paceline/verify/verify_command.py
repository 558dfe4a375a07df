"""paceline verify: is it the same model? Runs of one script, compared step by step.

1. A, the run in question, leaves the state that each step starts from.
2. Other runs make each step again from that state: C, one process that computes each global batch whole, with dropout
   off; C2, the same with each batch in reverse order and with other roundings, for the tolerances (tolerances.py); B,
   one process that computes the same shards one after the other; A0, A with dropout off, where A draws numbers.
3. The answer: the first step in which the runs differ, what differs first (decision.py), why (cause_rules.py), and in
   which line of the script (traced_runs.py).
"""

from __future__ import annotations

import sys
import tempfile

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
from paceline.verify.runs import Runs, VerifyOptions, describe_run


def verify(options: VerifyOptions) -> int:
    """Print the answer and write the file. Return SAME, DIFFERENT or UNKNOWN; or 128 + n for signal n.

    Raises:
        LaunchError, SettingError: what cannot work.
    """
    if options.steps < 1:
        raise SettingError(f"--steps {options.steps}: at least 1 is needed.")
    if options.deadline <= 0:
        raise SettingError(f"--deadline {options.deadline:g}: give seconds, above 0, such as 300.")
    if options.json_file is not None:
        check_writable(options.json_file)
    check_script(options.script)
    nproc = count_processes(options.nproc, available_cores(), device_count)
    if nproc < 2:
        raise SettingError(f"--nproc {nproc}: one process is what others are compared with. Give at least 2.")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, Interrupts() as interrupts:
        runs = LaunchedRuns(options, nproc, folder, interrupts)
        plan_trial(options.script, runs.start, runs.length)  # what can be seen before anything starts
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
    """Runs in fresh processes."""

    def __init__(self, options: VerifyOptions, nproc: int, folder: str, interrupts: Interrupts) -> None:
        super().__init__(options, nproc, folder, device_count)
        self._interrupts = interrupts
        self.length = Length(options.steps, 0, options.deadline)

    def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
        strategy = f" ({start.strategy})" if start.strategy is not None else ""
        streams.write(sys.stderr, f"{name}: {describe_run(name)}{strategy} ...\n")
        with quiet_output() as output:
            return launch_trial(self.options.script, start, self.length, spec, self._interrupts, output, tidy=True)
