"""Checkpoints in memory: where every process holds slices, a restart goes on from the last, and reads no disk."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ports import free_port
from tests.state.test_newest_state import DEADLINE_SECONDS, SCRIPT, Job

from paceline.state import checkpoint
from paceline.state.memory_checkpoints import MemoryCheckpoints, asked_for
from paceline.world import HANDOVER, MEMORY

# Each rank writes down where its machine's launcher has a folder in memory. Who is to die waits until the last
# checkpoint is whole on all machines: a thread writes it.
TELLS = r"""
import glob, os, time
open("folders", "a").write(os.environ.get("PACELINE_MEMORY", "") + "\n")

def wait_until_kept(steps):
    every = int(os.environ["PACELINE_MEMORY_EVERY"])
    folders = {line for line in open("folders").read().split() if os.path.isdir(line)}
    began = time.monotonic()
    while not all(glob.glob(f"{folder}/run-*/step-{steps // every * every:08d}") for folder in folders):
        assert time.monotonic() - began < 120.0, "it was not kept"
        time.sleep(0.01)
"""
# None on the disk: what a start goes on from was in memory.
KILL = "        os.kill(os.getpid(), signal.SIGKILL)\n"
WAITS = TELLS + SCRIPT.replace(KILL, f"        wait_until_kept(run.steps)\n{KILL}")
NO_DISK = WAITS.replace('    if epoch == 0:\n        run.save("checkpoints")\n', "")

FIT = (
    TELLS
    + r"""
import os, signal, sys, torch, paceline
from torch import nn

start, first = os.environ["TORCHELASTIC_RESTART_COUNT"], True
run = paceline.start(device="cpu", seed=3, strategy=sys.argv[1], progress="off")
g = torch.Generator().manual_seed(0)
x, y = (torch.randn(64, n, generator=g, dtype=torch.float64) for n in (8, 1))
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)).double()

def loss_fn(model, batch):
    global first
    if first:
        run.print("starts at", run.steps)
        first = False
    if f"{start}:{run.steps}:{run.rank}" in sys.argv:
        wait_until_kept(run.steps)
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.mse_loss(model(batch[0]), batch[1])

