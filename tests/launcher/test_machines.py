"""Several machines: here several launchers on this one, which meet at 127.0.0.1 and know no more of each other."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.launcher.launches import DEADLINE_SECONDS, Machines, wait_for
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousError, RendezvousTimeoutError

from paceline.data.randomness import permutation
from paceline.errors import LaunchError
from paceline.launcher import agent as agent_module
from paceline.launcher import rendezvous, supervise
from paceline.launcher.checks import is_local, listen
from paceline.launcher.nodes import Nodes, read_nodes
from paceline.launcher.plan import Plan
from paceline.launcher.secret import write_secret
from paceline.launcher.tunnel import open_rendezvous_host
from paceline.world import CLOSED, SAVED, SAVES, send_to_launcher, withdraw

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
mode = sys.argv[1]
dist.init_process_group("gloo")
rank, count = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
total = torch.ones(1)
dist.all_reduce(total)
print("start", count, int(total), os.environ["GROUP_RANK"], flush=True)
Path(f"ready{rank}-{count}").write_text(str(os.getpid()))
if mode == "fail" and rank == 1:
    if count == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("bad data")
long = {"long": count == "0", "long until told": not Path("told").exists()}.get(mode, False)
for _ in range(600 if long else 3):
    dist.all_reduce(total)
    time.sleep(0.1)
print("end", rank)
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    machines = Machines(tmp_path, SCRIPT)
    yield machines
    machines.close()


def test_a_launcher_that_is_killed_while_it_waits_for_others_leaves_no_folder(machines: Machines) -> None:
    """It has no rank yet, and so nobody who watches over ranks."""
    machines.start("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{machines.port}", "script.py", "once")
    machines.wait_until_listening()
    assert list(machines.temporary.iterdir())
    machines.launchers[0].kill()
    wait_for(lambda: not list(machines.temporary.iterdir()), "its folder is removed")


@pytest.mark.conformance
def test_a_killed_worker_restarts_all_of_both_and_the_cause_is_told_on_both(machines: Machines) -> None:
    """Their gloo meets anew, which needs a fresh store: torch's own agents hand on the old one. Then a second failure,
    for which there is no restart left."""
    machines.start_two("fail", "--max-restarts", "1")
    first, second = machines.end_all()
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert first[1] == "start 0 2 0\nstart 1 2 0\n"
    assert second[1] == "start 0 2 1\nstart 1 2 1\n"
    killed, failed = "rank 1 was killed by SIGKILL (perhaps out of memory)", "rank 1 failed: ValueError: bad data"
    node = f"node 1 ({socket.gethostname()}): "
    assert first[2] == f"{node}{killed}\npaceline: restart 1 of 1.\n{node}{failed}\n"
    assert second[2].startswith(f"{killed}\npaceline: restart 1 of 1.\n{failed}\nTraceback (most recent call last):\n")
    assert second[2].count("Traceback") == 1


@pytest.mark.full
def test_a_killed_launcher_ends_the_other(machines: Machines) -> None:
    machines.start_two("long")
    machines.wait_for_file("ready0-0", "ready1-0")
    worker = int((machines.directory / "ready0-0").read_text())
    machines.launchers[0].kill()  # it keeps the store as well
    code, _, err = machines.end_all()[1]
    assert code == 1
    assert "Lost the connection" in err or "Connection closed by peer" in err or "Connection reset" in err
    assert "frame #" not in err
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == "zombie"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_launcher_that_kept_the_rendezvous_and_is_started_again_meets_the_others(machines: Machines) -> None:
    """As Kubernetes starts a pod again. Its ranks die with it; those of the other are ended, and all start again."""
    machines.start_two("long", "--max-restarts", "2")
    machines.wait_for_file("ready0-0", "ready1-0")
    first = machines.launchers.pop(0)
    first.kill()
    first.communicate()
    machines.wait_for_word(machines.launchers[0], "runs again")
    machines.start_numbered(0, "long", "--max-restarts", "2")
    (_, told, _), (_, _, _) = found = machines.end_all()
    assert [code for code, _, _ in found] == [0, 0], found
    assert told.splitlines()[-2:] == ["start 1 2 1", "end 1"], found


@pytest.mark.full
@pytest.mark.timeout(300)
def test_an_elastic_run_goes_on_where_the_launcher_that_kept_the_rendezvous_has_gone(machines: Machines) -> None:
    """Both are at the endpoint's machine, so that the other can keep it."""
    machines.start_elastic("long until told", "--max-restarts", "1")
    machines.wait_until_listening()
    machines.start_elastic("long until told", "--max-restarts", "1")
    # On a busy machine the first one begins alone, and all start again when the second has come.
    wait_for(lambda: bool(list(machines.directory.glob("ready1-*"))), "a second rank")
    (machines.directory / "told").touch()
    machines.launchers.pop(0).kill()
    ((code, out, err),) = machines.end_all()
    assert code == 0, (out, err)
    last = out.splitlines()[-2:]
    assert re.fullmatch(r"start \d+ 1 0", last[0]), out
    assert last[1] == "end 0", out
    assert "paceline: restart 1 of 1, as soon as the launcher at 127.0.0.1:" in err, err


