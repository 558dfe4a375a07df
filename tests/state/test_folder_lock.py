"""One run at a time writes into a folder of checkpoints; a run that is dead keeps nobody out."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import CheckpointError
from paceline.state import folder_lock
from paceline.state.folder_lock import FILE, FolderLocks

DEADLINE_SECONDS = 120.0
HOLDS = """
import sys, time
from pathlib import Path
from paceline.state.folder_lock import FolderLocks
locks = FolderLocks()
locks.take(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(300)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of tmp_path."""
    environ = {**os.environ, "PACELINE_ERROR_FILE": "/nowhere/of-another-launch/error", "PACELINE_LAUNCHER_PID": "77"}
    line = [sys.executable, "-c", HOLDS, str(tmp_path)]
    process = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def locks() -> Iterator[FolderLocks]:
    own = FolderLocks(say=lambda text: said.append(text))
    said.clear()
    yield own
    own.close()


said: list[str] = []


def without_kernel_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(handle: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("paceline.state.folder_lock.fcntl.flock", flock)


def rewrite(folder: Path, **changes: Any) -> None:
    """As the owner writes: a reader finds the former record or this one, and never half of one."""
    record = json.loads((folder / FILE).read_text())
    with open(folder / FILE, "r+b", buffering=0) as file:
        file.write(json.dumps(record | changes).encode())
        file.truncate()


@pytest.mark.parametrize("kernel", [True, False])
def test_a_second_run_is_refused_by_name(
    tmp_path: Path, holder: subprocess.Popen[str], locks: FolderLocks, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        without_kernel_locks(monkeypatch)
    with pytest.raises(CheckpointError) as refused:
        locks.take(tmp_path)
    record = json.loads((tmp_path / FILE).read_text())
    words = f"{tmp_path} is in use by a run of {record['user']} on {record['host']} (process {holder.pid}), since "
    assert str(refused.value).startswith(words)
    assert f"(`kill 77` on {record['host']})" in str(refused.value)
    assert f"remove {tmp_path / FILE}" in str(refused.value)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_run_that_was_killed_keeps_nobody_out(
    tmp_path: Path, holder: subprocess.Popen[str], locks: FolderLocks, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.kill()
    holder.wait()
    assert (tmp_path / FILE).exists()
    if not kernel:
        without_kernel_locks(monkeypatch)
    locks.take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()
    locks.close()
    assert not (tmp_path / FILE).exists()
    assert not said


def test_another_process_of_the_same_number_is_not_the_owner(
    tmp_path: Path, holder: subprocess.Popen[str], locks: FolderLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernel_locks(monkeypatch)
    holder.kill()
    holder.wait()
    rewrite(tmp_path, pid=os.getppid())
    locks.take(tmp_path)


def test_the_next_start_of_the_same_launch_takes_over(
    tmp_path: Path, holder: subprocess.Popen[str], locks: FolderLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_ERROR_FILE", "/nowhere/of-another-launch/error-0-2.json")
    monkeypatch.setattr(folder_lock, "_SAME_RUN_SECONDS", 0.1)  # though the former process has not gone yet
    locks.take(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("lives", [True, False])
def test_a_run_on_another_machine_is_watched(
    tmp_path: Path, locks: FolderLocks, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel's lock is not seen here."""
    monkeypatch.setattr(folder_lock, "WATCH_SECONDS", DEADLINE_SECONDS if lives else 0.2)  # it looks ten times
    record = {"token": "theirs", "user": "ada", "host": "gpu7", "pid": 5, "boot": "another", "beats": 0}
    (tmp_path / FILE).write_text(json.dumps(record))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.01):
            rewrite(tmp_path, beats=time.monotonic())

    thread = threading.Thread(target=beat)
    if lives:
        thread.start()
    try:
        with pytest.raises(CheckpointError, match="ada on gpu7") if lives else contextlib.nullcontext():
            locks.take(tmp_path)
    finally:
        ended.set()
        if lives:
            thread.join()
    assert "was last used by a run of ada on gpu7 (process 5)" in said[0]


