"""`make gpu` on a machine without a GPU: every check is built, and the part `right` runs on the CPU.

Running them is the test of the checks, not of Paceline: on the first machine with a GPU they must not fail by
themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import everything, jobs
from benchmarks.gpu.right import LIMIT

ROOT = Path(__file__).resolve().parents[1]


def command(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def test_a_dry_run_builds_every_check_and_says_what_it_would_run() -> None:
    done = command("--dry", seconds=60)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {line.split()[2].rstrip(":") for line in done.stdout.splitlines() if line.startswith("dry ")}
    assert told == set(everything.CHECKS)


def test_without_a_gpu_it_says_what_can_be_done() -> None:
    done = command(seconds=60)
    assert done.returncode == 2
    assert "--dry builds the checks" in done.stdout


@pytest.mark.parametrize("job", [jobs.MLP, jobs.CONV, jobs.GPT, jobs.GAN], ids=["mlp", "conv", "gpt", "gan"])
def test_a_loop_that_loses_one_example_is_told_from_the_whole_one(job: jobs.Job) -> None:
    way = jobs.Way()
    order = jobs.plain_order(job, epochs=2)
    lost = [[part[:] for part in parts] for parts in order]
    lost[3][0].pop()
    device = torch.device("cpu")
    whole, less = (jobs.plain(job, way, which, device) for which in (order, lost))
    assert jobs.apart(less, whole, job.make()) > 10 * LIMIT
    assert not jobs.same_bits(less, whole)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [0, 2])
def test_a_check_that_takes_too_long_is_ended_with_all_that_it_started(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST_SECONDS", 1.0)
    slow = replace(everything.CHECKS["a_perceptron"], seconds=3.0, ranks=ranks)
    before = {process.pid for process in psutil.process_iter()}
    assert runner.run(slow, "cpu", left=60.0)["status"] == "deadline"
    new = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    left = [p for p in new if slow.name in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_what_failed_and_what_was_not_run_is_kept_beside_what_passed(tmp_path: Path) -> None:
    unknown = replace(everything.CHECKS["a_perceptron"], name="no_such_check")
    failed, late = runner.run(unknown, "cpu", left=60.0), runner.run(unknown, "cpu", left=1.0)
    assert failed["status"] == "failed"
    assert "no_such_check" in failed["output"]
    assert late["status"] == "not run"
    path = tmp_path / "gpu.json"
    runner.write(path, {"failed": failed, "late": late})
    runner.write(path, {"passed": {"status": "passed"}})
    assert set(json.loads(path.read_text())["checks"]) == {"failed", "late", "passed"}


@pytest.mark.conformance
@pytest.mark.timeout(900)
def test_the_part_right_passes_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = command("--device", "cpu", "--part", "right", "--minutes", "14", "--json", str(path), seconds=880)
    results = json.loads(path.read_text())["checks"]
    assert {name: result["error"] for name, result in results.items() if result["status"] != "passed"} == {}, (
        done.stdout
    )
    assert len(results) == sum(check.part == "right" for check in everything.CHECKS.values())
