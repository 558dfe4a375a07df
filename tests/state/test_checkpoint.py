"""Checkpoint files: whole or not there at all, whatever is killed, full, flipped, cut off or taken away."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoints import HASH, assert_content, flip, names, parts, save

from paceline.errors import CheckpointError, SettingError
from paceline.state import manifest
from paceline.state.checkpoint import EncodedPart, encode_parts, find, holds_checkpoint, read, write
from paceline.state.snapshot import SnapshotBuffers


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """A directory with checkpoints of the steps 1, 2 and 3."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    return tmp_path


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
        staged = encode_parts({**live, "tracked": EncodedPart.of({"best": torch.ones(2)}, "tracked 'best'")}, buffers)
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


def test_files_of_others_are_never_removed(three: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (three / "step-00000001" / "notes.txt").write_text("the best one")
    (three / "step-00000009-old").mkdir()
    (three / "step-00000008").mkdir()
    (three / "step-00000008" / "mine.bin").write_text("not a checkpoint")
    shutil.copytree(three / "step-00000001", three / "best")
    (three / ".tmp-mine").mkdir()
    (three / "link").symlink_to(three / "step-00000002")
    shutil.copytree(three / "step-00000002", elsewhere / "copy")
    (three / "step-00000000").symlink_to(elsewhere / "copy")
    save(three, 4, keep=1)
    assert names(three) == [
        *(".tmp-mine", "best", "latest", "link"),
        *("step-00000000", "step-00000001", "step-00000004", "step-00000008", "step-00000009-old"),
    ]
    assert names(three / "step-00000001") == ["notes.txt"]
    assert find(three) == (three / "step-00000004", 4, [])
    assert find(three / "best").step == 1
    assert find(elsewhere / "copy").step == 2


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
    assert "optimizer.json: unreadable (it is a directory)" in found.damage[2]
    assert_content(found.path, 1)


def test_without_its_manifest_a_directory_is_no_checkpoint(three: Path) -> None:
    (three / "step-00000003" / "manifest.json").unlink()
    found = find(three)
    assert found == (three / "step-00000002", 2, [f"{three / 'step-00000003' / 'manifest.json'}: missing"])
    with pytest.raises(CheckpointError, match=r"step-00000003 is not an intact checkpoint.*manifest\.json: missing"):
        read(three / "step-00000003")


def test_an_older_damaged_one_is_of_no_interest(three: Path) -> None:
    flip(three / "step-00000001" / "model.safetensors", 5)
    assert find(three) == (three / "step-00000003", 3, [])


def test_when_none_is_whole_the_error_names_each_file_and_hash(three: Path) -> None:
    for step in (1, 2, 3):
        flip(three / f"step-0000000{step}" / "model.safetensors", -1)
    (three / "step-00000002" / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match="holds no intact checkpoint") as caught:
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
    rewrite(three / "step-00000003", format=3, files="whatever")
    for call in (lambda: find(three), lambda: read(three / "step-00000003"), lambda: find(three / "step-00000003")):
        with pytest.raises(
            CheckpointError, match=r"step-00000003 has checkpoint format 3; this version .* reads formats 1 and 2"
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
    with pytest.raises(CheckpointError, match=r"checkpoints/run1 does not exist.* contains: chekpoints\."):
        find(missing)
    assert not holds_checkpoint(missing)
    empty = tmp_path / "chekpoints"
    with pytest.raises(CheckpointError, match=r"holds no checkpoint .* It contains: nothing\."):
        find(empty)
    assert not holds_checkpoint(empty)
    for number in range(10):
        (empty / f"model{number}.pt").touch()
    (empty / "manifest.json").write_text("{}")  # a web site's, say
    with pytest.raises(CheckpointError, match=r"It contains: manifest\.json, model0\.pt, .* and 3 more\."):
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
        with pytest.raises(CheckpointError, match=rf"{file}.*Use another path"):
            call()
    assert file.read_text() == "x"


def test_one_checkpoint_can_be_given_itself_also_renamed(three: Path) -> None:
    assert find(three / "step-00000001") == (three / "step-00000001", 1, [])
    os.rename(three / "step-00000001", three / "best")
    assert find(three / "best") == (three / "best", 1, [])
    assert holds_checkpoint(three / "best")
    with pytest.raises(CheckpointError, match="the name of one checkpoint"):
        save(three / "step-00000002", 5)
    flip(three / "best" / "manifest.json", 50)
    with pytest.raises(CheckpointError, match=rf"manifest\.json: .*{HASH}"):
        find(three / "best")