def test_one_that_has_not_counted_for_hours_is_not_watched(tmp_path: Path, locks: FolderLocks) -> None:
    (tmp_path / FILE).write_text(json.dumps({"token": "theirs", "host": "gpu7", "boot": "another"}))
    os.utime(tmp_path / FILE, (time.time() - 7200,) * 2)
    locks.take(tmp_path)
    assert not said


def test_the_owner_counts(tmp_path: Path, locks: FolderLocks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_SECONDS", 0.01)
    locks.take(tmp_path)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while (folder_lock._read(tmp_path / FILE) or {"beats": 0})["beats"] < 12:  # it is being written now and then
        assert time.monotonic() < deadline
    locks.take(tmp_path)  # it is its own


def test_runs_of_one_process_follow_each_other(tmp_path: Path, locks: FolderLocks) -> None:
    locks.take(tmp_path)
    second = FolderLocks()
    second.take(tmp_path)
    second.close()


@pytest.mark.parametrize("content", ["", "no json", "[1]", "{}"])
def test_a_file_that_nobody_owns(tmp_path: Path, locks: FolderLocks, content: str) -> None:
    (tmp_path / FILE).write_text(content)
    locks.take(tmp_path)


def test_a_folder_that_takes_no_file_has_no_lock(tmp_path: Path, locks: FolderLocks) -> None:
    (tmp_path / "file").touch()
    locks.take(tmp_path / "file")
    locks.take(tmp_path / "step-00000003")
    assert not (tmp_path / "step-00000003").exists()


def test_a_removed_folder_is_locked_anew(tmp_path: Path, locks: FolderLocks) -> None:
    locks.take(tmp_path / "a")
    (tmp_path / "a" / FILE).unlink()
    locks.take(tmp_path / "a")
    assert (tmp_path / "a" / FILE).exists()


def test_a_forked_child_keeps_no_lock(tmp_path: Path, locks: FolderLocks) -> None:
    read, write = os.pipe()
    locks.take(tmp_path)
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    locks.close()
    done = subprocess.run([sys.executable, "-c", HOLDS.replace("time.sleep(300)", ""), str(tmp_path)], check=False)
    os.write(write, b"x")
    os.waitpid(child, 0)
    assert done.returncode == 0
    os.close(read)
    os.close(write)


SCRIPT = """
import sys, time
from pathlib import Path
import torch, paceline
run = paceline.start(device="cpu", progress="off")
net = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = run.loader(torch.utils.data.TensorDataset(torch.ones(4000, 4)), global_batch=4)
run.restore("checkpoints", missing_ok=True)
print("read at", run.steps)
for batch in loader:
    run.backward(model(batch[0]).mean())
    if run.step(optimizer) and run.steps == 2:
        run.save("checkpoints")
        Path("held").touch()
    if sys.argv[1] == "short" and run.steps >= 4:
        break
    if sys.argv[1] == "long" and run.steps == 3:
        time.sleep(300)  # until it is killed
print("ends at", run.steps)
"""


@pytest.mark.conformance
def test_two_runs_on_one_folder(tmp_path: Path) -> None:
    """The second may read, and is refused before it has trained. After a kill the next goes on."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    script = [sys.executable, "train.py"]
    first = subprocess.Popen([*script, "long"], cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)

    def run(*line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )

    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "held").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        second = run(*script, "long")
        assert second.returncode == 1
        assert second.stdout == "read at 2\n"
        assert "CheckpointError: " in second.stderr
        assert "checkpoints is in use by a run of " in second.stderr
        assert f"`kill {first.pid}`" in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    third = run(*script, "short")
    assert (third.returncode, third.stdout) == (0, "read at 2\nends at 4\n"), third.stderr
    assert not (tmp_path / "checkpoints" / FILE).exists()
