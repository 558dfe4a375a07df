"""`make gpu` on a machine without a GPU: every check is built, and the parts run on the CPU.

Running them is the test of the checks, not of Paceline: on the first machine with a GPU they must not fail by
themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import everything, jobs, one, soak
from benchmarks.gpu.check import PARTS, Check, Place
from benchmarks.gpu.jobs import LIMIT
from benchmarks.gpu.overlap import ACCUMULATES, NODE, overlap
from tests.docs import test_figures as figures

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def byte_code_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks read Paceline from src, and .ci/run takes byte code there for a test that missed the wheel."""
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "byte_code"))


def command(*words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """As `make gpu` does: from the source tree."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.conformance
def test_a_dry_run_builds_every_check_and_says_what_it_would_run() -> None:
    done = command("--dry", seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = {line.split()[2].rstrip(":") for line in done.stdout.splitlines() if line.startswith("dry ")}
    assert told == set(everything.CHECKS)


@pytest.mark.conformance
def test_without_a_gpu_it_says_what_can_be_done() -> None:
    done = command(seconds=240)
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


@pytest.mark.conformance
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ranks", "seconds"), [(0, 0.3), (2, 1.0)])  # less than the import of torch in each takes
def test_a_check_that_takes_too_long_is_ended_with_all_that_it_started(
    ranks: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LEAST_SECONDS", seconds)
    slow = replace(everything.CHECKS["a_perceptron"], seconds=seconds, ranks=ranks)
    before = {process.pid for process in psutil.process_iter()}
    assert runner.run(slow, "cpu", left=60.0)["status"] == "deadline"
    new = [p for p in psutil.process_iter(["cmdline"]) if p.pid not in before]
    left = [p for p in new if slow.name in " ".join(p.info["cmdline"] or [])]
    assert left == []


def test_what_a_check_found_before_it_was_ended_is_kept(tmp_path: Path) -> None:
    def function(place: Place) -> Iterator[Any]:
        yield "two cases"
        yield {"first": 1.0}
        yield {"second": 2.0}

    kept: list[one.Result] = []
    one.run(Check("a", "right", 9.0, function, 0), Place(torch.device("cpu"), tmp_path, tmp_path), kept.append)
    *before, last = [(result["passed"], bool(result["error"])) for result in kept]
    assert before == [(False, True)] * 3
    assert last == (True, False)
    assert kept[-1]["figures"] == {"first": 1.0, "second": 2.0}


@pytest.mark.parametrize("part", [part for part in PARTS if part in ("steps", "soak", "several")])
def test_the_deadlines_of_a_part_add_up_to_its_nine_minutes(part: str) -> None:
    assert sum(check.seconds for check in everything.CHECKS.values() if check.part == part) <= 540


def test_two_gpus_are_asked_for_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["gpu", "--part", "several"])
    assert runner.main() == 2
    assert "needs two GPUs, and torch sees one" in capsys.readouterr().out


# --- cases over ranks


# --- a trace


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": {"correlation": correlation}}


def gpu_trace(sent_at: float) -> list[dict[str, Any]]:
    """A forward kernel, counts that are sent before the backward, two kernels of the backward at 200 and 300 (until
    400), a bucket's kernel at sent_at, and the update's."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", 1, 1, correlation=1, tid=7),
        event("kernel", "gemm", 50, 90, correlation=1),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f64_RING_LL", 150, 10, correlation=2),
        event("cpu_op", NODE + "AddmmBackward0", 20, 10, tid=8),
        event("cuda_runtime", "cudaLaunchKernel", 22, 1, correlation=3, tid=8),
        event("kernel", "gemm", 200, 100, correlation=3),
        event("cpu_op", ACCUMULATES, 31, 5, tid=8),
        event("cuda_runtime", "cudaLaunchKernelExC", 33, 1, correlation=4, tid=8),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", sent_at, 150, correlation=4),
        event("gpu_user_annotation", "nccl:all_reduce", sent_at, 150),
        event("cpu_op", NODE + "AddmmBackward0", 40, 10, tid=8),
        event("cuda_runtime", "cudaLaunchKernel", 42, 1, correlation=5, tid=8),
        event("kernel", "gemm", 300, 100, correlation=5),
        event("cuda_runtime", "cudaLaunchKernel", 60, 1, correlation=6, tid=7),
        event("kernel", "sgd", 600, 50, correlation=6),
    ]


def test_communication_behind_the_backward_is_seen_in_a_trace() -> None:
    assert overlap(gpu_trace(sent_at=310)) == {
        "collectives": 1,
        "begun within the backward": 1,
        "communication, us": 150,
        "hidden, us": 90,
        "backward, us": 200,
    }


# --- the soak, the steps and their page


def test_a_slow_leak_is_growth_and_a_sample_that_stands_out_is_none() -> None:
    times = [float(at) for at in range(100)]
    leaking = {"resident memory, MB": lambda at: 500 + 0.3 * at + at % 7, "threads": lambda at: 4 + at // 40}
    steady = {"resident memory, MB": lambda at: 500 + 90 * (at == 99) - 300 / (1 + at), "threads": lambda at: 4}
    grown, stood = (
        soak.growth(times, [{name: of(at) for name, of in what.items()} for at in times]) for what in (leaking, steady)
    )
    assert grown["resident memory, MB"]["grew by"] == pytest.approx(0.3 * 74, rel=0.1)
    assert [of["grew by"] > of["bar"] for of in grown.values()] == [True, True]
    assert [of["grew by"] > of["bar"] for of in stood.values()] == [False, False]


# The other parts take many minutes on a CPU, and their deadlines fit a machine that does nothing else.
IN_CONFORMANCE = ("ranks", "right", "costs")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "part",
    [pytest.param(part, marks=pytest.mark.full if part in IN_CONFORMANCE else pytest.mark.campaign)
     for part in PARTS],
)  # fmt: skip
def test_a_part_passes_on_a_cpu(part: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    words = ["--part", part, "--minutes", "18", "--json", str(path), "--page", str(tmp_path / "gpu.md")]
    done = command("--device", "cpu", *words, seconds=1180)
    document = json.loads(path.read_text())
    results = document["checks"]
    assert {name: result["error"] for name, result in results.items() if result["status"] != "passed"} == {}, (
        done.stdout
    )
    assert len(results) == sum(check.part == part for check in everything.CHECKS.values())
    tables = list(figures.tables(tmp_path / "gpu.md", tmp_path))
    assert tables
    assert [figures.not_held(table, document) for table in tables] == [[] for _ in tables]
