"""paceline.launch: functions in several processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.ranks import children

import paceline
from paceline.errors import LaunchError, SettingError


@pytest.mark.conformance
def test_results_by_rank_and_everything_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """A closure, tensors both ways, settings, and output of rank 0 where sys.stdout is, as notebooks need it."""
    factor = 3

    def work(x: torch.Tensor, extra: dict[str, int]) -> tuple[torch.Tensor, int, float, int]:
        run = paceline.start(device="cpu")
        print("from rank", run.world.rank)
        return x * factor + run.world.rank, extra["a"], run.sum(1.0), run.settings.seed

    results = paceline.launch(work, torch.ones(2), {"a": 5}, nproc=2, tee="1", seed=7)
    assert [value.tolist() for value, *_ in results] == [[3.0, 3.0], [4.0, 4.0]]
    assert [rest for _, *rest in results] == [[5, 2.0, 7]] * 2
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 1] from rank 1", "from rank 0"]


def fail_on_rank_one() -> int:
    import os

    if os.environ["RANK"] == "1":
        raise ValueError("bad data")
    time.sleep(60)
    return 0


@pytest.mark.conformance
def test_a_failure_carries_the_ranks_traceback() -> None:
    with pytest.raises(LaunchError) as caught:
        paceline.launch(fail_on_rank_one, nproc=2)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"launch({__name__}.fail_on_rank_one): rank 1 failed: ValueError: bad data"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[2].endswith("in fail_on_rank_one")
    assert lines[-1] == "ValueError: bad data"


@pytest.mark.conformance
def test_a_timeout_says_where_the_ranks_stood() -> None:
    def wait() -> None:
        time.sleep(600)  # here, and longer than a test may take

    before = children()
    with pytest.raises(LaunchError, match=r"wait\): not done after 2 s\nrank 0 is at test_function.py, line \d+"):
        paceline.launch(wait, nproc=1, timeout=2.0)
    assert set(children()) <= set(before)  # a library may have had processes before


def test_what_cannot_be_sent() -> None:
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"cannot be sent to other processes .*inside the function"):
        paceline.launch(lambda: lock, nproc=1)
    with pytest.raises(LaunchError, match=r"the function's result, of type generator, cannot be sent back"):
        paceline.launch(lambda: (i for i in range(3)), nproc=1)
    with pytest.raises(SettingError, match="not a function"):
        paceline.launch("train.py")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"an unknown setting 'sed'. Did you mean 'seed'"):
        paceline.launch(fail_on_rank_one, sed=3)
    with pytest.raises(LaunchError, match="--nproc 0"):
        paceline.launch(fail_on_rank_one, nproc=0)


class OnlyThere:
    """Cannot be made again: its constructor wants an argument, which pickling does not know."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ("too", "many")


@pytest.mark.conformance
def test_what_cannot_be_made_again() -> None:
    thing = OnlyThere()
    with pytest.raises(
        LaunchError, match=r"cannot be unpickled in this process \(TypeError: .*that can be imported here"
    ):
        paceline.launch(lambda: thing, nproc=1)
    with pytest.raises(LaunchError, match=r"the result of rank 0 cannot be read here \(TypeError: .*Return numbers"):
        paceline.launch(lambda: OnlyThere(), nproc=1)


STOPPED = """
import os, signal, threading, time
import paceline
def work():
    open("begun", "w").close()
    time.sleep(600)
def stop():
    while not os.path.exists("begun"): time.sleep(0.02)
    os.kill(os.getpid(), signal.SIG{name})
if __name__ == "__main__":
    threading.Thread(target=stop, daemon=True).start()
    paceline.launch(work, nproc=1)
"""


@pytest.mark.full
@pytest.mark.parametrize("name", ["TERM", "INT"])
def test_a_signal_does_what_it_would_without_it(name: str, tmp_path: Path) -> None:
    """SIGTERM ends the caller, without a traceback; Ctrl-C raises KeyboardInterrupt."""
    (tmp_path / "script.py").write_text(STOPPED.format(name=name))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == -getattr(signal, f"SIG{name}")
    assert done.stderr.count("Traceback") == (name == "INT"), done.stderr
    assert done.stderr.endswith("\nKeyboardInterrupt\n") == (name == "INT"), done.stderr


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(LaunchError, match="before the function returned"):
        paceline.launch(exit, nproc=1)
    assert list(tmp_path.iterdir()) == []
