"""Checkpoints while things go wrong: full disks, errors, kills, several writers, debris; and exports."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import assert_content, names, save

from paceline.errors import CheckpointError
from paceline.state import atomic, checkpoint
from paceline.state.checkpoint import export, find, write

CRASHING = Path(__file__).parent / "crashing.py"


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing past `size` bytes fails with EFBIG inside (Python ignores the signal that would come with it)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A directory with checkpoints of the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    if not shutil.which("mount"):
        pytest.skip("no mount command")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


# What goes wrong while writing


def test_a_full_disk_leaves_the_old_checkpoints_and_says_so(tiny_disk: Path) -> None:
    save(tiny_disk, 1, elements=250_000)
    before = names(tiny_disk)
    with pytest.raises(CheckpointError, match=rf"saved to {tiny_disk}: No space left on device.* GiB are free\. "):
        save(tiny_disk, 2, elements=1_000_000)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tiny_disk, step=2, parts={"text": "x" * 5_000_000})
    assert names(tiny_disk) == before == ["latest", "step-00000001"]
    assert_content(find(tiny_disk).path, 1, 250_000)
    save(tiny_disk, 2, elements=250_000)
    assert find(tiny_disk).step == 2


def test_a_limit_on_file_sizes_is_told_like_a_full_disk(three: Path) -> None:
    with files_of_at_most(2**20):
        with pytest.raises(CheckpointError, match=rf"saved to {three}: File too large\. "):
            save(three, 4, elements=1_000_000)
        with pytest.raises(CheckpointError, match="File too large"):
            write(three, step=4, parts={"text": "x" * 2_000_000})
    assert names(three) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    assert find(three) == (three / "step-00000003", 3, [])


def test_a_directory_that_cannot_be_written_is_named(tiny_disk: Path) -> None:
    save(tiny_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    for call in (lambda: save(tiny_disk, 2), lambda: save(tiny_disk / "new", 2), lambda: export(tiny_disk / "x", {})):
        with pytest.raises(
            CheckpointError, match=rf"{tiny_disk}.*: Read-only file system\. This user has no permission"
        ):
            call()
    assert find(tiny_disk).step == 1, "reading needs no writing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_is_named(three: Path) -> None:
    three.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"Permission denied\. This user has no permission"):
        save(three, 4)
    three.chmod(0o700)
    assert find(three).step == 3


@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "mkdir", "open", "stat", "listdir", "unlink"])
def test_an_error_of_the_disk_at_any_call_loses_nothing(
    three: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """In one save the first such call fails, in the next the second, and so on until all have had their turn."""
    if sys.version_info < (3, 11) and call in ("mkdir", "stat"):
        pytest.skip("pathlib of Python 3.10 has functions of its own for them, which this test does not reach")
    real, lock, newest = getattr(os, call), threading.Lock(), 3
    for fail_at in range(100):
        calls, newest = 0, newest + 1
        save(three, newest, keep=3)  # clears up

        def failing(*arguments: Any, fail_at: int = fail_at, **options: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                if calls == fail_at + 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*arguments, **options)

        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patch.setattr(os, call, failing)
            try:
                save(three, newest + 1, keep=3)
                failed = ""
            except CheckpointError as error:
                failed = str(error)
        assert not failed or f"saved to {three}: Input/output error" in failed
        assert all("tidying up after it failed" in str(one.message) for one in warned)
        found = find(three)
        # A save whose error came after the renaming has happened all the same; without an error it always has.
        assert found.step in ((newest, newest + 1) if failed else (newest + 1,))
        assert found.damage == []
        assert len([name for name in names(three) if name.startswith("step-")]) >= 3
        newest = found.step
        if calls <= fail_at:
            break
    assert 0 < fail_at < 99
    atomic.remove_debris(three)
    assert not [name for name in names(three) if name.startswith(".tmp")]


def test_an_interrupted_save_leaves_nothing(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_give_name", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(three, 4)
    assert names(three) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


def crash(mode: str, directory: Path) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, CRASHING, mode, directory], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.mark.conformance
@pytest.mark.slow
def test_kill_before_any_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    outcomes = crash("points", tmp_path)
    assert outcomes["old"] > 20, "the kills did not reach the writing"
    assert outcomes["new"] > 10, "nor what comes after the renaming"


@pytest.mark.conformance
@pytest.mark.slow
def test_kill_at_random_never_loses_an_acknowledged_checkpoint(tmp_path: Path) -> None:
    assert crash("kills", tmp_path)["saved"] >= 12


@pytest.mark.conformance
@pytest.mark.slow
def test_kill_at_random_while_a_thread_writes_leaves_whole_checkpoints_of_one_moment(tmp_path: Path) -> None:
    assert crash("background", tmp_path)["saved"] >= 12


@pytest.mark.conformance
@pytest.mark.slow
def test_two_writers_at_once_harm_neither_each_other_nor_a_reader(tmp_path: Path) -> None:
    assert crash("writers", tmp_path)["looks"] > 10


# What dead writers leave behind


def test_debris_of_the_dead_goes_and_work_of_the_living_stays(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        (tmp_path / f".tmp-{name}-01234567" / "checkpoint").mkdir(parents=True)
        (tmp_path / f".tmp-{name}-01234567.lock").touch()
    (tmp_path / ".tmp-half-01234567.lock").touch()  # died between lock and directory
    (tmp_path / ".tmp-lockless-00000000").mkdir()
    (tmp_path / ".tmp-lockless-11111111" / "checkpoint").mkdir(parents=True)
    yesterday = time.time() - 25 * 3600
    for place in (".tmp-lockless-11111111/checkpoint", ".tmp-lockless-11111111"):
        os.utime(tmp_path / place, (yesterday, yesterday))
    with open(tmp_path / ".tmp-alive-01234567.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save(tmp_path, 1)
        assert names(tmp_path) == [
            *(".tmp-alive-01234567", ".tmp-alive-01234567.lock", ".tmp-lockless-00000000", "latest", "step-00000001"),
        ]
    save(tmp_path, 2)
    assert names(tmp_path) == [".tmp-lockless-00000000", "latest", "step-00000001", "step-00000002"]


def test_a_scratch_directory_is_locked_while_it_is_in_use(tmp_path: Path) -> None:
    with atomic.scratch(tmp_path, "label") as path:
        (path / "file").touch()
        atomic.remove_debris(tmp_path)
        assert (path / "file").exists()
    assert names(tmp_path) == []


def test_where_there_are_no_locks_saving_works_all_the_same(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    save(three, 4, keep=2)
    assert names(three) == ["latest", "step-00000003", "step-00000004"]


# Exports


def test_an_export_is_what_load_state_dict_takes_ties_included(tmp_path: Path) -> None:
    def make() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embed"].weight
        return model

    model, other = make(), make()
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(model.state_dict(), tmp_path / "refused")
    path = export(tmp_path / "new" / "model.safetensors", model.state_dict())
    loaded = safetensors.torch.load_file(path)
    assert set(loaded) == {"embed.weight", "head.weight"}
    other.load_state_dict(loaded)
    assert torch.equal(other["head"].weight, model["embed"].weight)
    assert other["head"].weight is other["embed"].weight
    assert names(tmp_path / "new") == ["model.safetensors", "model.safetensors.sha256"]
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_that_fails_leaves_the_older_file(tmp_path: Path) -> None:
    path = export(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    (tmp_path / "directory").mkdir()
    with pytest.raises(CheckpointError, match=r"exported to .*directory: it is a directory"):
        export(tmp_path / "directory", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="the safetensors format cannot store these tensors"):
        export(path, {"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="the safetensors format cannot store these tensors"):
        export(path, {"x": torch.empty(2, device="meta")})
    with files_of_at_most(2**20):
        with pytest.raises(CheckpointError, match=rf"The model could not be exported to {path}: File too large"):
            export(path, {"x": torch.ones(1_000_000)})
    assert torch.equal(safetensors.torch.load_file(path)["x"], torch.ones(2))
    assert names(tmp_path) == ["directory", "model.safetensors", "model.safetensors.sha256"]


def test_a_directory_that_was_taken_away_between_two_saves_is_said(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    save(place, 1)
    place.rename(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match=f"{place} has been removed or replaced since the last save"):
        save(place, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(place, 3)
    assert find(place).step == 3


def test_a_disk_that_is_no_longer_mounted_is_said(tmp_path: Path, tiny_disk: Path) -> None:
    place = tiny_disk / "checkpoints"
    save(place, 1)
    subprocess.run(["umount", tiny_disk], check=True)
    try:
        with pytest.warns(UserWarning, match=f"{place} is now on a different file system. Was its disk unmounted"):
            save(place, 2)
        assert find(place).step == 2
    finally:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tiny_disk], check=True)
