"""What the ranks print, restarts, and ranks that leave early: launches in this process, which has torch already."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from types import ModuleType

import pytest

from paceline import launcher
from paceline.errors import LaunchError
from paceline.launcher import stalls
from paceline.launcher.output import Output
from paceline.launcher.stacks import StackSample, is_waiting


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to run in; its `tmp` is where launches make theirs."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(place: Path, code: str) -> str:
    (place / "script.py").write_text("import os, sys, time\nrank = int(os.environ['RANK'])\n" + code)
    return "script.py"


def mark_what_is_said(place: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file `said`, for which a script can wait, once this module of the launcher has printed something."""
    say = module.say

    def marked(text: str) -> None:
        say(text)
        (place / "said").touch()

    monkeypatch.setattr(module, "say", marked)


def test_other_ranks_print_into_files(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = "print('out', rank); print('err', rank, file=sys.stderr)"
    assert launcher.run(script(place, code), nproc=3, output="logs") == 0
    assert capfd.readouterr() == ("out 0\n", "err 0\n")
    assert sorted(path.name for path in (place / "logs").iterdir()) == ["rank-1.log", "rank-2.log"]
    assert (place / "logs" / "rank-2.log").read_text() == "out 2\nerr 2\n"
    assert list((place / "tmp").iterdir()) == []


def test_a_failed_run_keeps_them_and_shows_the_last_lines(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (  # rank 1 dies after the others have printed: a file without a word is not worth naming
        "print('rank', rank, flush=True)\n"
        "open(f'printed.{rank}', 'w').close()\n"
        "while rank == 1 and not all(os.path.exists(f'printed.{r}') for r in (0, 2)): time.sleep(0.01)\n"
        "if rank == 1: print('almost'); os.kill(os.getpid(), 11)\n"
        "time.sleep(60)"
    )
    assert launcher.run(script(place, code), nproc=3) == 139
    out, err = capfd.readouterr()
    (kept,) = (place / "tmp").iterdir()
    assert out == "rank 0\n"
    assert err == (
        "rank 1 was killed by SIGSEGV (a crash in native code), at script.py, line 6\n"
        "Its last output:\n  rank 1\n  almost\n"
        f"The output of the other ranks is in {kept} (rank-1.log, ...).\n"
    )
    assert sorted(path.name for path in kept.iterdir()) == ["rank-1.log", "rank-2.log"]


AT_NATIVE_EXIT = """
import atexit, ctypes, sys
libc = ctypes.CDLL(None)
# The C library calls it after the end of the interpreter, as it calls the destructors of torch's libraries.
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
if rank == 1: atexit.register(print, "exit functions")
print("all done", end="")
{end}
"""


def test_a_crash_of_native_code_after_all_exit_functions_costs_nothing(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launcher.run(script(place, AT_NATIVE_EXIT.format(end="")), nproc=2, output="logs") == 0
    out, err = capfd.readouterr()
    assert out == "all done"
    assert (place / "logs" / "rank-1.log").read_text() == "all doneexit functions\n"
    assert sorted(err.splitlines()) == [
        f"paceline: rank {rank} was killed by SIGABRT (native code aborted; see its message above) after its script "
        "and all exit functions had finished. This is not an error."
        for rank in (0, 1)
    ]


def test_a_crash_of_native_code_at_the_exit_of_a_failed_rank_is_a_failure(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launcher.run(script(place, AT_NATIVE_EXIT.format(end="sys.exit(3)")), nproc=2) == 128 + signal.SIGABRT
    assert "This is not an error" not in capfd.readouterr().err


def test_tee_shows_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(str(tmp_path), frozenset({1}))
    assert output.open(0, first=True) is None
    for rank in (1, 2):
        file = output.open(rank, first=False)
        assert file is not None
        with file:
            file.write(b"one\ntwo, h")
            file.flush()
            output.show()
            file.write(b"alf\nthree")
    output.show()
    assert capsys.readouterr().out == "[rank 1] one\n[rank 1] two, half\n"
    assert output.close(failed=False) == ""
    assert capsys.readouterr().out == "[rank 1] three\n"
    assert not os.path.exists(output.private)


def test_a_place_that_cannot_be_written(place: Path) -> None:
    (place / "file").touch()
    with pytest.raises(LaunchError, match=r"--output file/logs: cannot create the directory: Not a directory"):
        launcher.run(script(place, ""), output="file/logs")
    assert list((place / "tmp").iterdir()) == []


@pytest.mark.full
def test_restarts(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All workers again, with a fresh store: gloo would find the addresses of those before."""
    code = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("start", count)
assert dist.distributed_c10d._get_default_store().add("starts", 1) <= 2
total = torch.ones(1)
dist.all_reduce(total)
if rank == 1 and count == "0": os.kill(os.getpid(), 9)
dist.all_reduce(total)
print("end", int(total))
"""
    assert launcher.run(script(place, code), nproc=2, max_restarts=2, output="logs") == 0
    out, err = capfd.readouterr()
    assert out == "start 0\nstart 1\nend 4\n"
    assert (place / "logs" / "rank-1.log").read_text() == out
    assert err.endswith("paceline: restart 1 of 2.\n")
    assert err.startswith("rank 1 was killed by SIGKILL (perhaps out of memory)\n")
    code = "print(rank); sys.exit(3)"
    assert launcher.run(script(place, code), max_restarts=1) == 3
    assert capfd.readouterr().err == (
        "rank 0 ended with exit code 3\npaceline: restart 1 of 1.\nrank 0 ended with exit code 3\n"
    )


@pytest.mark.conformance
def test_a_rank_that_others_wait_for_in_vain(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left before it joined: torch itself would wait for half an hour."""
    monkeypatch.setattr(stalls, "LEFT_SECONDS", 1.0)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(stalls, "STUCK_SECONDS", 3.0)
    code = "if rank == 1: sys.exit()\nimport torch.distributed as dist\ndist.init_process_group('gloo')"
    assert launcher.run(script(place, code), nproc=2) == 1
    notice, story = capfd.readouterr().err.splitlines()
    assert notice == (
        "paceline: rank 1 ended 1 s ago, with exit code 0, by sys.exit() at script.py, line 3; rank 0 is still running."
    )
    assert story.startswith(
        "rank 1 ended early, with exit code 0, by sys.exit() at script.py, line 3, and rank 0 has waited since then at "
        "script.py, line 5, in init_process_group()"
    )


def test_ranks_that_wait_are_said(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call on one rank only: which rank waits, in which of the script's lines, and which one has not come. It comes
    once that has been said."""
    mark_what_is_said(place, stalls, monkeypatch)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 2.0)
    code = """
import paceline, torch
run = paceline.start(device="cpu", progress="off")
model = run.prepare(torch.nn.Linear(2, 2))
if run.main:
    run.save("checkpoints")
while rank == 1 and not os.path.exists("said"): time.sleep(0.2)
if rank == 1:
    run.save("checkpoints")
print("saved")
"""
    assert launcher.run(script(place, code), nproc=2) == 0
    out, err = capfd.readouterr()
    assert out == "saved\n"
    head, first, second, away, calls, *advice = err.splitlines()
    assert re.fullmatch(r"paceline: rank 0 has waited for other ranks for \d s\.", head), err
    assert re.fullmatch(r"  rank 0 waits at script.py, line 8, in save\(\) \(\w+\)", first), err
    assert second == "  rank 1 is at script.py, line 9"
    assert away == "  rank 1 has not reached that call."
    under_way = r"rank 0 is in call (\d+), \w+ of .*; rank 1 is in none, after call (\d+), \w+( of .*)?"
    numbers = re.fullmatch(rf"  In group default_pg \(gloo\): {under_way}\.", calls)
    assert numbers is not None, err
    assert int(numbers[1]) == int(numbers[2]) + 1, err
    assert "run.save(...)" in advice[0]


@pytest.mark.conformance
def test_ranks_that_move_are_not_waiting(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(stalls, "STALL_SECONDS", 0.5)
    code = "for i in range(2 * 10**7):\n    if i % 2:\n        i\nprint('done')"
    assert launcher.run(script(place, code), nproc=2) == 0
    assert capfd.readouterr() == ("done\n", "")


def test_to_be_asked_kills_nobody(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a rank that has become another program, which knows nothing of its launcher."""
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.1)
    code = "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1.5)'])"
    assert launcher.run(script(place, code), nproc=2) == 0


def test_a_rank_that_goes_on_alone_may(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "LEFT_SECONDS", 0.3)
    monkeypatch.setattr(stalls, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(stalls, "STUCK_SECONDS", 0.5)
    mark_what_is_said(place, stalls, monkeypatch)
    code = """
while rank == 0 and not os.path.exists("said"): time.sleep(0.02)
if rank == 0:
    time.sleep(1.0)  # alone, for longer than a rank may be stuck
    print("uploaded")
"""
    assert launcher.run(script(place, code), nproc=2) == 0
    out, err = capfd.readouterr()
    assert out == "uploaded\n"
    assert re.fullmatch(
        r"paceline: rank 1 ended \d+ s ago, with exit code 0, at the end of script.py; rank 0 is still running\.\n", err
    ), err


TORCH = "/v/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("frame", "cpu", "waiting"),
    [
        (f"{TORCH}/distributed/distributed_c10d.py", 30.0, True),  # NCCL waits with a busy core
        (f"{TORCH}/autograd/graph.py", 0.1, True),
        (f"{TORCH}/autograd/graph.py", 29.0, False),  # a backward that computes
        (f"{TORCH}/serialization.py", 0.1, False),  # a slow disk
        ("/home/me/train.py", 0.1, False),
    ],
)
def test_what_counts_as_waiting(frame: str, cpu: float, waiting: bool) -> None:
    frames = ((frame, 1, "f"), ("/home/me/train.py", 12, "main"))
    assert is_waiting(StackSample(frames, 5.0), StackSample(frames, 5.0 + cpu), 30.0) is waiting
    where = "train.py, line 1" if frame.startswith("/home") else "train.py, line 12, in f()"
    assert str(StackSample(frames, 0.0)) == where


def test_the_line_is_the_scripts_where_an_installed_library_calls() -> None:
    """Lightning's and Hugging Face's loops are files of nobody who reads this."""
    library = (
        (f"{TORCH}/distributed/distributed_c10d.py", 5000, "barrier"),
        (f"{os.path.dirname(TORCH)}/lightning/strategies/ddp.py", 13, "barrier"),
        (f"{os.path.dirname(TORCH)}/lightning/trainer.py", 14, "fit"),
    )
    assert (
        str(StackSample((*library, ("/home/me/train.py", 12, "<module>")), 0.0))
        == "train.py, line 12, in fit() (barrier)"
    )
    assert str(StackSample(library, 0.0)) == "ddp.py, line 13, in barrier()"  # -m lightning, say
