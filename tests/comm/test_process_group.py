"""What processes tell each other before they have a process group, and how the group ends.

A group ends with its threads: one that lives on may abort the process at its exit.
"""

from __future__ import annotations

import os
import socket
import subprocess
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


def meet_at_an_address(port: str) -> tuple[int, int]:
    """In processes of `paceline run`, as users write it who have the numbers from elsewhere."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    init_method = f"tcp://127.0.0.1:{port or os.environ['MASTER_PORT']}"
    run = paceline.start(init_method=init_method, rank=rank, world_size=size, device="cpu", progress="off")
    return run.world.local_rank, run.sum(1)


@pytest.mark.conformance
@pytest.mark.parametrize("own", [True, False])
def test_an_address_of_ones_own_under_a_launcher(own: bool) -> None:
    """By itself torch waits there for ever, since no rank opens a store; also under torchrun."""
    port = ""
    if own:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
    assert paceline.launch(meet_at_an_address, port, nproc=2, timeout=60, device="cpu") == [(0, 2), (1, 2)]


def test_torch_takes_the_launchers_store_only_for_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHELASTIC_USE_AGENT_STORE"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4000")
    monkeypatch.delenv(name, raising=False)
    with process_group._own_store("tcp://10.0.0.1:1"):
        assert name not in os.environ
    monkeypatch.setenv(name, "True")
    for method, said in (("tcp://10.0.0.1:1", "False"), ("tcp://10.0.0.1:4000", "True"), ("env://", "True")):
        with process_group._own_store(method):
            assert os.environ[name] == said
        assert os.environ[name] == "True"


def leave_after_training(by: str) -> tuple[list[str], list[str]]:
    run = paceline.start(device="cpu", progress="off")
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for batch in run.loader(torch.randn(12, 3), global_batch=4):
        run.backward(model(batch).sum())
        run.step(optimizer)
    before = threads()
    run.close()
    if by == "script":
        torch.distributed.destroy_process_group()
    else:
        process_group.leave()
    return before, threads()


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("by", ["script", "paceline"])
def test_no_thread_of_the_group_outlives_it(by: str) -> None:
    function = "tests.comm.test_process_group:leave_after_training"
    for before, after in run_ranks(2, function, by, deadline=60):
        assert before
        assert not after


RAISES = """
import os, time
import torch, torch.distributed as dist
import paceline, paceline.world
paceline.world.FAILED_SECONDS = 1.0
run = paceline.start(init_method=os.environ["MEETING"], rank=int(os.environ["TASK"]), world_size=2, device="cpu",
                     progress="off")
run.wait()
if run.rank == 0:
    print("here", flush=True)
    time.sleep(300)
work = dist.all_reduce(torch.ones(3), async_op=True)
raise ValueError("the cause")
"""


@pytest.mark.conformance
@pytest.mark.timeout(150)
def test_an_error_does_not_wait_for_the_others_where_no_launcher_ends_them(tmp_path: Path) -> None:
    """As under srun: rank 0 never comes to the collective that rank 1 has under way when it raises."""
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    plain = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=plain | {"TASK": str(rank), "MEETING": f"file://{tmp_path}/meeting"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = ranks[1].communicate(timeout=100)[1]
        assert ranks[0].poll() is None, "rank 0 still waits, and is not why rank 1 has ended"
        assert ranks[1].returncode == 1
        assert "ValueError: the cause" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


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
