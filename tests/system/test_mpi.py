"""Open MPI: mpirun starts the script, on one host and on two, to the model of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.ports import free_port
from tests.system.needed import need

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

SECONDS = 150.0  # for what takes some five on an idle machine

SCRIPT = r"""
import sys
import torch, paceline
from torch import nn

run = paceline.start(device="cpu", seed=3, progress="off")
w = run.world
sys.stdout.write(f"{w.source} {w.rank} {w.size} {w.local_rank} {w.node} {w.nodes} {' '.join(sys.argv[2:])}\n")
sys.stdout.flush()  # in one piece: mpirun mixes what the ranks print
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).double()
x, y = (torch.randn(48, n, generator=g, dtype=torch.float64) for n in (8, 1))
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=8, shuffle=True)
for epoch in run.epochs(3):
    for batch in loader:
        run.forward_backward(lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), model, batch)
        run.step(optimizer)
run.export(sys.argv[1], model)
"""


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    need("openmpi-bin", "mpirun", "orted")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of one process."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(SCRIPT)
    line = [sys.executable, "script.py", "out"]
    subprocess.run(line, cwd=folder, env=environ(), check=True, timeout=SECONDS, capture_output=True)
    return load_file(folder / "out")


def mpirun(folder: Path, *line: str, **more: str) -> subprocess.CompletedProcess[str]:
    own = ["--allow-run-as-root", "--oversubscribe", "--mca", "oob_tcp_if_include", "lo"]
    command = ["timeout", "--kill-after=5", str(SECONDS), "mpirun", *own, *line]
    return subprocess.run(
        command, cwd=folder, env=environ(**more), capture_output=True, text=True, timeout=SECONDS + 10, check=False
    )


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """||a - b|| / ||a|| over the whole model."""
    difference = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return float((difference / sum(float(value.double().square().sum()) for value in a.values())) ** 0.5)


def test_two_ranks_on_one_host(folder: Path, alone: dict[str, torch.Tensor]) -> None:
    done = mpirun(folder, "-np", "2", sys.executable, "script.py", "out", "a b")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["openmpi 0 2 0 0 1 a b", "openmpi 1 2 1 0 1 a b"]
    assert distance(alone, load_file(folder / "out")) <= 1e-10


def test_four_ranks_on_two_hosts(folder: Path, alone: dict[str, torch.Tensor]) -> None:
    """mpirun reaches the second host by a program that stands for ssh, and starts orted on this machine."""
    (folder / "remote").write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n')
    (folder / "remote").chmod(0o755)
    hosts = ["--host", "localhost:2,n2:2", "-np", "4", "--map-by", "slot"]
    by = ["--mca", "plm_rsh_agent", str(folder / "remote"), "--mca", "plm", "rsh", "--mca", "ras", "^slurm"]
    place = ["-x", "MASTER_ADDR=127.0.0.1", "-x", f"MASTER_PORT={free_port()}"]
    done = mpirun(folder, *hosts, *by, *place, sys.executable, "script.py", "out")
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines()]
    assert sorted(words) == [["openmpi", str(rank), "4", str(rank % 2), str(rank // 2), "2"] for rank in range(4)]
    assert distance(alone, load_file(folder / "out")) <= 1e-10


def test_a_launcher_in_each_rank_is_refused(folder: Path) -> None:
    done = mpirun(folder, "-np", "2", sys.executable, "-m", "paceline", "run", "script.py", "out")
    assert (done.returncode, done.stdout) == (2, "")
    said = r"You are inside rank [01] of 2 of mpirun, and each task would start a separate run\."
    assert re.search(said, done.stderr), done.stderr  # mpirun ends the other one, whichever it is
