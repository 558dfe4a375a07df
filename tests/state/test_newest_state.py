"""A rank dies, and the next start of the run gets the state of one that lives: nothing is lost but the step at hand."""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.ports import free_port
from torch import nn

from paceline.state import checkpoint, newest_state
from paceline.state.newest_state import NewestState
from paceline.strategies.kit.named_parameters import replicated_state
from paceline.world import ERROR_FILE, HANDOVER, KEEPS

DEADLINE_SECONDS = 150.0  # for what takes ten on an idle machine

# The job of these tests. On its first start, or its first starts, a rank kills itself at the place that is named.
SCRIPT = r"""
import contextlib, hashlib, os, signal, sys
import torch, paceline
from torch import nn

kills = dict(word.split("=") for word in sys.argv[2:])  # number of the start -> STEP:PLACE:RANK
strategy, start = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]

def die(place):
    if kills.get(start) == f"{run.steps}:{place}:{run.rank}":
        os.kill(os.getpid(), signal.SIGKILL)

class Meter:
    def __init__(self):
        self.seen = []
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = list(state["seen"])

run = paceline.start(device="cpu", seed=3, strategy=strategy, progress="off")
g = torch.Generator().manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1)).double()
x, y = (torch.randn(64, n, generator=g, dtype=torch.float64) for n in (8, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)  # moved by hand, after each epoch
averaged = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda mean, value, count: 0.9 * mean + 0.1 * value)
run.prepare(net, optimizer)
loader = run.loader(torch.utils.data.TensorDataset(x, y), global_batch=8, shuffle=True)
meter = Meter()
run.track(meter=meter, averaged=averaged, scheduler=scheduler)
run.restore("checkpoints", missing_ok=True)
run.print("starts at", run.steps)

@contextlib.contextmanager
def average_in_model():
    kept = [p.detach().clone() for p in net.parameters()]
    for p, mean in zip(net.parameters(), averaged.module.parameters()):
        p.data.copy_(mean.data)
    yield
    for p, own in zip(net.parameters(), kept):
        p.data.copy_(own)

for epoch in run.epochs(3):
    for batch in loader:
        die("begin")
        loss = nn.functional.mse_loss(net(batch[0]), batch[1])
        die("forward")
        run.backward(loss)
        if run.step(optimizer):
            die("step")
            meter.seen.append([run.steps, run.mean(loss.item())])
            averaged.update_parameters(net)
    scheduler.step()
    meter.seen.append(scheduler.get_last_lr()[0])
    run.sum(1.0)
    die("schedule")
    run.sum(1.0)
    with average_in_model(), torch.no_grad():
        die("average")
        meter.seen.append(run.sum(float(net.eval()(x).sum())))
    net.train()
    if epoch == 0:
        run.save("checkpoints")
tensors = [*net.parameters(), *net.buffers(), *averaged.parameters()]
bits = b"".join(t.detach().numpy().tobytes() for t in tensors) + repr(meter.seen).encode()
run.print("ends at", run.steps, hashlib.sha256(bits).hexdigest()[:16])
"""


