"""Sums in memory that the processes of one machine share: their bits, their ends, and what is left of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm import shared_memory
from paceline.comm.mesh import world_group
from paceline.comm.shared_memory import PART_BYTES, SharedMemory
from paceline.compare.worker.resources import traffic
from paceline.errors import UsageError

pytestmark = pytest.mark.timeout(120)


def met() -> SharedMemory:
    memory = shared_memory.open_memory(world_group())
    assert memory is not None
    return memory


def addend(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(length, generator=torch.Generator().manual_seed(1000 * rank + length), dtype=torch.float64)
    return (8 * values).to(dtype)


@pytest.mark.ranks(2, full=(3, 4))
def test_the_sum_is_that_of_the_addends_in_rank_order_bit_for_bit() -> None:
    memory, rank, size = met(), dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        part = PART_BYTES // torch.empty(0, dtype=dtype).element_size()
        for length in (0, 1, 2, 7, part - 1, part, part + 1, 3 * part + 5):
            expected = addend(0, length, dtype)
            for other in range(1, size):
                expected += addend(other, length, dtype)
            found = addend(rank, length, dtype)
            memory.add(found)
            assert torch.equal(found, expected), (dtype, length)
    memory.close()


@pytest.mark.ranks(2, full=3)
def test_a_late_process_gets_what_the_others_have_long_had() -> None:
    """A process that is late at each of the two waits, so that the others sleep, and so that they go on while it still
    copies."""
    memory, rank, size = met(), dist.get_rank(), dist.get_world_size()
    for number in range(12):
        if number % size == rank:
            time.sleep(0.03)
        flat = torch.full((3 * PART_BYTES // 4 + 1,), float(rank + number))
        memory.add(flat)
        assert (flat == sum(range(size)) + size * number).all()
    memory.close()


class Moved(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            into, source = args[:2]
            self.nbytes += into.nbytes + source.nbytes + (into.nbytes if func is torch.ops.aten.add_.Tensor else 0)
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(2, conformance=4, full=(8, 16))
def test_it_moves_no_more_bytes_than_a_ring_through_sockets() -> None:
    """Each process reads and writes 4 B + 3 (n - 1) / n B. gloo sends 2 (n - 1) / n B, measured, and receives as much:
    each byte is copied into the kernel and out of it (2 reads and 2 writes), and half of them are added (3)."""
    n, nbytes = dist.get_world_size(), 2**24  # a multiple of all these n
    memory, flat = met(), torch.ones(nbytes // 4)
    with Moved() as moved:
        memory.add(flat)
    assert (flat == n).all()
    assert moved.nbytes == 4 * nbytes + 3 * nbytes * (n - 1) // n
    dist.all_reduce(torch.ones(1))
    before = traffic()
    dist.all_reduce(flat)
    dist.barrier()
    after = traffic()
    assert before is not None
    assert after is not None
    sent = after.sent - before.sent
    assert sent == pytest.approx(2 * nbytes * (n - 1) / n, rel=0.01)
    assert moved.nbytes <= (4 + 1.5) * sent
    memory.close()


@pytest.mark.ranks(2)
def test_other_lengths_are_named() -> None:
    memory, rank = met(), dist.get_rank()
    with pytest.raises(UsageError, match=rf"rank {1 - rank} sums {'4' if rank else '8'} bytes, but this process sums"):
        memory.add(torch.ones(1 + rank))
    memory.close()


@pytest.mark.ranks(2)
def test_nothing_is_left_and_nothing_is_open_afterwards() -> None:
    me = psutil.Process()
    before = me.num_fds(), len(list(Path("/dev/shm").iterdir()))
    for _ in range(3):
        memory = met()
        memory.add(torch.ones(5))
        memory.close()
        del memory
    assert (me.num_fds(), len(list(Path("/dev/shm").iterdir()))) == before
    assert not [one for one in me.memory_maps() if "paceline" in one.path]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("why", ["machines", "system"])
def test_processes_that_cannot_share_memory_are_told_so(why: str) -> None:
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if why == "machines":
            patch.setattr(socket, "gethostname", lambda: f"machine-{rank}")
        elif rank == 1:
            patch.setattr(shared_memory, "supported", lambda: False)
        assert shared_memory.open_memory(world_group()) is None


SCRIPT = """
import os, sys, time, torch, paceline
run = paceline.start(device="cpu", strategy="ddp:reducer=shared_memory", progress="off")
model = torch.nn.Linear(1000, 1000)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
run.prepare(model, optimizer)
open(f"pid{run.rank}", "w").write(str(os.getpid()))
for batch in run.batches(lambda rows: torch.ones(len(rows), 1000), global_batch=4):
    run.forward_backward(lambda model, x: model(x).square().mean(), model, batch)
    run.step(optimizer)
    if run.steps == 20:
        open(f"ready{run.rank}", "w").close()
"""


@pytest.mark.conformance
def test_when_a_process_is_killed_the_others_end_and_say_whose_fault_it_was(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "rank 1 was killed by SIGKILL" in err
    assert not any(psutil.pid_exists(pid) for pid in pids)
