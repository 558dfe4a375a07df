"""`paceline verify` makes two runs of one process at the same time. The scripts here notice another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two runs at once need two cores")

SCRIPT = dedent(
    """\
    import os, sys, time
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    folder = Path(os.environ["MEETING"])

    def meet() -> None:
        {meet}

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
    model = DistributedDataParallel(torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alone = dist.get_world_size() == 1
    for number, (x, y) in enumerate(DataLoader(data, 4, sampler=DistributedSampler(data))):
        if number == 2 and alone:
            meet()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    """
)

MEETS = """\
(folder / str(os.getpid())).touch()
    for _ in range(1200):
        if len(list(folder.iterdir())) >= 2:
            return
        time.sleep(0.05)
    sys.exit("no other process came within a minute")"""

REFUSES = """\
(folder / str(os.getpid())).touch()
    try:
        for _ in range(60):
            time.sleep(0.05)
            if len(list(folder.iterdir())) > 1:
                sys.exit("another process uses the folder")
    finally:
        (folder / str(os.getpid())).unlink()"""

WAITS = """\
(folder / str(os.getpid())).touch()
    time.sleep(120)"""


def start(folder: Path, meet: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(meet=meet))
    (folder / "meeting").mkdir()
    line = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "4", "--json", "found.json"]
    environ = {**os.environ, "MEETING": str(folder / "meeting")}
    environ.pop("OMP_NUM_THREADS", None)
    return subprocess.Popen(
        [*line, str(script)], cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(started: subprocess.Popen[str], folder: Path) -> tuple[int, str, Any]:
    said, _ = started.communicate(timeout=240)
    found = folder / "found.json"
    return started.returncode, said, json.loads(found.read_text()) if found.exists() else None


@pytest.mark.conformance
def test_a_run_and_its_repetition_meet(tmp_path: Path) -> None:
    code, said, _ = end(start(tmp_path, MEETS), tmp_path)
    assert code == 0, said
    assert said.count("C: ") == said.count("C2: ") == 1  # neither was made again


@pytest.mark.full
def test_runs_that_disturb_each_other_are_made_again_alone(tmp_path: Path) -> None:
    code, said, _ = end(start(tmp_path, REFUSES), tmp_path)
    assert code == 0, said
    assert said.count("C: ") + said.count("C2: ") > 2


@pytest.mark.parametrize(
    "signum",
    [pytest.param(signal.SIGINT, marks=pytest.mark.full), pytest.param(signal.SIGTERM, marks=pytest.mark.conformance)],
)
def test_a_signal_ends_both(tmp_path: Path, signum: signal.Signals) -> None:
    started = start(tmp_path, WAITS)
    meeting = tmp_path / "meeting"
    deadline = time.monotonic() + 120
    while len(list(meeting.iterdir())) < 2 and time.monotonic() < deadline and started.poll() is None:
        time.sleep(0.05)
    waiting = [int(one.name) for one in meeting.iterdir()]
    assert len(waiting) == 2
    started.send_signal(signum)
    code, said, found = end(started, tmp_path)
    assert (code, found) == (128 + signum, None), said
    assert not any(map(psutil.pid_exists, waiting))