class Job:
    """The script in a folder of its own."""

    def __init__(self, folder: Path, script: str = SCRIPT) -> None:
        self.folder = folder
        (folder / "tmp").mkdir(parents=True)
        (folder / "train.py").write_text(script)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *line: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "run", *line],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder / "tmp")},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(process)
        return process

    def run(self, *line: str) -> tuple[list[int], str, str]:
        """The steps at which it started, the last line, and what was said on stderr."""
        out, err = self.start(*line).communicate(timeout=DEADLINE_SECONDS)
        assert self.started[-1].returncode == 0, err
        return [int(step) for step in re.findall(r"starts at (\d+)", out)], out.splitlines()[-1], err

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path / "job")
    yield job
    job.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The last line of a run that nobody disturbed."""
    job = Job(tmp_path_factory.mktemp("whole") / "job")
    try:
        yield job.run("--nproc", "2", "train.py", "ddp")[1]
    finally:
        job.close()


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kills", "starts"),
    [
        (["0=5:forward:1"], [0, 5]),  # before the first checkpoint
        # rank 0 itself
        pytest.param(["0=5:begin:0"], [0, 5], marks=pytest.mark.full),
        (["0=13:forward:1", "1=21:forward:0"], [0, 13, 21]),
        (["0=16:schedule:1"], [0, 16]),  # the rest of an epoch, in which the learning rate had been changed already
        # other weights are in the model
        pytest.param(["0=16:average:1"], [0, 16], marks=pytest.mark.full),
        # the others have made their update, and not the rest of the loop's body
        pytest.param(["0=13:step:1"], [0, 12], marks=pytest.mark.full),
        pytest.param(["0=0:forward:1"], [0, 0], marks=pytest.mark.full),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_the_end_is_that_of_a_run_that_nobody_disturbed(
    job: Job, whole: str, kills: list[str], starts: list[int]
) -> None:
    found = job.run("--nproc", "2", "--max-restarts", "3", "train.py", "ddp", *kills)
    assert found[:2] == (starts, whole), found[2]
    assert list((job.folder / "tmp").glob("paceline*")) == []


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_checkpoint_that_is_being_written_in_the_background_does_not_get_in_the_way(job: Job, whole: str) -> None:
    """One begins after every step, so that rank 0 is in the middle of one when the other rank dies."""
    script = SCRIPT.replace('    if epoch == 0:\n        run.save("checkpoints")\n', "")
    saving = "            averaged.update_parameters(net)\n"
    script = script.replace(saving, f'{saving}            run.save("checkpoints", background=True)\n')
    (job.folder / "train.py").write_text(script)
    found = job.run("--nproc", "2", "--max-restarts", "3", "train.py", "ddp", "0=13:forward:1", "1=16:schedule:0")
    assert found[:2] == ([0, 13, 16], whole), found[2]
    assert all(damage == [] for damage in checkpoint.examine(job.folder / "checkpoints").values())


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_reproducible_run_goes_on_with_the_same_bits(job: Job) -> None:
    """Each process computes several shards, in a loop of several yields."""
    script = SCRIPT.replace("nn.BatchNorm1d(16), ", "").replace('progress="off"', 'progress="off", reproducible=4')
    (job.folder / "train.py").write_text(script)
    found = job.run("--nproc", "2", "--max-restarts", "1", "train.py", "ddp", "0=13:forward:1")
    assert found[0] == [0, 13], found[2]
    shutil.rmtree(job.folder / "checkpoints")
    assert job.run("--nproc", "2", "train.py", "ddp")[1] == found[1]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", [pytest.param("ddp:codec=bf16", marks=pytest.mark.full), "shared", "fsdp:stage=1"])
def test_where_no_rank_has_the_whole_state_the_checkpoint_is_taken(job: Job, strategy: str) -> None:
    """The codec's residuals, and slices of the optimizer's state, died with the rank."""
    starts, end, err = job.run("--nproc", "2", "--max-restarts", "1", "train.py", strategy, "0=13:forward:1")
    assert starts == [0, 8], err
    if "codec" in strategy:
        return  # a checkpoint holds the sum of all residuals: its end has other bits (docs/strategies/ddp.md)
    shutil.rmtree(job.folder / "checkpoints")
    assert job.run("--nproc", "2", "train.py", strategy)[1] == end


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_of_two_machines_the_one_that_lives_hands_on(job: Job, whole: str, victim: int) -> None:
    place = f"127.0.0.1:{free_port()}"
    line = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", place, "--max-restarts", "2", "train.py", "ddp"]
    two = [job.start(*line, f"0=13:forward:{victim}") for _ in range(2)]
    told = [process.communicate(timeout=DEADLINE_SECONDS) for process in two]
    assert [process.returncode for process in two] == [0, 0], told
    out = "".join(out for out, _ in told)
    assert re.findall(r"starts at (\d+)", out) == ["0", "13"], told
    assert whole in out


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_full_disk_costs_the_newest_state_and_nothing_else(job: Job, whole: str) -> None:
    """The launcher's folder for temporary files takes no more: what is written there fails."""
    script = job.folder / "train.py"
    limit = "if start == '0': __import__('resource').setrlimit(1, (4_000, 4_000))  # RLIMIT_FSIZE\n"
    script.write_text(SCRIPT.replace('run.print("starts', limit + 'run.print("starts'))
    starts, end, err = job.run("--nproc", "2", "--max-restarts", "1", "train.py", "ddp", "0=5:forward:1")
    assert (starts, end) == ([0, 0], whole), err
    assert "paceline: the state after step 5 is not saved for the restart: A checkpoint could not be saved" in err
    assert "rank 1 was killed by SIGKILL" in err


