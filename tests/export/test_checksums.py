"""`paceline check`, and the checksums beside exported files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from paceline.cli import main
from paceline.state import checkpoint
from paceline.state.atomic import write_whole


def check(*paths: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["check", *map(str, paths)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for step in (1, 2):
        checkpoint.write(tmp_path / "saved", step=step, parts={"model_0": {"weight": torch.arange(100.0) * step}})
    return tmp_path / "saved"


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_every_flipped_bit_of_an_export_and_of_its_checksum_is_found(kind: str, saved: Path, tmp_path: Path) -> None:
    file, draw = tmp_path / "model", random.Random(0)
    done = CliRunner().invoke(main, ["export", str(saved), "--to", kind, "-o", str(file)])
    assert done.exit_code == 0, done.output
    assert check(file) == (0, f"{file}: intact\n")
    for one, count in ((file, 200), (Path(f"{file}.sha256"), 100)):
        whole = one.read_bytes()
        for _ in range(count):
            data = bytearray(whole)
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            one.write_bytes(data)
            code, said = check(file)
            assert (code, said.startswith(f"{file}: damaged\n  {file}")) == (1, True), said
        one.write_bytes(whole)
    assert check(file)[0] == 0


def test_sha256sum_checks_what_is_written(saved: Path, tmp_path: Path) -> None:
    file = checkpoint.export(tmp_path / "a model.safetensors", {"weight": torch.ones(3)})
    if shutil.which("sha256sum") is None:
        pytest.skip("there is no sha256sum")
    command = ["sha256sum", "--check", f"{file.name}.sha256"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, f"{file.name}: OK\n"), done.stderr


def test_checksums_cover_the_files_beside(tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"graph")
        path.with_name(f"{path.name}.data").write_bytes(b"weights")

    file = tmp_path / "model.onnx"
    write_whole(file, write, "", checksum=True)
    assert check(file)[0] == 0
    (tmp_path / "model.onnx.data").write_bytes(b"Weights")
    code, said = check(file)
    assert code == 1
    assert f"{file}.data: expected sha256" in said


def test_an_export_that_ends_between_its_file_and_its_checksum_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not that of the file before, by which the new one would be damaged."""
    file, replace = checkpoint.export(tmp_path / "model.safetensors", {"weight": torch.ones(3)}), os.replace

    def fail(one: Path, other: Path) -> None:
        if str(other).endswith(".sha256"):
            raise KeyboardInterrupt
        replace(one, other)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.export(file, {"weight": torch.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert check(file) == (1, f"{file}: damaged\n  {file}.sha256: missing\n")


def test_every_checkpoint_of_a_directory_is_read(saved: Path) -> None:
    newest, oldest = saved / "step-00000002", saved / "step-00000001"
    assert check(saved) == (0, f"{newest}: intact\n{oldest}: intact\n")
    (oldest / "model_0.safetensors").unlink()
    code, said = check(saved)
    assert code == 1
    assert said.startswith(f"{newest}: intact\n{oldest}: damaged\n  {oldest / 'model_0.safetensors'}: missing")
    assert check(newest) == (0, f"{newest}: intact\n")


@pytest.mark.parametrize("text", ["", "no checksums\n", f"{'0' * 64}  ../model\n", f"{'0' * 64}  model", "\0\xff\n"])
def test_checksums_that_are_none_are_no_proof(text: str, tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"weights")
    Path(f"{file}.sha256").write_text(text)
    code, said = check(file)
    assert (code, f"{file}.sha256: damaged" in said) == (1, True), said


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    code, said = check(tmp_path / "empty")
    assert (code, "holds no checkpoint" in said) == (1, True), said
    assert check(tmp_path / "none") == (1, f"{tmp_path}/none: damaged\n  {tmp_path}/none.sha256: missing\n")
    os.mkfifo(tmp_path / "pipe.sha256")
    assert (
        check(tmp_path / "pipe")[1]
        == f"{tmp_path}/pipe: damaged\n  {tmp_path}/pipe.sha256: unreadable (it is a pipe)\n"
    )
    assert check() == (2, check()[1])
