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
from benchmarks.gpu import everything, jobs, one, page, several, soak, steps
from benchmarks.gpu.check import PARTS, Check, CheckFault, Place
from benchmarks.gpu.jobs import LIMIT, Way
from benchmarks.gpu.overlap import ACCUMULATES, NODE, overlap
from benchmarks.gpu.ranks import exchanged, over_ranks
from tests.docs import test_figures as figures

from paceline import world

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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_too_a_lost_example_is_more_than_the_limit(precision: str) -> None:
    order = jobs.plain_order(jobs.MLP, epochs=2)
    lost = [[part[:] for part in parts] for parts in order]
    lost[3][0].pop()
    whole, less = (jobs.plain(jobs.MLP, Way(precision=precision), of, torch.device("cpu")) for of in (order, lost))
    assert jobs.apart(less, whole, jobs.MLP.make()) > 2 * jobs.limit(precision)


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


def test_parts_of_one_machine_with_a_gpu_add_to_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "a GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    for name in ("first", "second"):
        runner.write(tmp_path / "gpu.json", {name: {"status": "passed"}})
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert set(document["checks"]) == {"first", "second"}
    assert document["machine"]["nccl"] == "2.27.5"


# --- cases over ranks


def test_a_case_that_raises_leaves_the_others_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    cases = {"bad": (jobs.MLP, Way(optimizer="none"), {}), "good": (jobs.MLP, Way(), {})}
    checked = over_ranks(Place(torch.device("cpu"), tmp_path, tmp_path), cases)
    next(checked)
    assert next(checked)["good"]["difference"] < LIMIT  # type: ignore[index]
    with pytest.raises(AssertionError, match=r"bad: rank 0: KeyError: 'none'$"):
        next(checked)


def test_ranks_tell_each_other_what_went_wrong_through_files(tmp_path: Path) -> None:
    (tmp_path / "end.0").write_text("an error")
    assert exchanged(tmp_path, "end", "", rank=1, size=2) == ["an error", ""]
    with pytest.raises(TimeoutError, match="rank 0 did not come to its end in 0 s"):
        exchanged(tmp_path, "another end", "", rank=1, size=2, wait=0.1)


def test_a_task_that_slurm_binds_to_one_gpu_is_imitated() -> None:
    own = {"RANK": "0", "SLURM_PROCID": "7", "CUDA_VISIBLE_DEVICES": "3,5", "HOME": "/home"}
    made = several.bound_by_slurm(1, 2, job=4321, own=own, cuda=True)
    found = world.from_env(made)
    assert (found.source, found.rank, found.size, found.local_rank, found.nodes) == ("slurm", 1, 2, 1, 1)
    assert made["CUDA_VISIBLE_DEVICES"] == "5"
    assert made["HOME"] == "/home"


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


def test_communication_after_the_backward_is_not_taken_for_hidden() -> None:
    found = overlap(gpu_trace(sent_at=410))
    assert (found["collectives"], found["begun within the backward"], found["hidden, us"]) == (1, 0, 0)


def test_a_trace_without_a_backward_is_refused() -> None:
    with pytest.raises(ValueError, match="no backward"):
        overlap([event("kernel", "gemm", 50, 90, correlation=1)])


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


def test_the_large_models_are_those_of_the_papers() -> None:
    with torch.device("meta"):
        resnet, gpt = jobs.ResNet(), jobs.Gpt(768, 12, 12, 1024, 50257)
    assert sum(p.numel() for p in resnet.parameters()) == 25_557_032
    assert sum(p.numel() for p in gpt.parameters()) == 124_439_808


@pytest.mark.full
def test_flops_of_resnet50_are_those_of_the_paper() -> None:
    load = replace(steps.resnet50(Place(torch.device("cuda"), Path(), Path())), precision="fp32")
    # Table 1: 3.8e9 multiplications and additions forward; backward twice that, but for the pictures' gradient.
    assert steps.flops(load) / 128 == pytest.approx(6 * 3.8e9, rel=0.05)