@pytest.mark.full
def test_signals_still_end_a_run_that_waits_for_a_state(job: Job) -> None:
    """Rank 1 dies, and lets the launcher notice. Rank 0 would hand its state on at its next collective, and sleeps."""
    (job.folder / "train.py").write_text(
        SCRIPT.replace('die("begin")', 'die("begin"); wait()').replace(
            "class Meter",
            "def wait():\n    import time\n    if run.steps == 2 and run.rank == 0:\n"
            "        open('held', 'w').close(); time.sleep(600)\n\nclass Meter",
        )
    )
    process = job.start("--nproc", "2", "--max-restarts", "1", "train.py", "ddp", "0=2:begin:1")
    began = time.monotonic()
    while not (job.folder / "held").exists():
        assert process.poll() is None
        assert time.monotonic() - began < DEADLINE_SECONDS
        time.sleep(0.05)
    time.sleep(2.0)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_launcher_waits_for_a_state_that_takes_its_time(job: Job, whole: str) -> None:
    """Longer than for a rank that has yet to notice: here 30 s and a disk that needs 35."""
    slow = (
        "import paceline.state.checkpoint as checkpoint, time\n"
        "write = checkpoint.write\n"
        "def slow(folder, **options):\n"
        "    time.sleep(35 if 'newest' in str(folder) else 0)\n"
        "    return write(folder, **options)\n"
        "checkpoint.write = slow\n"
    )
    (job.folder / "train.py").write_text(slow + SCRIPT)
    found = job.run("--nproc", "2", "--max-restarts", "1", "train.py", "ddp", "0=5:forward:1")
    assert found[:2] == ([0, 5], whole), found[2]


# ---------------------------------------------------------------- one rank, with no other


