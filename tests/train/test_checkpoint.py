"""Checkpoint files: whole or not there at all, whatever is killed, full, flipped, cut off or taken away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import re
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

from paceline.errors import CheckpointError, SettingError
from paceline.train import atomic, checkpoint, manifest
from paceline.train.checkpoint import Part, export, find, holds_checkpoint, read, stage, write
from paceline.train.snapshot import SnapshotBuffers

CRASHING = Path(__file__).parent / "crashing.py"
HASH = r"[0-9a-f]{64}"


def parts(step: int, elements: int = 10) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((elements,), float(step)), "bias": torch.tensor(float(step))},
        "optimizer": {"state": {0: {"step": step}}, "lr": 0.1},
    }


def save(directory: Path, step: int, keep: int | None = None, elements: int = 10) -> Path:
    return write(directory, step=step, parts=parts(step, elements), keep=keep, meta={"step": step})


def assert_content(path: Path, step: int, elements: int = 10) -> None:
    meta, got = read(path)
    assert meta == {"step": step}
    assert list(got) == ["model", "optimizer"]
    assert got["optimizer"] == parts(step)["optimizer"]
    assert torch.equal(got["model"]["weight"], torch.full((elements,), float(step)))
    assert got["model"]["bias"].item() == step


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


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
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user cannot mount a tmpfs")
    yield place
    subprocess.run(["umount", place], check=True)


# What is written


def test_what_is_written_is_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    place = tmp_path / "new" / "checkpoints"
    path = save(place, 42)
    assert path == place / "step-00000042"
    assert_content(path, 42)
    assert find(place) == (path, 42, [])
    assert names(place) == ["latest", "step-00000042"]
    assert (place / "latest").read_text() == "step-00000042\n"
    # The optimizer has no tensors, and so no such file.
    assert names(path) == ["manifest.json", "model.json", "model.safetensors", "optimizer.json"]


def test_the_manifest_says_what_other_tools_find(three: Path) -> None:
    path = three / "step-00000002"
    fields = json.loads((path / "manifest.json").read_text())
    assert (fields["format"], fields["step"], fields["serial"]) == (1, 2, 2)
    assert set(fields["files"]) == set(names(path)) - {"manifest.json"}
    for name, entry in fields["files"].items():
        assert entry == {
            "size": (path / name).stat().st_size,
            "sha256": hashlib.sha256((path / name).read_bytes()).hexdigest(),
        }


def test_the_model_is_a_file_that_plain_pytorch_loads(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    path = write(tmp_path, step=0, parts={"model": model.state_dict()})
    other.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))
    assert torch.equal(other.weight, model.weight)


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (tmp_path / "plain").touch()
    for name in names(path):
        assert (path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode, name


def test_loaded_tensors_outlive_their_files(three: Path) -> None:
    _, got = read(three / "step-00000001")
    shutil.rmtree(three)
    got["model"]["weight"] += 1
    assert torch.equal(got["model"]["weight"], torch.full((10,), 2.0))
    assert got["model"]["weight"].data_ptr() % 64 == 0


def test_a_second_save_at_a_step_stands_beside_the_first_and_is_newer(tmp_path: Path) -> None:
    paths = [write(tmp_path, step=7, parts={"n": number}) for number in range(3)]
    assert [path.name for path in paths] == ["step-00000007", "step-00000007-2", "step-00000007-3"]
    assert find(tmp_path).path == paths[2]
    assert [read(path)[1]["n"] for path in paths] == [0, 1, 2]


def test_newest_is_what_was_written_last_even_with_fewer_steps(three: Path) -> None:
    save(three, 1)
    assert find(three)[:2] == (three / "step-00000001-2", 1)
    save(three, 123_456_789_012)
    assert find(three).step == 123_456_789_012


def test_names_of_parts_and_the_settings_are_checked(tmp_path: Path) -> None:
    for bad in ("", "../model", "a/b", ".hidden", "manifest", "Model"):
        with pytest.raises(CheckpointError, match="part"):
            write(tmp_path, step=0, parts={"model": 1, bad: 2})
    with pytest.raises(SettingError, match=r"keep=0.*at least 1"):
        save(tmp_path, 0, keep=0)
    with pytest.raises(CheckpointError, match="checkpoint meta holds the tensor 'x'"):
        write(tmp_path, step=0, parts={}, meta={"x": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"checkpoint part 'model' at ema\.f: a function cannot be saved"):
        write(tmp_path, step=0, parts={"model": {"ema": {"f": len}}})
    assert names(tmp_path) == []


def test_a_staged_checkpoint_is_written_while_training_goes_on(tmp_path: Path) -> None:
    buffers = SnapshotBuffers()
    for step in (1, 2):
        live = parts(step)
        staged = stage({**live, "tracked": Part.of({"best": torch.ones(2)}, "tracked 'best'")}, buffers)
        live["model"]["weight"].zero_()  # as the next optimizer step would
        live["optimizer"]["state"][0]["step"] = -1
        writer = threading.Thread(target=write, args=[tmp_path], kwargs={"step": step, "parts": staged})
        writer.start()
        writer.join()
        _, got = read(find(tmp_path).path)
        assert torch.equal(got["model"]["weight"], torch.full((10,), float(step)))
        assert got["optimizer"]["state"][0]["step"] == step
        assert got["tracked"]["best"].sum() == 2


def test_everything_is_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    lock = threading.Lock()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def record(kind: str, path: Any) -> None:
        with lock:
            calls.append((kind, Path(path).name))

    monkeypatch.setattr(os, "fsync", lambda h: (record("sync", os.readlink(f"/proc/self/fd/{h}")), fsync(h))[1])
    monkeypatch.setattr(os, "rename", lambda a, b: (record("rename", b), rename(a, b))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (record("replace", b), replace(a, b))[1])
    save(tmp_path / "new", 3)
    files = {"model.safetensors", "model.json", "optimizer.json"}
    assert calls[0] == ("sync", tmp_path.name), "the new directory itself"
    assert {name for _, name in calls[1:4]} == files
    assert calls[4:] == [
        ("sync", "manifest.json"),
        ("sync", "checkpoint"),
        ("rename", "step-00000003"),
        ("sync", "new"),
        ("sync", "latest"),
        ("replace", "latest"),
        ("sync", "new"),
    ]


# What is kept


@pytest.mark.parametrize("keep", [1, 2])
def test_only_the_last_are_kept(three: Path, keep: int) -> None:
    save(three, 4, keep=keep)
    assert names(three) == ["latest", *(f"step-{step:08d}" for step in range(5 - keep, 5))]


def test_the_last_are_those_written_last(three: Path) -> None:
    save(three, 1, keep=2)
    assert names(three) == ["latest", "step-00000001-2", "step-00000003"]


def test_files_of_others_are_never_removed(three: Path) -> None:
    (three / "step-00000001" / "notes.txt").write_text("the best one")
    (three / "step-00000009-old").mkdir()
    (three / "step-00000008").mkdir()
    (three / "step-00000008" / "mine.bin").write_text("not a checkpoint")
    shutil.copytree(three / "step-00000001", three / "best")
    (three / ".tmp-mine").mkdir()
    (three / "link").symlink_to(three / "step-00000002")
    shutil.copytree(three / "step-00000001", three.parent / "elsewhere", dirs_exist_ok=True)
    (three / "step-00000000").symlink_to(three.parent / "elsewhere")
    save(three, 4, keep=1)
    assert names(three) == [
        *(".tmp-mine", "best", "latest", "link"),
        *("step-00000000", "step-00000001", "step-00000004", "step-00000008", "step-00000009-old"),
    ]
    assert names(three / "step-00000001") == ["notes.txt"]
    assert find(three) == (three / "step-00000004", 4, [])
    assert find(three / "best").step == 1


def test_failing_to_tidy_up_does_not_fail_the_save(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (three / "latest").unlink()
    (three / "latest").mkdir()
    (three / "latest" / "x").touch()
    with pytest.warns(UserWarning, match="step-00000004 is saved, but tidying up after it failed"):
        save(three, 4, keep=1)
    assert find(three).step == 4


# What is damaged


def test_one_flipped_bit_in_any_file_is_found_and_the_older_one_used(three: Path) -> None:
    newest, chance = three / "step-00000003", random.Random(0)
    for name in names(newest):
        size = (newest / name).stat().st_size
        for offset in {0, size - 1, *(chance.randrange(size) for _ in range(10))}:
            bit = chance.randrange(8)
            flip(newest / name, offset, bit)
            found = find(three)
            assert found[:2] == (three / "step-00000002", 2), (name, offset, bit)
            assert len(found.damage) == 1
            assert re.search(f"{newest / name}: .*{HASH}", found.damage[0]), found.damage
            with pytest.raises(CheckpointError, match=re.escape(str(newest / name))):
                find(newest)
            flip(newest / name, offset, bit)
    assert find(three) == (newest, 3, [])


def test_no_flipped_bit_of_a_manifest_passes(three: Path) -> None:
    path = three / "step-00000003" / "manifest.json"
    for offset in range(path.stat().st_size):
        flip(path, offset, offset % 8)
        with pytest.raises(manifest.Damage, match=HASH):
            manifest.load(path.parent)
        flip(path, offset, offset % 8)
    assert find(three).step == 3


def test_truncated_missing_and_replaced_files_are_named(three: Path) -> None:
    cut, gone = three / "step-00000003" / "model.safetensors", three / "step-00000002" / "model.json"
    whole = hashlib.sha256(cut.read_bytes()).hexdigest()
    os.truncate(cut, 100)
    gone_hash = hashlib.sha256(gone.read_bytes()).hexdigest()
    gone.unlink()
    (three / "step-00000002" / "optimizer.json").unlink()
    (three / "step-00000002" / "optimizer.json").mkdir()
    found = find(three)
    assert found.step == 1
    now = hashlib.sha256(cut.read_bytes()).hexdigest()
    assert re.fullmatch(f"{cut}: 100 bytes instead of [0-9]+; expected sha256 {whole}, found {now}", found.damage[0])
    assert found.damage[1] == f"{gone}: missing (expected sha256 {gone_hash})"
    assert "optimizer.json: unreadable (Is a directory)" in found.damage[2]
    assert_content(found.path, 1)


def test_without_its_manifest_a_directory_is_no_checkpoint(three: Path) -> None:
    (three / "step-00000003" / "manifest.json").unlink()
    found = find(three)
    assert found == (three / "step-00000002", 2, [f"{three / 'step-00000003' / 'manifest.json'}: missing"])
    with pytest.raises(CheckpointError, match=r"step-00000003 is no whole checkpoint.*manifest\.json: missing"):
        read(three / "step-00000003")


def test_an_older_damaged_one_is_of_no_interest(three: Path) -> None:
    flip(three / "step-00000001" / "model.safetensors", 5)
    assert find(three) == (three / "step-00000003", 3, [])


def test_when_none_is_whole_the_error_names_each_file_and_hash(three: Path) -> None:
    for step in (1, 2, 3):
        flip(three / f"step-0000000{step}" / "model.safetensors", -1)
    (three / "step-00000002" / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match="holds no whole checkpoint") as caught:
        find(three)
    lines = re.findall(r"  (\S+): (.*)", str(caught.value))
    assert [(Path(path).parent.name, Path(path).name) for path, _ in lines] == [
        ("step-00000003", "model.safetensors"),
        ("step-00000002", "model.safetensors"),
        ("step-00000002", "optimizer.json"),
        ("step-00000001", "model.safetensors"),
    ]
    for path, what in lines:
        assert re.fullmatch(f"expected sha256 {HASH}, found {HASH}|missing \\(expected sha256 {HASH}\\)", what), what
        if Path(path).exists():
            assert hashlib.sha256(Path(path).read_bytes()).hexdigest() in what
    assert holds_checkpoint(three)


@pytest.mark.parametrize("pointer", [None, "step-00009999\n", "step-00000001\n", "", "\0\xff", "../../etc"])
def test_the_pointer_is_only_a_hint(three: Path, pointer: str | None) -> None:
    (three / "latest").unlink()
    if pointer is not None:
        (three / "latest").write_text(pointer)
    assert find(three) == (three / "step-00000003", 3, [])
    save(three, 4)
    assert (three / "latest").read_text() == "step-00000004\n"


def rewrite(path: Path, **changes: Any) -> None:
    """Changes a manifest and makes its own hash fit, as another version of the library would write it."""
    fields = {**json.loads((path / "manifest.json").read_text()), **changes, "sha256": "0" * 64}
    fields["sha256"] = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(fields))


def test_a_newer_format_is_refused_and_not_passed_over(three: Path) -> None:
    rewrite(three / "step-00000003", format=2, files="whatever")
    for call in (lambda: find(three), lambda: read(three / "step-00000003"), lambda: find(three / "step-00000003")):
        with pytest.raises(
            CheckpointError, match=r"step-00000003 has checkpoint format 2; this version .* reads format 1"
        ):
            call()
    save(three, 4, keep=1)
    assert names(three) == ["latest", "step-00000003", "step-00000004"], "what we cannot read we do not remove"
    assert find(three).step == 4, "written later than the one of the newer format"


@pytest.mark.parametrize("name", ["../step-00000002/model.json", "/etc/passwd", "a/b"])
def test_a_manifest_reaches_no_file_outside_its_directory(three: Path, name: str) -> None:
    rewrite(three / "step-00000003", files={name: {"size": 1, "sha256": "0" * 64}})
    assert "not a plain file name" in find(three).damage[0]
    with pytest.raises(CheckpointError, match="not a plain file name"):
        read(three / "step-00000003")


# What is not there


def test_where_there_is_nothing_the_error_says_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "chekpoints").mkdir()
    missing = tmp_path / "checkpoints" / "run1"
    with pytest.raises(CheckpointError, match=r"checkpoints/run1 does not exist.* holds: chekpoints\."):
        find(missing)
    assert not holds_checkpoint(missing)
    empty = tmp_path / "chekpoints"
    with pytest.raises(CheckpointError, match=r"holds no checkpoint .* Found there: nothing\."):
        find(empty)
    assert not holds_checkpoint(empty)
    for number in range(10):
        (empty / f"model{number}.pt").touch()
    (empty / "manifest.json").write_text("{}")  # a web site's, say
    with pytest.raises(CheckpointError, match=r"Found there: manifest\.json, model0\.pt, .* and 3 more\."):
        find(empty)
    assert not holds_checkpoint(empty)


def test_a_file_in_place_of_the_directory_is_named(tmp_path: Path) -> None:
    file = tmp_path / "checkpoints"
    file.write_text("x")
    for call in (
        lambda: save(file, 1),
        lambda: find(file),
        lambda: holds_checkpoint(file),
        lambda: save(file / "a", 1),
    ):
        with pytest.raises(CheckpointError, match=rf"{file}.*Give another path"):
            call()
    assert file.read_text() == "x"


def test_one_checkpoint_can_be_given_itself_also_renamed(three: Path) -> None:
    assert find(three / "step-00000001") == (three / "step-00000001", 1, [])
    os.rename(three / "step-00000001", three.parent / "best")
    assert find(three.parent / "best") == (three.parent / "best", 1, [])
    assert holds_checkpoint(three.parent / "best")
    with pytest.raises(CheckpointError, match="the name of one checkpoint"):
        save(three / "step-00000002", 5)
    flip(three.parent / "best" / "manifest.json", 50)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{HASH}"):
        find(three.parent / "best")


# What goes wrong while writing


def test_a_full_disk_leaves_the_old_checkpoints_and_says_so(tiny_disk: Path) -> None:
    save(tiny_disk, 1, elements=250_000)
    before = names(tiny_disk)
    with pytest.raises(CheckpointError, match=rf"saved to {tiny_disk}: No space left on device.* GiB are free there"):
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
        with pytest.raises(CheckpointError, match=rf"{tiny_disk}.*: Read-only file system\. This user may not"):
            call()
    assert find(tiny_disk).step == 1, "reading needs no writing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_is_named(three: Path) -> None:
    three.chmod(0o500)
    with pytest.raises(CheckpointError, match=r"Permission denied\. This user may not"):
        save(three, 4)
    three.chmod(0o700)
    assert find(three).step == 3


@pytest.mark.parametrize("call", ["fsync", "rename", "replace", "mkdir", "open", "stat", "listdir", "unlink"])
def test_an_error_of_the_disk_at_any_call_loses_nothing(
    three: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """In one save the first such call fails, in the next the second, and so on until all have had their turn."""
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

    monkeypatch.setattr(checkpoint, "_install", interrupt)
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


@pytest.mark.slow
def test_kill_before_any_call_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    outcomes = crash("points", tmp_path)
    assert outcomes["old"] > 20, "the kills did not reach the writing"
    assert outcomes["new"] > 10, "nor what comes after the renaming"


@pytest.mark.slow
def test_kill_at_random_never_loses_an_acknowledged_checkpoint(tmp_path: Path) -> None:
    assert crash("kills", tmp_path)["saved"] >= 12


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
    assert names(tmp_path / "new") == ["model.safetensors"]
    with safetensors.safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_that_fails_leaves_the_older_file(tmp_path: Path) -> None:
    path = export(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    (tmp_path / "directory").mkdir()
    with pytest.raises(CheckpointError, match=r"exported to .*directory: it is a directory"):
        export(tmp_path / "directory", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="safetensors cannot hold these tensors"):
        export(path, {"x": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match="safetensors cannot hold these tensors"):
        export(path, {"x": torch.empty(2, device="meta")})
    with files_of_at_most(2**20):
        with pytest.raises(CheckpointError, match=rf"The model could not be exported to {path}: File too large"):
            export(path, {"x": torch.ones(1_000_000)})
    assert torch.equal(safetensors.torch.load_file(path)["x"], torch.ones(2))
    assert names(tmp_path) == ["directory", "model.safetensors"]
