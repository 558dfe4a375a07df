"""What processes tell each other before they have a process group, and how the group ends.

A group ends with its threads: one that lives on may abort the process at its exit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.ranks import run_ranks

import paceline
from paceline import session
from paceline.comm import process_group
from paceline.config import Settings, StrategySpec
from paceline.world import World


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


# ---------------------------------------------------------------- before there is a group

CASES: dict[str, tuple[Settings, int, list[str]]] = {
    # settings, GPUs that each process sees, what these are on ranks 0 to 2
    "own": (Settings(), 1, ["GPU-a", "GPU-b", "GPU-c"]),  # bound to each task
    "shared": (Settings(device="cuda:0"), 1, ["GPU-a", "GPU-b", "GPU-a"]),
    "unknown": (Settings(), 3, ["0000", "0000", "0000"]),
    "servers": (Settings(strategy=StrategySpec("parameter_server")), 2, ["GPU-a", "GPU-b", "none"]),
    "cpu": (Settings(device="cpu"), 1, ["none"] * 3),
    "machines": (Settings(), 2, ["GPU-a", "GPU-b", "GPU-c"]),  # ranks 0 and 1 on one, rank 2 on another
}


def join_with_gpus(folder: str) -> dict[str, list[object]]:
    """On three ranks, for each case: the device, the backends and the bound device that it comes to, and the keys of
    the store. There is no GPU here: what torch says of GPUs is replaced, and every group is gloo's."""
    rank = dist.get_rank()
    process_group.leave()
    found: dict[str, list[object]] = {}
    with pytest.MonkeyPatch.context() as patch:
        made: list[object] = []
        original = dist.init_process_group

        def init_process_group(backend: str | None, **given: object) -> None:
            store = given["store"]
            told = [f"paceline/{what}/0" for what in ("hosts", "cards")]
            made[:] = [backend, str(given["device_id"]), [key for key in told if store.check([key])]]  # type: ignore[attr-defined]
            original("gloo", **{**given, "device_id": None})  # type: ignore[arg-type]

        for variable in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            patch.delenv(variable)
        patch.setattr(dist, "init_process_group", init_process_group)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        patch.setattr(torch.accelerator, "set_device_index", lambda index: None)
        for name, (settings, count, cards) in CASES.items():
            patch.setattr(torch.accelerator, "device_count", lambda count=count: count)
            uuid = cards[rank]
            patch.setattr(torch.cuda, "get_device_properties", lambda device, uuid=uuid: type("P", (), {"uuid": uuid}))
            patch.setattr(process_group, "machine", lambda name=name: str(name == "machines" and rank == 2))
            source = "start()" if name in ("own", "cpu", "machines") else "torchrun"
            world, device = session._join(World(rank, 3, rank, 3, 0, 1, source), settings, f"file://{folder}/{name}")
            assert sum(process_group.Rendezvous(world, None).gather("again", 1)) == 3, "through the group"
            found[name] = [str(device), *made, world.local_rank, world.nodes]
            process_group.leave()
    return found


def test_devices_and_backends_of_three_processes(tmp_path: Path) -> None:
    nccl, hosts, cards = "cpu:gloo,cuda:nccl", "paceline/hosts/0", "paceline/cards/0"
    answers = run_ranks(3, "tests.comm.test_process_group:join_with_gpus", str(tmp_path), deadline=100)
    for rank, found in enumerate(answers):
        assert found["own"] == ["cuda:0", nccl, "cuda:0", [hosts, cards], rank, 1], "whatever its local rank"
        assert found["shared"] == ["cuda:0", "cpu:gloo,cuda:gloo", "None", [cards], rank, 1], "alike on all ranks"
        assert found["unknown"] == [f"cuda:{rank}", nccl, f"cuda:{rank}", [cards], rank, 1]
        device = ("cuda:0", "cuda:1", "cpu")[rank]
        assert found["servers"] == [device, "gloo", "None", [], rank, 1], "two GPUs are for two workers"
        first = f"cuda:{(0, 1, 0)[rank]}"
        assert found["machines"] == [first, nccl, first, [hosts, cards], (0, 1, 0)[rank], 2], "the first of the second"
        assert found["cpu"] == ["cpu", "gloo", "None", [hosts], rank, 1], "no exchange of GPUs"
