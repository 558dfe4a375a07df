"""A run that is asked to stop saves a checkpoint, and goes on from it to the same bits (with Slurm: tests/system)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.launcher.launches import DEADLINE_SECONDS, Launches
from tests.ports import free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported from C++

from paceline.comm import process_group
from paceline.errors import LaunchError, WorldError
from paceline.launcher import interrupts as interrupt_module
from paceline.launcher import run
from paceline.launcher.interrupts import Interrupts, Stopped
from paceline.launcher.stop_request import StopRequest
from paceline.state import preemption
from paceline.state.preemption import Preemption
from paceline.world import CLOSED, DECIDE, END, LOOK, RESUMABLE, SAVED, SAVES, Preempted, read_message

# The job of these tests. A file `hold` keeps it in place: after a step, or in the middle of a save.
SCRIPT = r"""
import hashlib, sys, time
from pathlib import Path
import torch, paceline
from torch import nn

how, strategy = sys.argv[1], sys.argv[2]
def wait_for_signal():  # and for the launcher, which passes it on
    while not Path("sent").exists():
        time.sleep(0.02)
    time.sleep(1.0)
def hold(where):
    if where == how and run.steps == 5 and not Path("held").exists():
        if run.rank == 0:
            Path("held").touch()
        wait_for_signal()

class Slow:
    def state_dict(self):
        hold("save")
        return {}
    def load_state_dict(self, state):
        pass

run = paceline.start(device="cpu", seed=3, strategy=None if strategy == "default" else strategy, progress="off")
if how == "start":
    Path("held").touch()
    wait_for_signal()
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)).double()
x, y = (torch.randn(64, n, generator=g, dtype=torch.float64) for n in (8, 1))
model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=8, micro_batch=2, shuffle=True)
run.track(slow=Slow())
if how != "no restore":
    run.restore("checkpoints", missing_ok=True)
run.print("starts at", run.steps)
for epoch in run.epochs(3 if how != "no restore" else 10**6):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        run.backward(loss)
        if run.step(optimizer):
            hold("step")
            if how == "no restore":
                Path("held").touch()
            if run.steps % 5 == 0 and how not in ("step", "no restore"):
                run.save("checkpoints", keep=3)
bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
run.print("ends at", run.steps, hashlib.sha256(bits).hexdigest()[:16])
"""


class Job(Launches):
    """The script in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.script(SCRIPT, "train.py")

    def start_alone(self, *line: str) -> subprocess.Popen[str]:
        """By plain python."""
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, *line], cwd=self.folder, text=True, **pipes)
        self.launchers.append(process)
        return process

    def last_line(self, *line: str) -> str:
        """Of a whole run."""
        code, out, err = self.run(*line)
        assert code == 0, err
        return out.splitlines()[-1]

    def wait(self) -> None:
        """Until the script has said that it is where the test wants it."""
        self.wait_for_file("held")

    def signal(self, process: subprocess.Popen[str], signum: signal.Signals) -> None:
        """Once the script is there, and waits for it."""
        self.wait()
        process.send_signal(signum)
        (self.folder / "sent").touch()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The last line of a run of two processes that was never stopped."""
    job = Job(tmp_path_factory.mktemp("whole"))
    try:
        yield job.last_line("--nproc", "2", "train.py", "whole", "default")
    finally:
        job.close()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("how", "strategy", "grace"),
    [
        pytest.param("step", "default", False, marks=pytest.mark.full),
        ("save", "default", True),
        pytest.param("start", "default", False, marks=pytest.mark.full),
    ],
)
def test_the_run_goes_on_to_the_same_bits(job: Job, whole: str, how: str, strategy: str, grace: bool) -> None:
    line = ["--nproc", "2", *(["--grace", "60"] if grace else [])]
    process = job.start(*line, "train.py", how, strategy)
    job.signal(process, signal.SIGTERM if grace else signal.SIGUSR1)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    said = re.search(r"paceline: stopped by (\w+), after saving (\S+)/step-0*(\d+)\. The same command resumes", err)
    assert said is not None, err
    assert said[1] == ("SIGTERM" if grace else "SIGUSR1")
    assert Path(said[2]) == job.folder / "checkpoints"
    assert "ends at" not in out
    assert job.last_line(*line, "train.py", how, strategy) == whole


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("grace", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_signal_to_the_launcher_of_hosts_reaches_theirs(job: Job, whole: str, grace: bool) -> None:
    """--hosts, of which the only one is this machine: all but ssh itself."""
    line = ["--hosts", "localhost:2", *(["--grace", "60"] if grace else [])]
    process = job.start(*line, "train.py", "step", "default")
    job.signal(process, signal.SIGTERM if grace else signal.SIGUSR1)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    assert re.search(r"\[localhost\] paceline: stopped by SIGUSR1, after saving \S+/step-0*\d+\.", err), err
    assert "ends at" not in out
    assert job.last_line(*line, "train.py", "step", "default").removeprefix("[localhost] ") == whole


FIT_SCRIPT = r"""
import hashlib, sys, time
from pathlib import Path
import torch, paceline
from torch import nn