@pytest.mark.full
def test_a_machine_joins_a_run(machines: Machines) -> None:
    """c10d, one machine or two: all ranks start again when the second comes, and both end well."""
    machines.start_elastic("long")
    machines.wait_for_file("ready0-0")
    machines.start_elastic("long")
    both = machines.end_all()
    assert [code for code, _, _ in both] == [0, 0], both
    assert both[0][1].startswith("start 0 1 0\n")
    last = sorted(line for _, out, _ in both for line in out.splitlines()[-2:])
    starts = last[2].split()[1]  # 1; on a busy machine torch now and then meets twice
    assert int(starts) >= 1
    assert last == ["end 0", "end 1", f"start {starts} 2 0", f"start {starts} 2 1"]
    assert both[0][2].startswith("paceline: machines have joined; all ranks restart.\n")


TRAINING = """
import json, os, sys, time
import torch, paceline
from pathlib import Path

run = paceline.start(device="cpu", seed=4, progress="off", strategy=sys.argv[1])
x = torch.arange(24.0, dtype=torch.float64).reshape(12, 2) / 24
model = torch.nn.Linear(2, 1).double()
torch.nn.init.ones_(model.weight)
torch.nn.init.zeros_(model.bias)
model, optimizer = run.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
loader = run.loader(torch.utils.data.TensorDataset(x, torch.arange(12)), global_batch=4, shuffle=True)
run.restore("saved", missing_ok=True)
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
for epoch in run.epochs(200):
    for batch, index in loader:
        run.backward((model(batch) - 1).square().mean())
        run.step(optimizer)
        with open(f"{start}-{run.rank}.seen", "a") as file:
            print(json.dumps([run.steps, run.world_size, index.tolist()]), file=file)
        if run.steps == 30:
            Path("under-way").touch()
            while run.world_size == 1 and not Path("come").exists(): time.sleep(0.01)
        time.sleep(0.2 if run.world_size == 1 and run.steps > 30 else 0)  # until the second machine has come
run.export("model.safetensors")
"""


