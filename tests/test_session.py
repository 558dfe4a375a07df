"""start() in worlds without our launcher: what mpirun leaves in the environment, and torch's own arguments."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.ports import free_port

import paceline
from paceline.comm import process_group
from paceline.errors import SettingError, WorldError
from paceline.world import World

SCRIPT = """
import os, sys
import paceline, psutil
rank = int(sys.argv[1])
if len(sys.argv) > 2:
    run = paceline.start(device="cpu", init_method=sys.argv[2], rank=rank, world_size=2)
else:
    run = paceline.start(device="cpu")
me = psutil.Process()
heard = {c.laddr.ip for c in me.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}
print(run.world.source, run.world.rank, run.world.size, run.sum(run.world.rank + 1), sorted(heard), flush=True)
"""


def both(tmp_path: Path, environs: list[dict[str, str]], *arguments: str) -> list[tuple[int, str, str]]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    bare = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI_", "SLURM_", "MASTER_", "GLOO_"))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), *arguments],
            env=bare | environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, environ in enumerate(environs)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(processes, outputs, strict=True)]


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("nosuchhost.invalid", "this machine cannot resolve the host name"),
        ("127.0.0.1", "nothing answers there (Connection refused)"),
    ],
)
def test_a_wait_for_other_processes_is_reported(
    host: str, said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setattr(process_group, "HINT_SECONDS", 0.01)
    world = World(1, 2, 0, 1, 1, 2, "slurm", host, port)
    with pytest.raises(RuntimeError):  # torch's, at its time limit
        process_group.Rendezvous(world, None, timeout_seconds=3.0).gather("word", 1)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("paceline: waiting for")]
    assert lines
    assert f"MASTER_ADDR={host}, MASTER_PORT={port}" in lines[0]
    assert said in lines[0]


@pytest.mark.conformance
def test_rank_0_reports_that_it_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_group, "HINT_SECONDS", 0.01)
    world = World(0, 3, 0, 1, 0, 3, "slurm", "127.0.0.1", free_port())
    with pytest.raises(RuntimeError):
        process_group.Rendezvous(world, None, timeout_seconds=3.0).gather("word", 1)
    assert "rank 0 of 3, listens at MASTER_ADDR=127.0.0.1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_FR_BUFFER_SIZE", "abc"),
        ("TORCH_FR_BUFFER_SIZE", "20000000000"),
        ("TORCH_FR_CPP_STACK", "abc"),
        ("TORCH_GLOO_LAZY_INIT", "2"),
        ("TORCH_DISTRIBUTED_DEBUG", "loud"),
        ("GLOO_DEVICE_TRANSPORT", "abc"),
        ("GLOO_SOCKET_IFNAME", "nosuch0"),
    ],
)
def test_a_variable_that_torch_cannot_read_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name}='{value}'.*unset it"):
        process_group.Rendezvous(World(0, 2, 0, 2, 0, 1, "slurm", "127.0.0.1", 1), None)


@pytest.mark.parametrize(("name", "value"), [("TORCH_FR_BUFFER_SIZE", "0"), ("TORCH_NCCL_BLOCKING_WAIT", "True")])
def test_what_torch_reads_is_let_through(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    process_group.Rendezvous(World(0, 2, 0, 2, 0, 1, "slurm", "127.0.0.1", 1), None)


def mpi(rank: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.conformance
def test_under_mpirun_on_one_machine_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    port = free_port()
    for rank, (code, out, err) in enumerate(both(tmp_path, [mpi(0, port), mpi(1, port)])):
        assert code == 0, err
        assert out.split()[:4] == ["openmpi", str(rank), "2", "3"]
        assert set(out[out.index("[") :].strip("[]\n").replace("'", "").split(", ")) <= {"127.0.0.1", "::1", ""}, out


@pytest.mark.conformance
def test_with_torchs_own_arguments(tmp_path: Path) -> None:
    for rank, (code, out, err) in enumerate(both(tmp_path, [{}, {}], f"tcp://127.0.0.1:{free_port()}")):
        assert code == 0, err
        assert out.split()[:4] == ["start()", str(rank), "2", "3"]


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, str(script), "0"],
            env=os.environ | mpi(0, port),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 1
    assert f"rank 0 cannot listen on port {port}, which openmpi gives this run" in done.stderr
    assert str(Path(paceline.__file__).parent) not in done.stderr, "frames from inside Paceline"
    assert "script.py" in done.stderr, "the line of the script"


FAILING = """
import sys, time
import torch, torch.distributed as dist
import paceline, paceline.world
paceline.world.FAILED_SECONDS = 1.0
rank = int(sys.argv[1])
run = paceline.start(device="cpu", init_method=sys.argv[2], rank=rank, world_size=2)
if rank == 0:
    print("ready", flush=True)
    time.sleep(300)
work = dist.all_reduce(torch.ones(3), async_op=True)  # the other never comes to it
print("raises", flush=True)
raise ValueError("of its own")
"""


@pytest.mark.conformance
def test_a_process_that_an_error_ends_does_not_wait_for_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    with contextlib.ExitStack() as stack:
        waiting, failing = (
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), str(rank), f"file://{tmp_path}/store"],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        )
        stack.callback(failing.kill)
        stack.callback(waiting.kill)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "ready\n"
        out, err = failing.communicate(timeout=30)
        assert waiting.poll() is None, "the other did not end the wait"
    assert (failing.returncode, out) == (1, "raises\n")
    assert "ValueError: of its own" in err


def test_machines_with_different_versions_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own = process_group.versions()
    assert set(own) == {"Paceline", "torch", "CUDA", "Python"}
    others = [("n0", own), ("n0", own), ("n1", own | {"torch": "2.6.0", "CUDA": "12.4"}), ("n2", own)]
    monkeypatch.setattr(process_group, "world_group", lambda: SimpleNamespace(gather=lambda obj: others))
    world = World(0, 4, 0, 2, 0, 3, "torchrun", "n0", 1)
    said = rf"torch {own['torch'].split('+')[0]}.*, CUDA .* on n0, n2; torch 2\.6\.0, CUDA 12\.4 on n1\. "
    with pytest.raises(WorldError, match=said) as caught:
        process_group.check_versions(world)
    assert "Python" not in str(caught.value).split("Install")[0], "only what differs"
    others[2] = ("n1", own)
    process_group.check_versions(world)
    monkeypatch.setattr(process_group, "world_group", lambda: pytest.fail("an exchange on one machine"))
    process_group.check_versions(World(0, 4, 0, 4, 0, 1, "torchrun", "n0", 1))
