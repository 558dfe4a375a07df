"""Standard streams that are closed, full or not read, and a temporary folder without room: none of that ends a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import world
from paceline.launcher import streams
from paceline.launcher.output import Output
from paceline.launcher.stop_request import StopRequest
from paceline.world import LEFT, SAVED, read_message, send_to_launcher, was_sent, withdraw

DEADLINE_SECONDS = 120.0
PACELINE = f"{sys.executable} -m paceline"


def shell(line: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A shell's `PACELINE` and streams, with a deadline."""
    return subprocess.run(
        ["sh", "-c", line.replace("paceline ", f"{PACELINE} ", 1)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


# ---------------------------------------------------------------- streams


@pytest.mark.skipif(sys.platform != "linux", reason="a pipe that keeps each write apart (O_DIRECT) is Linux's")
def test_each_write_ends_at_a_line_end_so_that_rank_0_writes_between_lines() -> None:
    """A write of more than one pipe page is cut; rank 0, which has the same pipe, may write at every cut."""
    lines = b"".join(b"%d " % number + b"x" * (number % 90) + b"\n" for number in range(400))
    reader, writer = os.pipe2(os.O_DIRECT)
    assert streams.unwritten(writer, lines, time.monotonic() + DEADLINE_SECONDS) == b""
    os.close(writer)
    with open(reader, "rb", buffering=0) as file:
        writes = list(iter(lambda: file.read(65536), b""))
    assert b"".join(writes) == lines
    assert len(writes) > 1
    assert all(written.endswith(b"\n") for written in writes)


def test_a_line_longer_than_a_page_is_written_whole() -> None:
    reader, writer = os.pipe()
    text = b"short\n" + b"x" * 10_000 + b"\nshort\n"
    assert streams.unwritten(writer, text, time.monotonic() + DEADLINE_SECONDS) == b""
    os.close(writer)
    with open(reader, "rb") as file:
        assert file.read() == text


# Rank 1 fails at the first start, so that the launcher has something to say.
SCRIPT = """
import os, sys
print("on stdout")
print("on stderr", file=sys.stderr)
os.write(1, b"written to 1\\n")
open(f"done-{os.environ['RANK']}", "a").write("x")
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("once")
"""


@pytest.mark.parametrize(
    "closed",
    [
        ">&-",
        pytest.param("2>&-", marks=pytest.mark.conformance),
        pytest.param("<&-", marks=pytest.mark.conformance),
        "<&- >&- 2>&-",
        pytest.param(">/dev/full 2>/dev/full", marks=pytest.mark.conformance),
    ],
)
def test_a_run_with_closed_streams(tmp_path: Path, closed: str) -> None:
    full = "full" in closed  # where rank 0 cannot print: that is the script's own error
    script = (
        SCRIPT.replace("print(", "(lambda *_, **__: None)(").replace("os.write", "(lambda *_: None)")
        if full
        else SCRIPT
    )
    (tmp_path / "train.py").write_text(script)
    done = shell(f"paceline run --nproc 2 --max-restarts 1 --tee all train.py {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done-1").read_text() == "xx"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["done-0", "done-1", "train.py"]
    if closed == ">&-":
        assert "rank 1 failed: ValueError: once" in done.stderr
        assert (tmp_path / "done-0").read_text() != ""


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["--version", "secret new", "submit --slurm --dry-run train.py", "run none.py"])
def test_other_commands_with_closed_streams(tmp_path: Path, words: str, closed: str) -> None:
    (tmp_path / "train.py").touch()
    done = shell(f"paceline {words} {closed}", tmp_path)
    assert done.returncode == (2 if "none" in words else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert (words != "secret new") or len((tmp_path / "new").read_text().strip()) == 64


def test_a_command_whose_output_has_no_room(tmp_path: Path) -> None:
    done = shell("paceline submit --slurm --dry-run train.py >/dev/full", tmp_path)
    (tmp_path / "train.py").touch()
    done = shell("paceline submit --slurm --dry-run train.py >/dev/full", tmp_path)
    assert done.returncode == 120
    assert done.stderr == "paceline: cannot write the output: No space left on device.\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def fill(end: int) -> int:
    os.set_blocking(end, False)
    size = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            size += os.write(end, b"x" * 4096)
    os.set_blocking(end, True)
    return size


def test_a_message_does_not_wait_for_a_reader_that_does_not_come(pipe: tuple[int, int], monkeypatch: Any) -> None:
    with open(pipe[1], "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "__stderr__", stream)
        assert streams.write(stream, "read\n", 0.0)
        assert os.read(pipe[0], 100) == b"read\n"
        fill(pipe[1])
        assert not streams.write(stream, "not read\n", 0.0)
        os.close(pipe[0])
        assert not streams.write(stream, "nobody reads\n", 0.0)
        assert not streams.write(stream, "nobody reads\n")
        stream.close = lambda: None  # type: ignore[method-assign]  # its buffer cannot be written either
    assert not streams.write(None, "nowhere\n")


def test_a_pipe_gets_all_of_a_ranks_output_however_late_it_is_read(pipe: tuple[int, int], monkeypatch: Any) -> None:
    output = Output(None, None)
    with open(pipe[1], "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        file = output.open(1, first=False)
        assert file is not None
        lines = [f"line {number}" for number in range(20_000)]  # more than a pipe holds
        file.write("".join(f"{line}\n" for line in lines).encode())
        file.close()
        os.set_blocking(pipe[0], False)
        read = b""
        while not read.endswith(f"{lines[-1]}\n".encode()):
            output.show()
            with contextlib.suppress(BlockingIOError):
                read += os.read(pipe[0], 1 << 16)
        output.close(failed=False)
    assert read.decode() == "".join(f"[rank 1] {line}\n" for line in lines)


# ---------------------------------------------------------------- a folder without room


def test_messages_of_a_rank_go_into_memory_where_the_disk_takes_none(tmp_path: Path, monkeypatch: Any) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(world, "SHARED_MEMORY", str(memory))
    folder = tmp_path / "gone"  # as where the folder cannot be written, whoever the user is
    path = str(folder / "error-1")
    environ = {"PACELINE_ERROR_FILE": path}
    assert send_to_launcher(environ, SAVED, "somewhere")
    assert read_message(path, SAVED) == "somewhere"
    assert (memory / "gone").stat().st_mode & 0o777 == 0o700
    withdraw(environ, SAVED)
    assert not was_sent(path, SAVED)
    # Another user's folder, or one that others can write, is not used.
    (memory / "gone").chmod(0o777)
    assert not send_to_launcher(environ, SAVED, "somewhere")
    assert read_message(path, SAVED) is None
    shutil.rmtree(memory)
    assert not send_to_launcher(environ, LEFT)  # and raises nothing
    assert not send_to_launcher({}, LEFT)


def test_a_stop_file_that_cannot_be_written_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    request = StopRequest(str(tmp_path / "gone" / "stop-1"), None, 0, 1)  # type: ignore[arg-type]
    request.poll(asked=True)
    request.end()
    assert not request.works
    assert capfd.readouterr().err.count("so a signal cannot ask this run to save a checkpoint") == 1


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB and 60 files, where this user may mount one."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=60", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


FILLS = """
import json, os, sys
from pathlib import Path
import paceline, torch
run = paceline.start(device="cpu", progress="off")
net = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = run.loader(torch.utils.data.TensorDataset(torch.ones(40, 4)), global_batch=4)
run.restore("checkpoints", missing_ok=True)
for batch in loader:
    run.backward(model(batch[0]).mean())
    if run.step(optimizer) and run.steps == 4:
        run.save("checkpoints")
    if run.steps == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if run.rank == 1:
            folder = Path(os.environ["TMPDIR"])
            try:
                with open(folder / "fill", "wb") as file:
                    while True:
                        file.write(b"x" * 4096)
                        file.flush()
            except OSError:
                pass
            try:
                for number in range(100):
                    (folder / f"inode-{number}").touch()
            except OSError:
                pass
            print("words that have no room" * 10_000)
            sys.stdout.flush()
            print("an error", file=sys.stderr)
            raise ValueError("at step 5")
print(f"rank {run.rank} ends at {run.steps}")
Path(f"ended-{run.rank}").write_text(str(run.steps))
"""


@pytest.mark.conformance
def test_a_run_whose_temporary_folder_is_full_starts_again(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "train.py").write_text(FILLS)
    done = shell("paceline run --nproc 2 --max-restarts 1 train.py", tmp_path, TMPDIR=str(tiny))
    assert done.returncode == 0, done.stderr
    assert "rank 1 failed: ValueError: at step 5" in done.stderr
    assert "restart 1 of 1" in done.stderr
    assert "rank 0 ends at 10" in done.stdout
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in (0, 1)] == ["10", "10"]
    assert sorted(path.name for path in tiny.iterdir() if path.name.startswith("paceline-")) == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("paceline-")]