@pytest.mark.full
def test_no_step_is_made_again_when_a_machine_joins_a_run(machines: Machines) -> None:
    """The script saves nothing by itself: the ranks are asked to, before they start again with the second machine's."""
    (machines.directory / "script.py").write_text(TRAINING)
    machines.start_elastic("ddp")
    machines.wait_for_file("under-way")
    machines.start_elastic("ddp")
    (machines.directory / "come").touch()
    both = machines.end_all()
    assert [code for code, _, _ in both] == [0, 0], both
    assert "paceline: machines have joined: a checkpoint is saved after one of the next steps.\n" in both[0][2]
    made: dict[int, list[int]] = {}
    sizes = set()
    starts: dict[int, set[str]] = {}
    for file in machines.directory.glob("*.seen"):
        for step, size, index in map(json.loads, file.read_text().splitlines()):
            made.setdefault(step, []).extend(index)
            starts.setdefault(step, set()).add(file.stem.partition("-")[0])
            sizes.add(size)
    assert sizes == {1, 2}
    assert all(len(found) == 1 for found in starts.values()), "a step was made by two starts"
    assert sorted(made) == list(range(1, 601))
    order = [permutation(12, 4, "train", epoch) for epoch in range(200)]
    assert [sorted(made[step]) for step in range(1, 601)] == [
        sorted(order[step // 3][step % 3 * 4 : step % 3 * 4 + 4].tolist()) for step in range(600)
    ]
    model = nn.Linear(2, 1).double()
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.arange(24.0, dtype=torch.float64).reshape(12, 2) / 24
    for step in range(600):
        optimizer.zero_grad()
        (model(x[made[step + 1]]) - 1).square().mean().backward()
        optimizer.step()
    found = load_file(machines.directory / "model.safetensors")
    for name, expected in model.state_dict().items():
        assert torch.allclose(found[name], expected, rtol=0, atol=1e-10)


FEWER = """
import os, signal, sys, time
names = ("GROUP_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")
machine, local, rank, size = (int(os.environ[name]) for name in names)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(machine), os._exit(1)))  # the second machine's takes its time
    if machine == local == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
open(f"place-{machine}-{local}", "w").write(f"{rank}/{size}")
"""


@pytest.mark.conformance
def test_machines_with_fewer_processes_agree_on_their_number(machines: Machines) -> None:
    """--nproc MIN:MAX, on machines that are numbered: torch leaves the numbers of the former round in the store."""
    (machines.directory / "script.py").write_text(FEWER)
    machines.start_two("", "--nproc", "1:2", "--max-restarts", "1")
    both = machines.end_all()
    assert [code for code, _, _ in both] == [0, 0], both
    places = {path.name: path.read_text() for path in machines.directory.glob("place-*")}
    assert places == {"place-0-0": "0/3", "place-0-1": "1/3", "place-1-0": "2/3"}
    assert "paceline: 1 process on this machine now (--nproc 1:2).\n" in both[1][2]


WHILE_A_MACHINE_COMES = """
import os, sys, time
import torch, paceline
from pathlib import Path

print("begins", flush=True)
run = paceline.start(device="cpu", seed=4, progress="off", strategy="ddp")
model = torch.nn.Linear(2, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = run.loader(torch.utils.data.TensorDataset(torch.ones(4, 2)), global_batch=4)
run.restore("saved", missing_ok=True)
for epoch in run.epochs(5 if sys.argv[1] == "done" else 2000):
    for (batch,) in loader:
        run.backward(model(batch).square().mean())
        run.step(optimizer)
        time.sleep(0.02)
        if run.steps == 5:
            Path("under-way").touch()
            if sys.argv[1] == "fails":
                Path("saved").write_text("no folder")
            if sys.argv[1] == "asked":
                time.sleep(8)  # the launcher is asked meanwhile, while it waits for the ranks to save
if sys.argv[1] == "done":
    time.sleep(8)
print("ends", flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        pytest.param("done", 0, "", marks=pytest.mark.full),  # the training was over but for its last words
        pytest.param("fails", 1, "rank 0 failed: ", marks=pytest.mark.full),  # it cannot save
        pytest.param("asked", 75, "paceline: stopped by SIGUSR1, after saving", marks=pytest.mark.full),
    ],
)
def test_what_else_happens_while_ranks_are_to_save_for_a_machine_that_comes(
    machines: Machines, case: str, code: int, said: str
) -> None:
    (machines.directory / "script.py").write_text(WHILE_A_MACHINE_COMES)
    machines.start_elastic(case)
    machines.wait_for_file("under-way")
    machines.start_elastic(case)
    if case == "asked":
        machines.wait_for_word(machines.launchers[0], "machines have joined")
        machines.launchers[0].send_signal(signal.SIGUSR1)
    out, err = machines.launchers[0].communicate(timeout=DEADLINE_SECONDS)
    assert machines.launchers[0].returncode == code, err
    assert out.count("begins") == 1, err
    assert said in err, err
    if case == "done":
        _, err = machines.launchers[1].communicate(timeout=DEADLINE_SECONDS)
        told = f"The run at 127.0.0.1:{machines.port} has ended, and accepts no more machines.\n"
        gone = r"The rendezvous failed \(RendezvousConnectionError: .*\)\. Has the run there ended\? If not, do 1 mach"
        assert told in err or re.search(gone, err), err  # the latter where the keeper had gone before it asked again
        assert machines.launchers[1].returncode == 1


@pytest.mark.parametrize(
    ("first", "saves", "signal_comes", "restarts"),
    [
        pytest.param((), False, False, True, id="cannot save"),
        pytest.param((SAVES,), True, False, True, id="saves"),
        pytest.param((SAVES,), True, True, False, id="saves, and is asked to stop"),
        pytest.param((CLOSED,), False, False, False, id="done"),
    ],
)
def test_ranks_whose_run_has_ended_are_left_to_end_when_machines_come(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[str, ...],
    saves: bool,
    signal_comes: bool,
    restarts: bool,
) -> None:
    """Here a rank that tells its launcher what it is about, and ends three polls later."""
    environ = {"PACELINE_ERROR_FILE": str(tmp_path / "error")}
    for what in first:
        send_to_launcher(environ, what)
    agent: Any = object.__new__(agent_module.Agent)
    polls: list[int] = []
    told: list[bool] = []  # at each poll of the stop request: are the ranks to save?

    def poll_workers() -> None:
        polls.append(len(polls))
        if polls == [0] and saves:
            send_to_launcher(environ, SAVED, "somewhere")
        if polls == [0, 1] and first:  # the run closes
            send_to_launcher(environ, CLOSED)
            withdraw(environ, SAVES)
        if polls == [0, 1, 2]:
            agent._endings = {0: SimpleNamespace(failed=False, is_cause=False)}
            agent._interrupts.asked = signal.SIGUSR1 if signal_comes else None  # at the last moment

    def poll(asked: bool, machines_come: bool = False) -> None:
        told.append(machines_come)
        agent._peers.count = lambda what: int(asked)

    agent._interrupts = SimpleNamespace(check=lambda: None, asked=None)
    agent._peers = SimpleNamespace(poll=lambda: None, count=lambda what: 0)
    agent._endings, agent._ranks = {}, range(1)
    agent._processes, agent._plan = SimpleNamespace(pids=[0]), SimpleNamespace(monitor_seconds=0.0)
    agent._output, agent._stop_request = SimpleNamespace(show=lambda: None), SimpleNamespace(poll=poll)
    monkeypatch.setattr(agent, "_poll_workers", poll_workers)
    monkeypatch.setattr(agent, "_error_file", lambda rank: environ["PACELINE_ERROR_FILE"])
    monkeypatch.setattr(agent_module, "_HEAR_SECONDS", 0.0)
    assert agent._is_left_for_others() is restarts
    assert polls == ([0, 1, 2] if first else [])
    assert (True in told) is saves  # it is not asked to save when it no longer can


def test_which_machine_keeps_the_rendezvous() -> None:
    """By address: torch goes by names, and does not know itself by the address of a second network."""
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert is_local(socket.gethostname())
    assert not is_local("me@localhost")  # as another user: by ssh
    assert not is_local("192.0.2.1")  # RFC 5737: nobody's
    assert not is_local("no-such-machine.invalid")


@pytest.mark.conformance
def test_a_port_of_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens, and never answers: torch would wait for ever."""
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        nodes = read_nodes(nnodes="2", rdzv_endpoint=f"127.0.0.1:{port}")
        with pytest.raises(LaunchError, match=f"the program on port {port} is not a launcher of this version"):
            rendezvous.make_rendezvous(nodes)
        monkeypatch.setattr(rendezvous, "is_local", lambda host: False)
        monkeypatch.setattr(Nodes, "tunnelled", True)  # as between machines
        with pytest.raises(LaunchError, match=f"the program on port {port} is not a launcher of this version"):
            rendezvous.make_rendezvous(nodes)


@pytest.mark.conformance
@pytest.mark.parametrize("theirs", ["a different secret", "none (--rdzv-insecure)", "torchrun's store"])
def test_launchers_that_do_not_share_a_secret_are_told_so(
    theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only torchrun's is "something that is no launcher"."""
    monkeypatch.setattr(rendezvous, "_PROBE_SECONDS", 1.0)
    monkeypatch.setattr(rendezvous, "is_local", lambda host: False)
    file = tmp_path / "secret"
    write_secret(str(file))
    if theirs == "torchrun's store":
        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        said = f"the program on port {store.port} is not a launcher of this version"
    else:
        store = open_rendezvous_host(listen("127.0.0.1", 0), b"" if theirs.startswith("none") else b"k" * 32)
        said = rf"does not accept the secret in {file} .*--rdzv-secret-file.*--rdzv-insecure"
    nodes = read_nodes(nnodes="2", rdzv_endpoint=f"127.0.0.1:{store.port}", rdzv_secret_file=str(file))
    with pytest.raises(LaunchError, match=said):
        rendezvous.make_rendezvous(nodes)
    if not theirs.startswith("torchrun"):
        store.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RendezvousTimeoutError(), "fewer than 2 machines had joined after 900 s"),
        (RendezvousConnectionError("The store does not answer: lost\nmore"), "The store does not answer: lost"),
        (RendezvousError(), "RendezvousError"),
    ],
)
def test_why_machines_did_not_meet_is_said_in_words(error: Exception, said: str, tmp_path: Path) -> None:
    nodes = read_nodes(nnodes="2", rdzv_endpoint="127.0.0.1:1", rdzv_insecure=True, rdzv_conf="join_timeout=900")
    assert supervise._in_words(error, Plan("train.py", (), 1, {}, nodes=nodes)).endswith(said)
