"""Teams of ranks: what a target does ends with it, and one that fails, dies or hangs is told as what it did."""

from __future__ import annotations

import os
import random
import signal
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks


def leave_traces() -> list[object]:
    found = [str(torch.get_default_dtype()), os.environ.get("PACELINE_TRACE"), dist.get_world_size()]
    torch.set_default_dtype(torch.float64)
    os.environ["PACELINE_TRACE"] = "left"
    return found


def draw() -> list[float]:
    return [random.random(), float(np.random.rand())]


def one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def one_hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.barrier()


def one_ends_badly() -> None:
    import atexit

    if dist.get_rank() == 1:
        atexit.register(os._exit, 7)


def test_a_target_leaves_no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("one", "two"):
        monkeypatch.setenv("PACELINE_TRACE", value)
        assert run_ranks(2, "tests.test_ranks:leave_traces") == [["torch.float32", value, 2]] * 2
    monkeypatch.delenv("PACELINE_TRACE")
    assert run_ranks(2, "tests.test_ranks:leave_traces") == [["torch.float32", None, 2]] * 2


def test_ranks_differ_where_processes_do() -> None:
    """In what Python and NumPy draw unseeded: code that takes it for alike on all ranks fails."""
    one, two = run_ranks(2, "tests.test_ranks:draw")
    assert all(a != b for a, b in zip(one, two))


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("one_dies", r"(?s)rank 1 \(exit code -9\)"),
        ("one_hangs", r"(?s)rank 1 \(not done at the deadline\):.*in one_hangs"),
        ("one_ends_badly", r"(?s)rank 1 \(exit code 7\)"),
    ],
)
def test_what_a_rank_did_is_told(target: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        run_ranks(2, f"tests.test_ranks:{target}", deadline=3)
