"""Small exchanges between the processes of one machine, over Unix sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.comm import neighbours
from paceline.comm.group import leave_neighbours
from paceline.comm.mesh import world_group
from paceline.errors import UsageError


def sockets() -> int:
    return len(psutil.Process().net_connections(kind="unix"))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool], ids=str)
def test_rows_are_the_bits_of_all_processes_in_rank_order(dtype: torch.dtype) -> None:
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    for shape in ((3, 2), (), (0,)):
        rows = met.rows(torch.full(shape, rank - 1).to(dtype))
        expected = torch.stack([torch.full(shape, other - 1).to(dtype) for other in range(size)])
        assert rows.dtype == dtype
        assert torch.equal(rows, expected)
    met.close()


@pytest.mark.ranks(3)
def test_zeros_keep_their_sign_and_what_is_no_number_its_bits() -> None:
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    strange = torch.tensor([-0.0, float("nan"), float("-inf"), 5e-324], dtype=torch.float64)
    for row in met.rows(strange):
        assert torch.equal(row.view(torch.int64), strange.view(torch.int64))
    met.close()


@pytest.mark.ranks(2, 3)
def test_sums_of_replicas_have_the_same_bits_everywhere_and_are_those_of_torch_distributed() -> None:
    replicas, rank, size = world_group(), dist.get_rank(), dist.get_world_size()
    tensor = torch.randn(500, generator=torch.Generator().manual_seed(rank))
    total = replicas.sum(tensor)
    theirs = tensor.clone()
    dist.all_reduce(theirs)
    torch.testing.assert_close(total, theirs, rtol=1e-6, atol=1e-6)
    seen = [torch.empty_like(total) for _ in range(size)]
    dist.all_gather(seen, total)
    assert all(torch.equal(one, total) for one in seen)
    assert replicas.sum(torch.tensor([2**30], dtype=torch.int32)).dtype == torch.int32
    assert replicas._neighbours is not None, "it went over sockets"
    leave_neighbours()


@pytest.mark.ranks(2)
def test_large_tensors_go_by_torch_distributed() -> None:
    large = torch.ones(neighbours.MOST_BYTES // 4 + 1)
    assert torch.equal(world_group().sum(large), large * dist.get_world_size())
    assert world_group()._neighbours is None


@pytest.mark.ranks(2, 3)
def test_the_largest_of_them_do_not_wait_for_each_other() -> None:
    """Everybody writes before anybody reads."""
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    for _ in range(20):
        met.rows(torch.ones(neighbours.MOST_BYTES // 4))
    met.close()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("why", ["machines", "path", "containers"])
def test_processes_that_cannot_reach_each_others_sockets_go_by_torch_distributed(why: str) -> None:
    rank, before = dist.get_rank(), sockets()
    with pytest.MonkeyPatch.context() as patch:
        if why == "machines":
            patch.setattr(socket, "gethostname", lambda: f"machine-{rank % 2}")
        elif rank == 1:
            if why == "path":
                folder = Path(tempfile.mkdtemp()) / ("long" * 30)
                folder.mkdir()
                patch.setattr(tempfile, "tempdir", str(folder))
            else:
                patch.setattr(neighbours, "_connect", lambda *_: False)
        assert neighbours.find_neighbours(world_group()) is None
        assert world_group().sum(torch.ones(2)).tolist() == [3.0, 3.0]
        leave_neighbours()
    assert sockets() == before


@pytest.mark.ranks(2)
def test_another_number_of_bytes_is_named() -> None:
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    met.rows(torch.ones(1))
    with pytest.raises(UsageError, match=r"sends (8|16) bytes for its sum number 1.*Run the same layers"):
        met.rows(torch.ones(2 + 2 * dist.get_rank()))
    met.close()


@pytest.mark.ranks(2)
def test_a_neighbour_that_has_gone_is_named() -> None:
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    if dist.get_rank() == 1:
        met.close()
        return
    with pytest.raises(ConnectionError, match="closed by peer: rank 1 on this machine is lost"):
        met.rows(torch.ones(1))
    met.close()


@pytest.mark.ranks(2)
def test_a_forked_child_lets_go_of_the_connections() -> None:
    """Else the end of a killed process would not be noticed while a worker of its loader lives."""
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    child = os.fork()
    if child == 0:
        os._exit(0 if all(one is None or one.fileno() == -1 for one in met._connections) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert met.rows(torch.ones(1)).sum() == 2
    met.close()


@pytest.mark.ranks(2)
def test_batch_norm_leaves_no_socket_when_its_run_is_closed() -> None:
    before = sockets()
    run = paceline.start(device="cpu", progress="off", strategy="ddp")
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.loader(TensorDataset(torch.randn(16, 2)), global_batch=8):
        run.backward(F.mse_loss(model(x), x.new_zeros(len(x), 3)))
        run.step()
    assert sockets() > before
    world_group().gather(None)
    run.close()
    assert sockets() == before


SCRIPT = """
import os, signal, sys, torch, paceline
from torch.utils.data import TensorDataset
run = paceline.start(strategy="ddp", progress="off")
model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
for (x,) in run.loader(TensorDataset(torch.randn(800, 2)), global_batch=8):
    if run.steps == 5 and run.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    run.backward(model(x).square().mean())
    run.step(optimizer)
"""


@pytest.mark.conformance
@pytest.mark.timeout(90)
def test_of_a_rank_killed_beside_a_batch_norm_the_launcher_names_the_killed_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=80,
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "rank 0 failed" not in done.stderr.partition("\n")[0]


@pytest.mark.ranks(2)
def test_a_look_whether_the_others_live_waits_for_nothing() -> None:
    met = neighbours.find_neighbours(world_group())
    assert met is not None
    met.rows(torch.ones(1))
    met.check()
    dist.barrier()  # until the other has looked too: what is sent in between would be taken for the end
    met.rows(torch.ones(1))
    if met.rank == 0:
        met.close()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(ConnectionError, match="rank 0 on this machine is lost"):
            met.check()
        met.close()