def test_the_page_shows_what_the_results_hold_and_nothing_else(tmp_path: Path) -> None:
    times = {side: [1e-3 * (1 + 0.01 * (at % 3) + shift) for at in range(30)]
             for side, shift in (("A", 0.0), ("A'", 0.001), ("P", 0.02), ("P'", 0.021))}  # fmt: skip
    found = steps.summary(times, examples=16, tokens=1024)
    assert found["ours/by hand"][0] == pytest.approx(1.02, abs=0.005)
    for of in ("by hand", "ours"):
        found[of]["share of the matrix rate"] = 0.4321
    sides = {"A": {"peak memory, bytes": 123_456_789}, "P": {"peak memory, bytes": 125_456_789}}
    grown = soak.growth([1.0, 2.0, 3.0], [{"threads": 4.0}, {"threads": 4.0}, {"threads": 4.0}])
    counted = {"launches": 31.0, "copies": 2.0, "waits that torch tells of": 0.0, "waits in the trace": 0.125}
    results: dict[str, dict[str, Any]] = {
        "a_step": {"part": "steps", "figures": found | {"about": "a model", "sides": sides}, "seconds": 12.3},
        "nothing_grows": {"part": "soak", "figures": {"over the time": grown}, "seconds": 130.0},
        "synchronisations_and_launches": {"part": "costs", "figures": {"loop": {"ours": counted, "by hand": counted}}},
        "a_perceptron": {"part": "right", "figures": {"loop sgd": {"difference": 3.21e-7, "limit": 1e-4}}},
    }
    written = {name: {"status": "passed", "what": "", "error": ""} | result for name, result in results.items()}
    written["a_late_one"] = {"part": "right", "status": "not run", "error": "the part's minutes were over"}
    runner.write(tmp_path / "gpu.json", written)
    page.write(tmp_path / "gpu.json", tmp_path / "gpu.md")
    text = (tmp_path / "gpu.md").read_text()
    document = json.loads((tmp_path / "gpu.json").read_text())
    tables = list(figures.tables(tmp_path / "gpu.md", tmp_path))
    assert [table.file for table in tables] == [str(tmp_path / "gpu.json")] * 5
    assert [figures.not_held(table, document) for table in tables] == [[]] * 5
    assert f"| {found['ours/by hand'][0]:.3f} [" in text
    assert "| 123 | 125 | 43.2% | 43.2% |" in text
    assert "- `a_late_one`, not run: the part's minutes were over" in text
    document["checks"]["a_step"]["figures"]["ours"]["median, s"] *= 1.1
    assert any(figures.not_held(table, document) for table in tables)


def test_figures_of_a_gpu_that_are_kept_here_were_measured_on_one() -> None:
    kept = [json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("gpu*.json")]
    assert all(document["machine"]["accelerators"] >= 1 and "gpu" in document["machine"] for document in kept)
    pages = {path.stem for path in (ROOT / "benchmarks").glob("gpu*.md")}
    assert pages <= {path.stem for path in (ROOT / "benchmarks" / "results").glob("gpu*.json")}


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


def test_a_plain_loop_that_fails_or_does_not_repeat_itself_is_a_fault_of_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order = jobs.plain_order(jobs.MLP, epochs=1)
    device = torch.device("cpu")
    with pytest.raises(CheckFault, match="the plain loop: IndexError"):
        jobs.plain(jobs.MLP, Way(), [[[10**6]]], device)
    theirs = jobs.plain(jobs.MLP, Way(), order, device)
    jobs.check_repeats(jobs.MLP, Way(), order, device, theirs)
    with pytest.raises(CheckFault, match="differs from itself by"):
        jobs.check_repeats(jobs.MLP, Way(), order[:-1], device, theirs)

    def cannot_judge(place: Place) -> Any:
        yield "a check"
        raise CheckFault("plain PyTorch failed")

    monkeypatch.setattr(runner.subprocess, "Popen", Ended(tmp_path, Check("it", "right", 60, cannot_judge, 0)))
    assert runner.run(Check("it", "right", 60, cannot_judge, 0), "cpu", 60)["status"] == "check at fault"


class Ended:
    """In place of a process: runs the check here, and has ended with an error."""

    returncode = 1

    def __init__(self, folder: Path, check: Check) -> None:
        self._folder, self._check = folder, check

    def __call__(self, words: list[str], **_: Any) -> Ended:
        path = Path(words[words.index("--json") + 1])
        place = Place(torch.device("cpu"), self._folder, self._folder)
        with pytest.raises(SystemExit):
            one.run(self._check, place, lambda result: path.write_text(json.dumps(result)) and None)
        return self

    def communicate(self, timeout: float) -> tuple[str, None]:
        return "", None
