"""--nproc MIN:MAX: a run goes on with fewer processes, and with all again, to the model of plain PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.ranks import ROOT
from torch import nn

from paceline.data.randomness import permutation

DEADLINE_SECONDS = 100.0  # for what takes fifteen on an idle machine
N, BATCH, EPOCHS = 30, 7, 4  # five batches in an epoch, the last of 2 examples: of three ranks one has none

# Rank 2 dies at step 6. Its device is broken then: in the next start it dies before it has come to anything. The start
# after that has two processes, of which one dies at step 12; for the last one the device is there again.
SCRIPT = r"""
import json, os, signal, sys
import torch, paceline
from torch import nn

start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
def die():
    os.kill(os.getpid(), signal.SIGKILL)
if start == 1 and os.environ["LOCAL_RANK"] == "2":
    die()
run = paceline.start(device="cpu", seed=5, progress="off")
net, (x, y) = torch.load("job.pt", weights_only=False)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model, optimizer = run.prepare(net, optimizer)
loader = run.loader(torch.utils.data.TensorDataset(x, y, torch.arange(len(x))), global_batch=BATCH, shuffle=True)
run.restore("saved", missing_ok=True)
for epoch in run.epochs(EPOCHS):
    for a, b, index in loader:
        if (start, run.steps, rank) in ((0, 6, 2), (2, 12, 1)):
            die()
        run.backward(nn.functional.mse_loss(model(a), b))
        run.step(optimizer)
        with open(f"{rank}.seen", "a") as file:
            print(json.dumps([start, run.steps, run.world_size, index.tolist()]), file=file)
        if run.steps % 4 == 0:
            run.save("saved")
run.export("model.safetensors")
"""


# All ranks fail of one thing, one after the other.
APART = """
import os, time
time.sleep(1 + 0.2 * int(os.environ["RANK"]))
raise ValueError("bad data")
"""

# One rank is killed. The others catch what that brings them, say so and leave, as many scripts do.
CAUGHT = """
import os, signal, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
try:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))
except Exception as error:
    print("training failed:", error, file=sys.stderr)
    LEAVE(3)
open(f"{rank}-of-{size}", "w")
dist.destroy_process_group()
"""


def the_job() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return net, (torch.randn(N, 6, dtype=torch.float64), torch.randn(N, 1, dtype=torch.float64))


def plain_pytorch() -> list[torch.Tensor]:
    net, (x, y) = the_job()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(N, 5, "train", epoch))
        for index in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x[index]), y[index]).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def launched(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", *options, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


@pytest.mark.conformance
def test_where_all_ranks_die_one_after_the_other_as_many_start_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(APART)
    done = launched(tmp_path, "--nproc", "1:3", "--max-restarts", "1")
    assert done.returncode == 1, done.stderr
    assert "paceline: restart 1 of 1.\n" in done.stderr, done.stderr
    assert "ranks 1, 2 failed in the same way.\n" in done.stderr, done.stderr
    assert "on this machine now" not in done.stderr, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("leave", ["sys.exit", pytest.param("os._exit", marks=pytest.mark.full)])
def test_ranks_that_catch_what_the_death_of_another_brings_and_leave_have_not_died_by_themselves(
    tmp_path: Path, leave: str
) -> None:
    (tmp_path / "train.py").write_text(CAUGHT.replace("LEAVE", leave))
    done = launched(tmp_path, "--nproc", "1:3", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*-of-*")} == {"0-of-2", "1-of-2"}, done.stderr
    assert "paceline: 2 processes on this machine now (--nproc 1:3).\n" in done.stderr, done.stderr
    assert "failed too" not in done.stderr, done.stderr


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("strategy", "fewest"), [pytest.param("ddp", 1, marks=pytest.mark.full), ("fsdp", 2)])
def test_a_run_goes_on_with_fewer_processes_and_with_all_again(tmp_path: Path, strategy: str, fewest: int) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("BATCH", str(BATCH)).replace("EPOCHS", str(EPOCHS)))
    torch.save(the_job(), tmp_path / "job.pt")
    done = launched(tmp_path, "--nproc", f"{fewest}:3", "--max-restarts", "3", "--strategy", strategy)
    assert done.returncode == 0, done.stderr
    said = [row for row in done.stderr.splitlines() if row.startswith("paceline: ")]
    assert said == [
        "paceline: restart 1 of 3.",
        "paceline: restart 2 of 3.",
        f"paceline: 2 processes on this machine now (--nproc {fewest}:3).",
        "paceline: restart 3 of 3.",
        f"paceline: 3 processes on this machine now (--nproc {fewest}:3).",
    ], done.stderr
    seen: dict[int, tuple[int, list[int]]] = {}  # step -> (the last start that made it, its examples)
    sizes: dict[int, int] = {}
    for file in tmp_path.glob("*.seen"):
        for start, step, size, index in map(json.loads, file.read_text().splitlines()):
            sizes[start] = size
            if step not in seen or start > seen[step][0]:
                seen[step] = start, []
            if start == seen[step][0]:
                seen[step][1].extend(index)
    assert sizes == {0: 3, 2: 2, 3: 3}  # the start between was over before a batch was taken
    batches = [
        b.tolist() for epoch in range(EPOCHS) for b in torch.from_numpy(permutation(N, 5, "train", epoch)).split(BATCH)
    ]
    assert {step: sorted(index) for step, (_, index) in seen.items()} == {
        step: sorted(batch) for step, batch in enumerate(batches, 1)
    }
    from safetensors.torch import load_file

    net, _ = the_job()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for own, expected in zip(net.parameters(), plain_pytorch(), strict=True):
        assert torch.allclose(own.detach(), expected, rtol=0, atol=1e-10)