history = paceline.fit(
    net, loss_fn, torch.utils.data.TensorDataset(x, y), global_batch=8, epochs=2, run=run, checkpoints="checkpoints",
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2),
)
run.print("ends at", run.steps, history.history)
"""
)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job", NO_DISK)
    yield job
    job.close()


def folders(job: Job) -> list[Path]:
    """In memory, of all launchers of the job."""
    found = {Path(line) for line in (job.folder / "folders").read_text().split()}
    assert found
    assert all(path.parent == Path("/dev/shm") for path in found)
    return sorted(found)


def undisturbed(job: Job, strategy: str) -> str:
    return job.run("--nproc", "2", "train.py", strategy)[1]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["fsdp:stage=1", pytest.param("shared", marks=pytest.mark.full)])
def test_a_restart_goes_on_from_the_last_one_and_ends_as_if_undisturbed(job: Job, strategy: str) -> None:
    line = ["--nproc", "2", "--max-restarts", "2", "--memory-every", "3", "train.py", strategy]
    starts, end, err = job.run(*line, "0=5:forward:1", "1=13:begin:0")
    assert starts == [0, 3, 12], err
    assert not (job.folder / "checkpoints").exists()
    assert not any(path.exists() for path in folders(job))
    assert end == undisturbed(job, strategy)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_newer_of_disk_and_memory_is_taken(job: Job) -> None:
    (job.folder / "train.py").write_text(WAITS)  # saves after step 8
    line = ["--nproc", "2", "--max-restarts", "2", "--memory-every", "6", "train.py", "shared"]
    starts, _, err = job.run(*line, "0=10:forward:1", "1=13:forward:1")
    assert starts == [0, 8, 12], err


@pytest.mark.full
@pytest.mark.timeout(400)
def test_of_two_machines_the_one_that_lives_has_the_state_of_both(job: Job) -> None:
    """The machine of rank 0 goes, its launcher and its memory with it, and another one comes."""
    script = NO_DISK.replace(KILL, KILL.replace("getpid", "getppid") + KILL)
    (job.folder / "train.py").write_text(script)
    place = f"127.0.0.1:{free_port()}"
    line = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", place, "--max-restarts", "2", "--memory-every", "4"]
    line += ["train.py", "fsdp:stage=1", "0=13:forward:0"]
    two = [job.start(*line) for _ in range(2)]
    began = time.monotonic()
    while all(process.poll() is None for process in two):
        assert time.monotonic() - began < DEADLINE_SECONDS
        time.sleep(0.05)
    gone = next(process for process in two if process.poll() is not None)
    assert gone.returncode == -signal.SIGKILL
    two.append(job.start(*line[:-1], "9=0:forward:0"))
    told = [process.communicate(timeout=DEADLINE_SECONDS) for process in two]
    assert [process.returncode for process in two if process is not gone] == [0, 0], told
    out = "".join(out for out, _ in told)
    assert sorted(re.findall(r"starts at (\d+)", out)) == ["0", "12"], told
    end = next(line for line in out.splitlines() if line.startswith("ends"))
    (job.folder / "train.py").write_text(NO_DISK)
    assert end == undisturbed(job, "fsdp:stage=1")


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "strategy",
    [pytest.param("ddp", marks=pytest.mark.full), "fsdp:stage=3", pytest.param("pipeline", marks=pytest.mark.full)],
)
def test_fit_goes_on_in_mid_epoch(job: Job, strategy: str) -> None:
    """fit keeps the mean loss of an epoch on all ranks, so that no rank alone could hand its state on."""
    (job.folder / "train.py").write_text(FIT)
    line = ["--nproc", "2", "--max-restarts", "2", "--memory-every", "3", "train.py", strategy]
    starts, end, err = job.run(*line, "0:5:1", "1:13:0")
    assert starts == [0, 3, 12], err
    shutil.rmtree(job.folder / "checkpoints")
    assert end == undisturbed(job, strategy)


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("whom", ["launcher", "ranks"])
def test_nothing_of_it_is_left_in_memory_whatever_is_killed(job: Job, whom: str) -> None:
    """The launcher by SIGKILL; or a rank, so that the run fails, and the output of the other is kept."""
    script = NO_DISK.replace('        die("begin")\n', '        die("begin"); print("a batch", flush=True)\n')
    (job.folder / "train.py").write_text(
        script.replace(KILL, KILL.replace("getpid", "getppid") + KILL) if whom == "launcher" else script
    )
    line = ["--nproc", "2", "--max-restarts", "1", "--memory-every", "1", "train.py", "fsdp:stage=1"]
    process = job.start(*line, "0=5:forward:0", "1=7:forward:0")
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == (-signal.SIGKILL if whom == "launcher" else 128 + signal.SIGKILL), err
    began = time.monotonic()
    while any(path.exists() for path in folders(job)):
        assert time.monotonic() - began < DEADLINE_SECONDS
        time.sleep(0.1)
    if whom == "ranks":
        assert "The output of the other ranks is in" in err
        assert [path.name for path in (job.folder / "tmp").glob("paceline*/*")] == ["rank-1.log"]


@pytest.mark.full
def test_workers_that_are_not_in_step_say_that_nothing_is_kept(job: Job) -> None:
    (job.folder / "train.py").write_text(NO_DISK.replace("run.mean(loss.item())", "0.0"))
    line = ["--nproc", "3", "--max-restarts", "1", "--memory-every", "2", "train.py", "parameter_server:mode=async"]
    _, end, err = job.run(*line)
    assert end.startswith("ends at")
    assert err.count("in-memory checkpoints (--memory-every) are disabled: the processes do not run in step") == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--memory-every", "5"],
            "--memory-every 5: in-memory checkpoints are for restarts, but no restart is allowed",
        ),
        (["--memory-every", "0", "--max-restarts", "1"], "--memory-every 0: give a number of steps"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = [sys.executable, "-m", "paceline", "run", *words, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


# ---------------------------------------------------------------- one process


Room = namedtuple("Room", "free")


class Kept:
    """A run of one process whose launcher wants a checkpoint in memory after each second step."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(MEMORY, str(folder / "memory"))
        monkeypatch.setenv(HANDOVER, str(folder / "disk"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        self.net, self.made = torch.nn.Linear(2, 3), 0
        strategy: Any = SimpleNamespace(plan=SimpleNamespace(in_step=True))
        self.tracked: Any = {}
        state: Any = SimpleNamespace(
            gather=lambda: ({"models": [self.net.state_dict()], "optimizers": []}, []),
            parts_beside_models=lambda run, streams: {"run": {**run, "streams": streams}, "tracked": self.tracked},
        )
        self.kept = MemoryCheckpoints(2, strategy, state, 0, ready=lambda: True, steps=lambda: self.made)

    def step(self) -> None:
        self.made += 1
        if self.kept.due(SimpleNamespace(stepped=True)):  # type: ignore[arg-type]  # what it reads of a loader
            self.kept.keep({"updates": [self.made]})

    def found(self, folder: Path) -> list[int]:
        return [checkpoint.find(path).step for path in folder.glob("run-*") if checkpoint.holds_checkpoint(path)]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    kept = Kept(tmp_path, monkeypatch)
    yield kept
    kept.kept.close()


def test_nothing_is_kept_for_a_script_that_restores_nothing(kept: Kept, tmp_path: Path) -> None:
    for _ in range(4):
        kept.step()
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_finds_the_last_one_and_only_before_it_has_restored(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.kept.begin()
    for _ in range(5):
        kept.step()
    kept.kept.close()
    weights = kept.net.weight.detach().clone()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = Kept(tmp_path, monkeypatch)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = again.kept.find()
    assert found is not None
    assert found.step == 4
    assert torch.equal(checkpoint.read(found.path)[1]["model_0"]["weight"], weights)
    again.kept.begin()
    assert again.kept.find() is None


def test_where_memory_has_no_room_the_disk_is_used_and_else_it_is_said(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = {"memory": 10, "disk": 10**9}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Room(free[path.relative_to(tmp_path).parts[0]]))
    kept.kept.begin()
    for _ in range(2):
        kept.step()
    kept.kept._writer.finish()
    assert kept.found(tmp_path / "memory") == []
    assert kept.found(tmp_path / "disk" / "kept") == [2]
    free["disk"] = 10
    for _ in range(4):
        kept.step()
    err = capsys.readouterr().err
    assert err.count("in-memory checkpoints (--memory-every) are disabled: a checkpoint needs 0 MB, but ") == 1
    assert kept.found(tmp_path / "disk" / "kept") == [2]


def test_what_cannot_be_written_is_said_once_and_the_training_goes_on(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.tracked["odd"] = object()
    kept.kept.begin()
    for _ in range(6):
        kept.step()
    err = capsys.readouterr().err
    assert err.count("in-memory checkpoints (--memory-every) are disabled") == 1
    assert "tracked" in err
    assert kept.made == 6


def test_a_machine_that_cannot_write_says_so_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*_: Any) -> None:
        raise OSError("can't start new thread")

    monkeypatch.setattr(kept.kept._writer, "begin", refused)
    kept.kept.begin()
    for _ in range(6):
        kept.step()
    line = "paceline: machine 0 stores no in-memory checkpoints: can't start new thread.\n"
    assert capsys.readouterr().err == line


def test_the_launchers_wish_is_read() -> None:
    assert asked_for({}) is None
    assert asked_for({"PACELINE_MEMORY_EVERY": "7"}) == 7
