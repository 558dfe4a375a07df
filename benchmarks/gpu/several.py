"""Two devices: `make gpu2`. Two ranks over NCCL, replicas of one process on two devices, overlap, a rank that fails,
and GPUs that are bound to tasks as by Slurm. On CPUs the same checks use gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from benchmarks.gpu import jobs
from benchmarks.gpu.check import Place, Steps, check
from benchmarks.gpu.jobs import Way
from benchmarks.gpu.member import PLANTED
from benchmarks.gpu.overlap import overlap
from benchmarks.gpu.ranks import FROM_A_LAUNCHER, Case, in_one_process, over_ranks, strategies
from torch.profiler import ProfilerActivity, profile

import paceline

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 30.0  # from one rank's error to the end of the processes
WARM = 5  # steps


def over_nccl(place: Place, cases: dict[str, Case]) -> Steps:
    """Like over_ranks. Also checks that the backend for tensors on GPUs is NCCL."""
    others = []
    for given in over_ranks(place, cases):
        yield given
        if isinstance(given, dict) and place.device.type == "cuda":
            others += [
                f"{name}: {of['backends']}" for name, of in given.items() if of["backends"].get("cuda") != "nccl"
            ]
    assert not others, "not over NCCL: " + "; ".join(others)


@check("several", 145, ranks=2)
def two_ranks_on_two_devices(place: Place) -> Steps:
    cases = strategies()
    for name in ("ddp", "fsdp:stage=3"):
        cases[f"{name} bf16"] = (jobs.GPT, Way(count="tensor", precision="bf16"), {"strategy": name})
    yield from over_nccl(place, cases)


@check("several", 100, ranks=2)
def one_model_on_two_devices(place: Place) -> Steps:
    pieces = Way("closure", micro_batch=2, count="tensor")
    cases: dict[str, Case] = {"tensor:size=2": (jobs.GPT, Way(count="tensor"), {"strategy": "tensor:size=2"})}
    for schedule in ("gpipe", "1f1b"):
        name = f"pipeline:schedule={schedule}"
        cases[name] = (jobs.GPT, pieces, {"strategy": name})
    yield from over_nccl(place, cases)


@check("several", 60)
def replicas_on_two_devices(place: Place) -> Steps:
    devices = "cuda:0+cuda:1" if place.device.type == "cuda" else "cpu+cpu"
    cases = {f"{name}, {title}": (job, Way("closure"), {"strategy": f"{name}:devices={devices}"})
             for name in ("data_parallel", "mirrored", "central_storage")
             for title, job in (("perceptron", jobs.MLP), ("batch norm", jobs.CONV))}  # fmt: skip
    yield from in_one_process(place, cases)


@check("several", 50, ranks=2)
def communication_behind_the_backward(place: Place) -> Steps:
    """In a trace of one ddp step, communication must overlap with the backward."""
    width, depth, batch, bucket = (256, 8, 128, 0.25) if place.small else (4096, 8, 4096, 25)
    yield f"a trace of one step of ddp: {depth} layers of {width}, a global batch of {batch}, buckets of {bucket} MB"
    run = paceline.start(device=str(place.device), progress="off", strategy=f"ddp:reducer=native,bucket_mb={bucket}")
    torch.manual_seed(0)
    model = jobs.perceptron(width, depth, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    run.prepare(model, optimizer)
    g = jobs.generator()
    inputs = torch.randn(batch, width, generator=g).to(place.device)
    targets = torch.randint(10, (batch,), generator=g).to(place.device)
    batches = iter(run.batches(lambda rows: [inputs[list(rows)], targets[list(rows)]], global_batch=batch))

    def step() -> None:
        run.forward_backward(lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), model, next(batches))
        run.step(optimizer)

    for _ in range(WARM):
        step()
    cuda = place.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as trace:
        step()
        if cuda:
            torch.cuda.synchronize()
    path = place.folder / "trace.json"
    trace.export_chrome_trace(str(path))
    found = overlap(json.loads(path.read_text())["traceEvents"])
    run.close()
    yield found
    assert found["collectives"] >= 2, "the gradients went in one bucket: nothing can overlap"
    assert found["begun within the backward"] >= 1, "communication began after the backward"
    assert found["hidden, us"] > 0


# --- ranks that are started here


def environment(own: Mapping[str, str] = os.environ) -> dict[str, str]:
    """This process's environment, without a launcher's variables."""
    kept = {name: value for name, value in own.items() if not name.startswith((*FROM_A_LAUNCHER, "SLURM_"))}
    return kept | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), own.get("PYTHONPATH", "")])}


def bound_by_slurm(rank: int, size: int, job: int, own: Mapping[str, str], cuda: bool) -> dict[str, str]:
    """The environment of a task of `srun --ntasks=SIZE --gpus-per-task=1`, which sees one GPU, as number 0."""
    variables: dict[str, Any] = {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
        "SLURM_NTASKS": size, "SLURM_STEP_NUM_TASKS": size, "SLURM_STEP_NUM_NODES": 1, "SLURM_NNODES": 1,
        "SLURM_STEP_TASKS_PER_NODE": size, "SLURM_STEP_NODELIST": "localhost",
    }  # fmt: skip
    if cuda:
        visible = own.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
        variables["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank]
    return environment(own) | {name: str(value) for name, value in variables.items()}


def member(place: Place, path: Path, *words: str) -> list[str]:
    on_cpu = ["--device", "cpu"] * (place.device.type == "cpu")
    return ["-m", "benchmarks.gpu.member", "--json", str(path), *on_cpu, *words]


def tasks(place: Place, path: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Two tasks as srun starts them."""
    return [
        subprocess.Popen(
            [sys.executable, *member(place, path, *words)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=bound_by_slurm(rank, 2, os.getpid(), os.environ, place.device.type == "cuda"),
        )
        for rank in range(2)
    ]  # fmt: skip


def ended(process: subprocess.Popen[str], seconds: float) -> str:
    """The output of a process, which is ended after a time limit: first with SIGTERM, so a launcher ends its ranks."""
    for end, wait in ((process.terminate, seconds), (process.kill, 5.0)):
        try:
            return process.communicate(timeout=wait)[0]
        except subprocess.TimeoutExpired:
            end()
    return process.communicate()[0]


def patience(place: Place) -> float:
    """The time limit for processes, in seconds. They start in about ten, but on a busy CPU much later."""
    return 130.0 if place.small else 45.0


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(path.parent.glob(f"{path.name}.*"))]