class Hold(paceline.Callback):
    def on_step(self, fit):
        if fit.run.steps == int(sys.argv[1]) and not Path("held").exists():
            if fit.run.main:
                Path("held").touch()
            while not Path("sent").exists():
                time.sleep(0.02)
            time.sleep(1.0)

run = paceline.start(device="cpu", seed=3, strategy="fsdp", progress="off")
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)).double()
data = torch.utils.data.TensorDataset(*(torch.randn(64, n, generator=g, dtype=torch.float64) for n in (8, 1)))
history = paceline.fit(
    net, lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]), data, global_batch=8, epochs=3,
    optimizer=torch.optim.AdamW(net.parameters(), lr=1e-2), evaluate_on=data, run=run,
    checkpoints="checkpoints", callbacks=[Hold(), paceline.EMA(0.8)],
)
bits = b"".join(p.full_tensor().detach().numpy().tobytes() for p in net.parameters())
run.print("ends at", run.steps, history.history, hashlib.sha256(bits).hexdigest()[:16])
"""


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(11, id="in mid-epoch"),
        pytest.param(15, id="before the last step of an epoch", marks=pytest.mark.campaign),
    ],
)
def test_a_fit_goes_on_to_the_same_losses_and_averages_of_sharded_weights(job: Job, step: int) -> None:
    (job.folder / "train.py").write_text(FIT_SCRIPT)
    line = ["--nproc", "2", "train.py"]
    process = job.start(*line, str(step))
    job.signal(process, signal.SIGUSR1)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    assert re.search(r"after saving \S+/step-0*(\d+)\.", err), err
    resumed = job.last_line(*line, str(step))
    shutil.rmtree(job.folder / "checkpoints")
    assert job.last_line(*line, "0") == resumed


@pytest.mark.full
@pytest.mark.timeout(400)
def test_replicas_that_train_apart_stop_where_they_meet(job: Job) -> None:
    line = ["--nproc", "2", "train.py", "step", "local_sgd:every=4"]
    process = job.start(*line)
    job.signal(process, signal.SIGUSR1)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    assert (job.folder / "checkpoints" / "step-00000008").exists(), err
    assert job.last_line(*line).startswith("ends at 24")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_signal_to_one_of_two_launchers_stops_both(job: Job, whole: str) -> None:
    place = f"127.0.0.1:{free_port()}"
    line = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", place, "train.py", "step", "default"]
    two = [job.start(*line), job.start(*line)]
    job.signal(two[1], signal.SIGUSR1)
    told = [process.communicate(timeout=DEADLINE_SECONDS) for process in two]
    assert [process.returncode for process in two] == [RESUMABLE, RESUMABLE], told
    assert sum("after saving" in err for _, err in told) == 1
    assert job.last_line("--nproc", "2", "train.py", "whole", "default") == whole


@pytest.mark.full
def test_a_script_without_checkpoints_is_told_and_goes_on_until_the_time_is_up(job: Job) -> None:
    process = job.start("--nproc", "2", "--grace", "2", "train.py", "no restore", "default")
    job.signal(process, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # Slurm sends two
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.count("Call run.restore(DIRECTORY, missing_ok=True) after run.prepare.") == 1
    assert "stopped by SIGTERM; all ranks have ended." in err


# ---------------------------------------------------------------- the agreement, with no process


class FakePeers:
    stops = 0  # of all

    def count(self, what: str, more: int = 0) -> int:
        FakePeers.stops += more if what == "stops" else 0  # "asked", whether a signal has come, is another matter
        return FakePeers.stops


def test_rank_0_decides_when_all_launchers_have_told_their_ranks(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("paceline.launcher.stop_request.POLL_SECONDS", 0.0)
    FakePeers.stops = 0
    requests = [StopRequest(str(tmp_path / f"{n}"), FakePeers(), n, 3) for n in range(3)]  # type: ignore[arg-type]

    def phases() -> list[int]:
        return [(tmp_path / f"{n}").read_bytes()[0] for n in range(3)]

    for request in requests:
        request.poll(asked=False)
    assert phases() == [0, 0, 0]
    requests[2].poll(asked=True)
    assert phases() == [0, 0, LOOK]
    requests[0].poll(asked=False)
    assert phases() == [LOOK, 0, LOOK]
    requests[0].poll(asked=False)
    requests[1].poll(asked=False)
    assert phases() == [LOOK, LOOK, LOOK]
    requests[0].poll(asked=False)
    assert phases() == [DECIDE, LOOK, LOOK]
    FakePeers.stops = 0
    alone = StopRequest(str(tmp_path / "0"), FakePeers(), 0, 1)  # type: ignore[arg-type]
    assert phases()[0] == 0
    alone.poll(asked=True)
    assert phases()[0] == DECIDE


class Here:
    """A rank that makes steps, with a store in which the decision may be."""

    def __init__(self, folder: Path, phase: int, device: str = "cpu", meeting: int = 1, restores: bool = True) -> None:
        (folder / "stop").write_bytes(bytes([phase]))
        self.made, self.saved, self.stepped, self.ready = 0, [], True, True
        self.places: list[Path] = []  # where it saved
        strategy: Any = SimpleNamespace(steps_to_synchronization=lambda: meeting, plan=SimpleNamespace(in_step=True))
        self.side = Preemption(
            str(folder / "stop"),
            strategy,
            torch.device(device),
            ready=lambda: self.ready,
            steps=lambda: self.made,
            save=self.save,
        )
        if restores:
            self.side.restores(folder)

    def save(self, directory: Path) -> Path:
        self.saved.append(self.made)
        self.places.append(directory)
        return directory / "step"

    def steps(self, count: int) -> int | None:
        """Make so many steps. The one after which the run was left, if it was."""
        for _ in range(count):
            self.made += 1
            try:
                self.side.after_batch(self)  # type: ignore[arg-type]  # what it reads of a loader
            except Preempted:
                return self.made
        return None


def test_the_step_is_one_that_all_have_yet_to_make(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_ERROR_FILE", str(tmp_path / "error"))
    assert Here(tmp_path, 0).steps(5) is None
    assert Here(tmp_path, LOOK).steps(5) is None
    here = Here(tmp_path, DECIDE)
    assert (here.steps(9), here.saved) == (2, [2])
    assert read_message(f"{tmp_path}/error", SAVED) == f"{tmp_path / 'step'}. The same command resumes from it"
    assert Here(tmp_path, DECIDE, meeting=4).steps(9) == 5
    assert Here(tmp_path, DECIDE, device="cuda").steps(9) == 4  # a host may be ahead of its device
    here = Here(tmp_path, DECIDE)
    here.ready = False  # in the middle of a global batch
    assert here.steps(4) is None
    here.ready = True
    assert here.steps(9) == 6


def test_a_rank_that_hears_too_late_says_so_and_does_not_hang(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(preemption, "world_group", lambda: SimpleNamespace(size=2, rank=1))
    store: dict[str, bytes] = {}
    fake = SimpleNamespace(check=lambda keys: keys[0] in store, get=store.__getitem__)
    here = Here(tmp_path, LOOK)
    here.side.__dict__["_store"] = fake
    assert here.steps(3) is None
    store[f"paceline/stop/0/{process_group.runs}"] = b"3"
    with pytest.raises(WorldError, match="asked to stop after step 3, but this process was already at step 3"):
        here.steps(1)
    here = Here(tmp_path, LOOK)
    here.side.__dict__["_store"] = fake
    assert here.steps(9) == 3


@contextlib.contextmanager
def late_to(port: int, seconds: float) -> Iterator[int]:
    """A port that leads to this one, and keeps what is sent to it for so long before it passes it on."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def forward(source: socket.socket, target: socket.socket, wait: float) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    time.sleep(wait)
                    target.sendall(data)

        def serve() -> None:
            near = server.accept()[0]
            far = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=forward, args=(far, near, 0.0), daemon=True).start()
            forward(near, far, seconds)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def test_the_step_is_in_the_store_before_rank_0_makes_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Between machines a forwarder may keep what rank 0 has sent, while a collective tells the others to go on."""
    monkeypatch.setattr(preemption, "world_group", lambda: SimpleNamespace(size=2, rank=0))
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with late_to(master.port, 0.3) as port:
        first, second = Here(tmp_path, DECIDE), Here(tmp_path, DECIDE)
        first.side.__dict__["_store"] = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        second.side.__dict__["_store"] = master
        assert first.steps(1) is None  # rank 0 decides on step 2
        monkeypatch.setattr(preemption, "world_group", lambda: SimpleNamespace(size=2, rank=1))
        assert (second.steps(9), second.saved) == (2, [2])


def test_a_named_checkpoint_is_no_place_to_go_on_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").touch()  # run.restore("checkpoints/step-00000010"): the next run starts from that too
    assert Here(tmp_path, DECIDE).steps(3) is None
    assert capfd.readouterr().err.count("no checkpoint is saved: the script neither saves") == 1


def test_signals(monkeypatch: Any) -> None:
    clock = SimpleNamespace(now=7.0)
    monkeypatch.setattr("paceline.launcher.interrupts.time", SimpleNamespace(monotonic=lambda: clock.now))
    with Interrupts(stoppable=True, grace=30.0) as interrupts:
        os.kill(os.getpid(), signal.SIGUSR1)
        interrupts.check()  # before the workers run: kept until they do
        assert interrupts.asked == signal.SIGUSR1
        interrupts.deferred = True
        os.kill(os.getpid(), signal.SIGTERM)
        clock.now += 29.0
        interrupts.check()
        clock.now += 2.0
        with pytest.raises(Stopped) as stopped:
            interrupts.check()
        assert stopped.value.signum == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGUSR1)  # the run is done, and must not be said to be killed
    done = subprocess.run(["sh", "-c", "kill -USR1 $$"], check=False)
    assert done.returncode == -signal.SIGUSR1  # a process that is started now is as any other
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with Interrupts(), pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_without_grace_is_a_notice_where_the_ranks_would_save(monkeypatch: Any) -> None:
    able = True
    with Interrupts(stoppable=True, grace=60.0, if_able=True) as interrupts:
        interrupts.deferred = True
        interrupts.consult(lambda: able)
        signal.raise_signal(signal.SIGTERM)
        able = False
        signal.raise_signal(signal.SIGTERM)  # schedulers send it more than once
        interrupts.check()
        assert interrupts.asked == signal.SIGTERM
    with Interrupts(stoppable=True, grace=60.0, if_able=True) as interrupts:
        interrupts.deferred = True
        interrupts.consult(lambda: False)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            interrupts.check()
    monkeypatch.setattr(interrupt_module, "_final", False)
    with Interrupts(stoppable=True, grace=60.0) as interrupts:
        interrupts.deferred = True
        interrupt_module.end(signal.SIGTERM)  # as at the end of a connection between hosts
        with pytest.raises(Stopped):
            interrupts.check()


@pytest.mark.parametrize("grace", [-1, float("nan"), float("inf")])
def test_a_grace_that_is_no_time_is_refused(grace: float) -> None:
    with pytest.raises(LaunchError, match="give the seconds for a checkpoint"):
        run("train.py", grace=grace)


def test_sigterm_to_a_rank_is_passed_on_once_it_can_save(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_ERROR_FILE", str(tmp_path / "error"))
    monkeypatch.setenv("PACELINE_NOTICE", "1")
    monkeypatch.setenv("PACELINE_LAUNCHER_PID", str(os.getpid()))
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("paceline.state.preemption.os.kill", lambda *which: sent.append(which))
    first = Here(tmp_path, 0, restores=False)
    assert read_message(f"{tmp_path}/error", SAVES) is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # there is nothing to save yet
    first.side.saves(tmp_path)
    assert read_message(f"{tmp_path}/error", SAVES) == ""
    signal.raise_signal(signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    child = os.fork()
    if child == 0:  # as a worker of a DataLoader, which `terminate` ends
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitpid(child, 0)[1] == 0
    first.side.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert read_message(f"{tmp_path}/error", SAVES) is None
    assert read_message(f"{tmp_path}/error", CLOSED) == ""
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        second = Here(tmp_path, 0)
        assert read_message(f"{tmp_path}/error", CLOSED) is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # the script's choice stays
        second.side.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, own)


def test_a_script_that_only_saves_is_saved_where_it_saved_last(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PACELINE_ERROR_FILE", str(tmp_path / "error"))
    here = Here(tmp_path, DECIDE, restores=False)
    here.side.saves(tmp_path / "some")
    here.side.saves(tmp_path / "others")
    assert (here.steps(9), here.saved, here.places) == (2, [2], [tmp_path / "others"])
    said = read_message(f"{tmp_path}/error", SAVED)
    assert said is not None
    assert f"The script does not call run.restore: to resume from it, call run.restore('{tmp_path / 'others'}')" in said


def test_ranks_that_are_being_ended_save_nothing(tmp_path: Path) -> None:
    here = Here(tmp_path, END)
    assert (here.steps(5), here.saved) == (None, [])


TERMINATED = r"""
import os, signal, sys, time
from pathlib import Path
import torch, paceline
from torch import nn

