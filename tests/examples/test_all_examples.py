"""`make examples` (benchmarks/all_examples.py): a row for each job, whatever becomes of it, and an exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.examples.jobs import EXAMPLES

ELSEWHERE = {"detect.py"}  # a job for it is there, and is left out where the script is not


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    monkeypatch.delitem(sys.modules, "all_examples", raising=False)
    import all_examples

    return all_examples


class Processes:
    """Stands in for what would be started. answers: by script and size, or "verify": exit status and output."""

    def __init__(self, answers: dict[tuple[str, object], tuple[int, str]]) -> None:
        self.answers, self.commands = answers, []

    def __call__(self, command: Sequence[str]) -> tuple[int, str]:
        self.commands.append(list(command))
        script = next(Path(word).name for word in command if word.endswith(".py"))
        if "verify" in command:
            return self.answers.get((script, "verify"), (0, "the same, within rounding: 3 steps"))
        size = int(command[command.index("--nproc") + 1])
        settings = Path(command[command.index("--config") + 1])
        logs = Path(str(settings.with_suffix("")))
        logs.mkdir(exist_ok=True)
        (logs / "metrics.jsonl").write_text('{"loss": 2.0}\n{"note": 1}\n{"loss": 1.5}\n')
        return self.answers.get((script, size), (0, "epoch  1  test accuracy 0.5000\nstep 9: held-out loss 2.2500\n"))


def run(examples: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: Processes, *words: str) -> Any:
    monkeypatch.setattr(examples, "started", processes)
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["all_examples.py", "--json", str(file), "--keep", str(tmp_path / "kept"), *words])
    status = examples.main()
    return status, json.loads(file.read_text())["jobs"]


def test_every_job_names_a_script(examples: Any) -> None:
    missing = {Path(job.script).name for job in examples.JOBS if not (EXAMPLES / job.script).is_file()}
    assert missing <= ELSEWHERE
    names = [job.name for job in examples.JOBS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({("digits.py", 2): (1, "a trace\nRuntimeError: it broke")}, "2 of 2 runs: RuntimeError: it broke"),
        ({("digits.py", 1): (0, "nothing of the kind")}, "no figure was printed"),
        ({("digits.py", 2): (0, "test accuracy 0.6")}, "0.5 and 0.6 are more than 0.01 apart"),
        ({("digits.py", "verify"): (1, "different. First in step 2")}, "verify: different. First in step 2"),
    ],
)
def test_a_job_that_fails_does_not_stop_the_others(
    examples: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Any, said: str
) -> None:
    status, jobs = run(examples, monkeypatch, tmp_path, Processes(answer), "--only", "digits", "ddp_after")
    assert status == 1
    assert said in jobs["digits"]["failed"]
    assert jobs["ddp_after"]["verify"] == "the same"
    assert not jobs["ddp_after"]["failed"]
