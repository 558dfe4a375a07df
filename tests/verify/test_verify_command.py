"""`paceline verify` as a person calls it: what it prints, writes and leaves behind, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.verify.prepared import PLANTED

from paceline.cli import main

COMMAND = [sys.executable, "-m", "paceline", "verify", "--device", "cpu", "--steps", "2", "--json", "../found.json"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one to be in, with the planted script in it; temporary files have their own."""
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "here" / "train.py").write_text("from beside import main\n\nmain()\n")
    (tmp_path / "here" / "beside.py").write_text(PLANTED.read_text())
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "here"


def verify(folder: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """What was printed, and what --json holds. Nothing else is left."""
    before = sorted(folder.iterdir())
    done = subprocess.run([*COMMAND, *args], cwd=folder, capture_output=True, text=True, timeout=200)
    assert sorted(folder.iterdir()) == before
    assert list((folder.parent / "tmp").glob("paceline*")) == []
    return done, json.loads((folder.parent / "found.json").read_text())


@pytest.mark.conformance
def test_a_fault(folder: Path) -> None:
    done, found = verify(folder, "train.py", "buffer-not-synchronised")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (found["verdict"], found["cause"], found["parameter"]) == ("different", "buffer-not-synchronised", "seen")
    assert done.stdout.startswith("different. First in step 2: the buffers of seen.\nCause: the buffer seen differs")
    assert found["remedy"] in done.stdout
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["A", "L", "LD"]
    number = 1 + [line.strip() for line in PLANTED.read_text().splitlines()].index(found["source"])
    assert (found["file"], found["line"]) == ("beside.py", number)
    assert found["source"].startswith("model.seen.copy_(mean")
    assert f"\nAt beside.py:{number}: model.seen.copy_(" in done.stdout
    assert all(set(claim["runs"]) <= {"A", "L", "LD"} for claim in found["claims"])


@pytest.mark.full
def test_a_script_without_steps(folder: Path) -> None:
    (folder / "other.py").write_text("import paceline\n\npaceline.start()\n")
    done, found = verify(folder, "other.py")
    assert (done.returncode, found["verdict"]) == (2, "could not tell")
    assert "Does it iterate over a loader of the run" in done.stdout


@pytest.mark.parametrize("ends", ["print('hello')", "raise KeyError('no such column')"])
def test_a_script_that_does_not_train(folder: Path, ends: str) -> None:
    (folder / "other.py").write_text(f"import sys\n\n{ends}\n")
    done, found = verify(folder, "other.py", "--lr", "0.1")
    assert (done.returncode, found["verdict"]) == (2, "could not tell")
    assert "The script never imported torch" in done.stdout
    assert ("KeyError: 'no such column'" in done.stdout) == ("KeyError" in ends)


@pytest.mark.conformance
def test_the_same(folder: Path) -> None:
    done, found = verify(folder, "train.py", "mean-of-means", "healthy")
    assert (done.returncode, found["verdict"], found["steps"]) == (0, "same", 2), done.stdout + done.stderr
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["A", "C", "C2", "B"]


@pytest.mark.full
def test_a_script_that_fails(folder: Path) -> None:
    (folder / "other.py").write_text("import paceline\n\npaceline.start()\nraise KeyError('nothing')\n")
    done, _ = verify(folder, "other.py")
    assert done.returncode == 2
    assert done.stdout.startswith("could not tell: your run failed: KeyError: 'nothing'")


@pytest.mark.full
def test_ctrl_c(folder: Path) -> None:
    (folder / "other.py").write_text("import pathlib, time\n\npathlib.Path('../on').touch()\ntime.sleep(100)\n")
    started = subprocess.Popen([*COMMAND, "other.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not (folder.parent / "on").exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    printed, _ = started.communicate(timeout=30)
    assert started.returncode == 130
    assert b"interrupted; all ranks have ended" in printed
    assert not os.path.exists(folder.parent / "found.json")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere.py"], "nowhere.py"),
        (["--steps", "0", str(PLANTED)], "--steps 0"),
        (["--nproc", "1", str(PLANTED)], "--nproc 1"),
        (["--deadline", "0", str(PLANTED)], "--deadline 0"),
        (["--json", "no/such/place.json", str(PLANTED)], "cannot write 'no/such/place.json'"),
        (["--strategy", "dpp", str(PLANTED)], "'dpp' is not known"),
        (["--strategy", "fsdp:stage=7", str(PLANTED)], "stage=7"),
        (["--precision", "fp12", str(PLANTED)], "fp12"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[0],
)
def test_what_cannot_work_is_said_before_anything_starts(args: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["verify", "--device", "cpu", *args])
    assert result.exit_code == 2
    assert said in result.output