how = sys.argv[1]
if how == "own handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
run = paceline.start(device="cpu", progress="off")
net = nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
loader = run.loader(torch.utils.data.TensorDataset(torch.ones(4000, 4)), global_batch=4)
if how not in ("only saves", "nothing"):
    run.restore("checkpoints", missing_ok=True)
Path(f"pid-{run.rank}").write_text(str(os.getpid()))
for batch in loader:
    run.backward(model(batch[0]).mean())
    run.step(optimizer)
    if run.steps == 1 and how == "only saves":
        run.save("checkpoints")
    if how == "evaluates":
        paceline.state.preemption.NOTICE_SECONDS = 0.2
    if run.steps == 2 and run.main:
        Path("held").touch()
        time.sleep(300 if how == "evaluates" else 0)
    time.sleep(0.05)
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("how", "grace", "to", "code"),
    [
        ("restores", [], "all", RESUMABLE),
        ("restores", ["--grace", "60"], "ranks", RESUMABLE),
        pytest.param("only saves", [], "launcher", RESUMABLE, marks=pytest.mark.full),
        pytest.param("restores", [], "rank 1", RESUMABLE, marks=pytest.mark.full),
        pytest.param("restores", ["--grace", "0"], "all", 143, marks=pytest.mark.full),
        pytest.param("nothing", [], "all", 143, marks=pytest.mark.full),
        pytest.param("nothing", [], "launcher", 143, marks=pytest.mark.full),
        ("alone", ["python"], "launcher", RESUMABLE),
        pytest.param("evaluates", ["python"], "launcher", -signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("own handler", [], "launcher", RESUMABLE, marks=pytest.mark.full),
    ],
)
def test_sigterm_to_whomever_a_system_sends_it(job: Job, how: str, grace: list[str], to: str, code: int) -> None:
    """systemd and Slurm's process tracking send it to all processes, Kubernetes to the launcher."""
    (job.folder / "train.py").write_text(TERMINATED)
    if grace == ["python"]:
        process = job.start_alone("train.py", how)
    else:
        process = job.start("--nproc", "2", *grace, "train.py", how)
    job.wait()
    ranks = [int((job.folder / f"pid-{rank}").read_text()) for rank in range(1 if grace == ["python"] else 2)]
    targets = {"all": ranks, "ranks": ranks, "rank 1": ranks[1:], "launcher": []}[to]
    if grace != ["python"]:
        os.kill(process.pid, signal.SIGSTOP)  # the launcher hears of it last: the harder order
    for pid in targets:
        os.kill(pid, signal.SIGTERM)
    if to in ("all", "launcher"):
        os.kill(process.pid, signal.SIGTERM)
    os.kill(process.pid, signal.SIGCONT)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, err
    saved = list((job.folder / "checkpoints").glob("step-*"))
    if code == RESUMABLE:
        why = "asked to stop, and saved" if how == "alone" else "stopped by SIGTERM, after saving"
        assert re.search(rf"paceline: {why} \S+/step-0*\d+\.", err), err
        assert len(saved) == (2 if how == "only saves" else 1)
        assert ("The script does not call run.restore" in err) == (how == "only saves")
    else:
        assert code == -signal.SIGTERM or "paceline: stopped by SIGTERM; all ranks have ended.\n" in err
        assert not saved


LAST_WORDS = """
import atexit, sys, time
from pathlib import Path
import torch, paceline

def last_words():
    Path("held").touch()
    while not Path("sent").exists():
        time.sleep(0.02)
    time.sleep(1.0)

atexit.register(last_words)  # it is called after the run has closed
run = paceline.start(device="cpu", progress="off")
net = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
run.restore("checkpoints", missing_ok=True)
for batch in run.loader(torch.utils.data.TensorDataset(torch.ones(40000, 4)), global_batch=4):
    run.backward(model(batch[0]).mean())
    run.step(optimizer)
    Path("steps").touch()
    time.sleep(0.05)
"""


@pytest.mark.conformance
def test_sigterm_after_the_save_does_not_break_off_what_the_ranks_do_at_their_end(job: Job) -> None:
    """A scheduler sends SIGUSR1, and SIGTERM when the time is up: the run can go on, whichever the ranks end after."""
    (job.folder / "train.py").write_text(LAST_WORDS)
    process = job.start("train.py")
    begin = time.monotonic()
    while not (job.folder / "steps").exists():
        assert time.monotonic() - begin < DEADLINE_SECONDS
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    job.signal(process, signal.SIGTERM)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    assert "paceline: stopped by SIGUSR1, after saving" in err