@check("several", 50)
def bound_to_gpus_as_by_slurm(place: Place) -> Steps:
    """Each rank sees one GPU, as cuda:0. They must detect that there are two GPUs, and use NCCL."""
    yield "two tasks with the variables of srun, and one visible GPU each; no launcher"
    path = place.folder / "member.json"
    started = tasks(place, path)
    end = time.monotonic() + patience(place)
    output = [ended(task, max(1.0, end - time.monotonic())) for task in started]
    told = read(path)
    yield {"ranks": told}
    codes = [task.returncode for task in started]
    assert codes == [0, 0], f"exit codes {codes}: " + "\n".join(output)[-3000:]
    assert [of["rank"] for of in told] == [0, 1]
    assert told[0]["digest"] == told[1]["digest"], "the ranks have other weights"
    if place.device.type == "cuda":
        assert [of["device"] for of in told] == ["cuda:0", "cuda:0"]
        assert told[0]["card"] != told[1]["card"], "both took one GPU"
        assert all(of["backends"].get("cuda") == "nccl" for of in told), told


@check("several", 135)
def the_end_after_one_rank_has_failed(place: Place) -> Steps:
    """Rank 1 raises in the fourth step, while rank 0 waits for its gradients."""
    launchers = {
        "paceline run": [sys.executable, "-m", "paceline", "run", "--nproc", "2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    yield f"a rank raises under {', '.join(launchers)} and srun: all must end in {MOST_SECONDS:.0f} s, and say why"
    wrong = []
    for name, launcher in [*launchers.items(), ("srun", None)]:
        path = place.folder / f"{name}.json"
        output, code = under(launcher, place, path) if launcher else under_srun(place, path)
        at, told = time.time(), read(path)
        raised = [of["raised"] for of in told if "raised" in of]
        left = [of["pid"] for of in told if psutil.pid_exists(of["pid"])]
        took = at - raised[0] if raised else float("inf")
        yield {name: {"seconds to the end": took, "exit code": code}}
        wrong += [f"{name}: exit code {code}"] * (code == 0) + [f"{name}: {took:.0f} s"] * (took > MOST_SECONDS)
        wrong += [f"{name}: {left} go on"] * bool(left)
        wrong += [f"{name}: the error is not told: {output[-1500:]}"] * (PLANTED not in output)
    assert not wrong, "; ".join(wrong)


def under(launcher: list[str], place: Place, path: Path) -> tuple[str, int]:
    """(output, exit code) of a launcher with two ranks, where one raises."""
    command = [*launcher, *member(place, path, "--fail-at", "3")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT)  # fmt: skip
    return ended(process, patience(place)), process.returncode


def under_srun(place: Place, path: Path) -> tuple[str, int]:
    """(output, exit code) of the task that raises, without a launcher.

    The other task is ended afterwards, as by srun --kill-on-bad-exit.
    """
    other, fails = tasks(place, path, "--fail-at", "3")
    output = ended(fails, patience(place))
    other.kill()
    other.communicate()
    return output, fails.returncode