class Rank:
    """A rank that trains, of a run that is started again after failures."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(ERROR_FILE, str(folder / "error"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.setattr(newest_state, "world_group", lambda: SimpleNamespace(size=2, rank=0))
        self.keeps = Path(f"{folder}/error{KEEPS}")
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.made, self.tracked = 0, dict[str, Any]()
        self.mean = torch.zeros(2**17)  # of a tracked object, too large to be copied by itself
        strategy: Any = SimpleNamespace(local_state=lambda: replicated_state([self.net], [self.optimizer]))
        state: Any = SimpleNamespace(
            tracked=self.tracked,
            parts_beside_models=lambda run, streams: {
                "run": {**run, "streams": streams},
                "tracked": {name: thing.state_dict() for name, thing in self.tracked.items()},
            },
        )
        position: Any = SimpleNamespace(counters=lambda: {"updates": [self.made]}, counts=lambda: [self.made, 0, 0])
        self.folder = folder / "newest"
        self.newest = NewestState(
            str(self.folder),
            strategy,
            state,
            position,
            [self.net],
            [self.optimizer],
            ready=lambda: True,
            steps=lambda: self.made,
        )

    def step(self) -> None:
        self.net(torch.randn(4, 2)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.made += 1
        self.newest.after_batch(SimpleNamespace(stepped=True))  # type: ignore[arg-type]  # what it reads of a loader

    def handed_on(self) -> dict[str, Any] | None:
        paths = sorted(self.folder.glob("run-*/step-*"))
        return checkpoint.read(paths[-1])[1] if paths else None


GONE = RuntimeError("Connection closed by peer [127.0.0.1]:5")


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    rank = Rank(tmp_path, monkeypatch)
    rank.newest.begin()
    for _ in range(3):
        rank.step()
    return rank


def test_what_the_next_forward_changes_is_handed_on_as_it_was(rank: Rank) -> None:
    kept = {name: value.clone() for name, value in rank.net.state_dict().items()}
    assert rank.keeps.exists()
    rank.net(torch.randn(4, 2))  # moves the statistics of batch norm
    rank.optimizer.param_groups[0]["lr"] = 0.5
    rank.newest.save_newest(GONE)
    parts = rank.handed_on()
    assert parts is not None
    assert parts["run"]["updates"] == [3]
    assert all(torch.equal(value, kept[name]) for name, value in parts["model_0"].items())
    assert parts["optimizer_0"]["groups"][0]["lr"] == 0.1
    assert not rank.keeps.exists()


def meddle(rank: Rank, how: str) -> None:
    """What may come between a note and the moment at which a rank learns of a death."""
    weight, bias = rank.net[0].weight, rank.net[1].bias
    assert isinstance(weight, nn.Parameter)
    assert isinstance(bias, nn.Parameter)
    if how == "in place":
        with torch.no_grad():
            bias.mul_(2)
    elif how == "data":
        weight.data.mul_(2)
    elif how == "other data":
        weight.data = weight.data.clone() + 1
    elif how == "update":
        rank.net(torch.randn(4, 2)).square().sum().backward()
        rank.optimizer.step()
        rank.made += 1
    elif how == "average":
        rank.mean += 1


WAYS = ["in place", "data", "other data", "update", "average"]


@pytest.mark.parametrize("how", WAYS)
def test_of_a_small_model_the_state_of_the_note_is_handed_on_whatever_came_after_it(rank: Rank, how: str) -> None:
    rank.tracked["mean"] = SimpleNamespace(state_dict=lambda: {"mean": rank.mean})
    rank.step()
    weights = {name: value.clone() for name, value in rank.net.state_dict().items()}
    moments = [state["momentum_buffer"].clone() for state in rank.optimizer.state.values()]
    meddle(rank, how)
    rank.newest.save_newest(GONE)
    parts = rank.handed_on()
    assert parts is not None
    assert parts["run"]["updates"] == [4]
    assert all(torch.equal(value, weights[name]) for name, value in parts["model_0"].items())
    found = [state["momentum_buffer"] for state in parts["optimizer_0"]["state"].values()]
    assert all(map(torch.equal, found, moments))
    assert not parts["tracked"]["mean"]["mean"].any()


@pytest.mark.parametrize("how", [*WAYS, "own error", "gathers", "no step"])
def test_what_is_not_that_of_the_note_is_not_handed_on(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.state.newest_state._MAX_COPIED_BYTES", 0)  # as for a large model
    rank = Rank(tmp_path, monkeypatch)
    rank.newest.begin()
    rank.tracked["mean"] = SimpleNamespace(state_dict=lambda: {"mean": rank.mean})
    for _ in range(0 if how == "no step" else 3):
        rank.step()
    meddle(rank, how)
    if how == "gathers":
        rank.tracked["sum"] = SimpleNamespace(state_dict=dict, before_save=lambda: None)
    rank.newest.save_newest(ValueError("the user's own") if how == "own error" else GONE)
    assert rank.handed_on() is None
    assert not rank.keeps.exists()


def test_a_large_model_is_handed_on_where_nothing_came_after_the_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.state.newest_state._MAX_COPIED_BYTES", 0)
    rank = Rank(tmp_path, monkeypatch)
    rank.newest.begin()
    rank.step()
    rank.newest.save_newest(GONE)
    parts = rank.handed_on()
    assert parts is not None
    assert all(torch.equal(value, rank.net.state_dict()[name]) for name, value in parts["model_0"].items())


def test_of_two_models_with_an_optimizer_each_both_are_handed_on(rank: Rank) -> None:
    """One of them has made its update, as in a GAN, when the rank learns of the death."""
    other = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(other.parameters())
    nets, optimizers = [rank.net, other], [rank.optimizer, optimizer]
    rank.newest._models, rank.newest._optimizers = nets, optimizers
    rank.newest._strategy.local_state = lambda: replicated_state(nets, optimizers)  # type: ignore[method-assign]
    rank.newest.prepared()
    other(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    rank.step()
    kept = copy.deepcopy(replicated_state(nets, optimizers))
    for _ in range(2):
        optimizer.step()
    rank.newest.save_newest(GONE)
    parts = rank.handed_on()
    assert parts is not None
    for number in range(2):
        assert all(torch.equal(v, kept["models"][number][name]) for name, v in parts[f"model_{number}"].items())
        found, wanted = parts[f"optimizer_{number}"]["state"], kept["optimizers"][number]["state"]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name][what], value) for name in wanted for what, value in wanted[name].items())


@pytest.mark.parametrize("how", ["raises", "slow"])
def test_a_tracked_object_that_cannot_be_noted_does_not_stop_the_training(
    rank: Rank, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.state.newest_state._FREE_SECONDS", 0.0)

    def state_dict() -> dict[str, Any]:
        if how == "raises":
            raise AssertionError("rank 0 alone")
        time.sleep(0.6)
        return {}

    rank.tracked["meter"] = SimpleNamespace(state_dict=state_dict)
    for _ in range(3):
        rank.step()
    said = capfd.readouterr().err
    assert said.count("will resume from the last checkpoint, not from the newest state of rank 0: ") == 1
    assert ("AssertionError: rank 0 alone" if how == "raises" else "ms after each step") in said
    assert not rank.keeps.exists()
    rank.newest.save_newest(GONE)
    assert rank.handed_on() is None


def test_of_the_ranks_of_a_machine_one_writes_each_step(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, ahead = Rank(tmp_path, monkeypatch), Rank(tmp_path, monkeypatch)
    for one, steps in ((second, 3), (ahead, 4)):
        one.newest.begin()
        for _ in range(steps):
            one.step()
    for one in (rank, second, ahead):
        one.newest.save_newest(GONE)
    assert sorted(path.name for path in rank.folder.glob("run-*/step-*")) == ["step-00000003", "step-00000004"]


def test_the_newest_whole_one_is_found_at_the_next_start_and_once(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.newest.save_newest(GONE)
    monkeypatch.setenv(HANDOVER, str(rank.folder))
    following = Rank(tmp_path, monkeypatch)
    assert following.newest.find() is None  # the first start of a run finds nothing
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    found = following.newest.find()
    assert found is not None
    assert found.step == 3
    (file,) = rank.folder.glob("run-*/step-*/model_0.safetensors")
    bits = bytearray(file.read_bytes())
    bits[-1] ^= 1
    file.write_bytes(bits)
    assert following.newest.find() is None  # not whole
    bits[-1] ^= 1
    file.write_bytes(bits)
    following.newest.begin()
    assert following.newest.find() is None  # a later restore, as of the best weights, is the script's own
