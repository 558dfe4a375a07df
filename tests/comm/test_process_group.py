"""A process group ends with its threads: one that lives on may abort the process at its exit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

import paceline
from paceline.comm import process_group


def threads() -> list[str]:
    """Those of gloo, by name."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [name for name in names if "gloo" in name]


def leave_after_training() -> tuple[list[str], list[str]]:
    run = paceline.start(device="cpu", progress="off")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for batch in run.loader(torch.randn(12, 3), global_batch=4):
        run.backward(model(batch).sum())
        run.step(optimizer)
    before = threads()
    run.close()
    process_group.leave()
    return before, threads()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_the_group_outlives_it() -> None:
    for before, after in run_ranks(2, "tests.comm.test_process_group:leave_after_training", deadline=60):
        assert before
        assert not after
