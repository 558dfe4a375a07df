"""paceline verify: is it the same model? Runs of one script, compared step by step.

1. A, the run in question, leaves the state that each step starts from.
2. C, one process that computes each global batch whole, with dropout off; C2, the same with every batch in reverse
   order, for the tolerances (sides.py); B, one process that computes the same shards one after the other; and A0, A
   with dropout off, where it draws numbers.
3. The first step in which they differ, what differs first (judge.py), and why (causes.py).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from paceline.errors import SettingError
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.plan import available_cores, count_processes
from paceline.tools.claims import what
from paceline.tools.files import check_writable, write_json
from paceline.tools.judge import judge
from paceline.tools.runs import Question, Runs
from paceline.tools.trials import Length, Start, check_script, launch, plan, quiet_output


def verify(question: Question) -> int:
    """Prints the answer and writes the file. Returns SAME, DIFFERENT or UNKNOWN, or 128 + n for signal n.

    Raises LaunchError or SettingError for what cannot work.
    """
    if question.steps < 1:
        raise SettingError(f"--steps {question.steps}: at least 1 is needed.")
    if question.deadline <= 0:
        raise SettingError(f"--deadline {question.deadline:g}: give seconds, above 0, such as 300.")
    if question.json_file is not None:
        check_writable(question.json_file)
    check_script(question.script)
    nproc = count_processes(question.nproc, available_cores(), _device_count)
    if nproc < 2:
        raise SettingError(f"--nproc {nproc}: one process is what others are compared with. Give at least 2.")
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder, Interrupts() as interrupts:
        runs = LaunchedRuns(question, nproc, folder, interrupts)
        plan(question.script, runs.start, runs.length)  # what can be seen before anything starts
        try:
            answer = judge(runs)
        except Stopped as stopped:
            return stopped.report()
    sys.stdout.write("\n".join([answer.text, *(f"  {note.text}" for note in answer.notes)]) + "\n")
    sys.stdout.flush()
    if question.json_file is not None:
        write_json(question.json_file, answer.document())
    return answer.code


def _device_count() -> int:
    from paceline.launcher.supervise import device_count

    return device_count()


class LaunchedRuns(Runs):
    """In fresh processes."""

    def __init__(self, question: Question, nproc: int, folder: str, interrupts: Interrupts) -> None:
        super().__init__(question, nproc, folder, _device_count)
        self._interrupts = interrupts
        self.length = Length(question.steps, 0, question.deadline)

    def launched(self, name: str, start: Start, order: Mapping[str, Any]) -> str | None:
        strategy = f" ({start.strategy})" if start.strategy is not None else ""
        sys.stderr.write(f"{name}: {what(name)}{strategy} ...\n")
        with quiet_output() as output:
            return launch(self.question.script, start, self.length, order, self._interrupts, output, tidy=True)
