"""Saves in the background: the files are those of a save in the foreground, and nothing that fails or ends is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

import paceline
from paceline.errors import CheckpointError, SettingError
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite
from paceline.state.folder_lock import FILE
from paceline.state.helper_threads import HelperThreads
from paceline.world import RESUMABLE

DEADLINE_SECONDS = 120.0  # for what takes some seconds on an idle machine


class Net(nn.Module):
    """Tied weights, weights and buffers that are laid out in unusual ways, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.out.weight = self.into.weight
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        self.register_buffer("coarse", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.into(self.norm(self.conv(x)).mean((2, 3))))


class Tracked:
    """What a script tracks: it hands out its own objects, and changes them in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "seen": [1, 2],
            "array": np.arange(4.0),
            "mean": torch.ones(3),
            "wide": torch.ones(1).expand(5),
            "complex": torch.ones(2, dtype=torch.complex128).conj(),
            "deep": {"list": [{"value": 1.5}]},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def spoil(self) -> None:
        self.state["seen"].append(3)
        self.state["array"] += 1
        self.state["mean"].fill_(7)
        self.state["wide"][:1].fill_(7)
        self.state["complex"].fill_(7)
        self.state["deep"]["list"][0]["value"] = 9.9
        self.state["new"] = None


class Training:
    """A run, a few steps old."""

    def __init__(self, strategy: str | None = None, net: nn.Module | None = None, **options: Any) -> None:
        self.run = paceline.start(device="cpu", progress="off", strategy=strategy, seed=1, **options)
        torch.manual_seed(0)
        self.net = Net() if net is None else net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.schedule = StepLR(self.optimizer, 1, 0.5)
        self.tracked = Tracked()
        self.run.prepare(self.net, self.optimizer, self.schedule)
        self.run.track(own=self.tracked)
        self.loader = self.run.loader(TensorDataset(torch.randn(64, 3, 6, 6)), global_batch=4)
        self.batches = iter(self.loader)
        self.step()
        self.step()

    def step(self) -> None:
        (x,) = next(self.batches)
        self.run.forward_backward(lambda model, batch: model(batch).square().mean(), self.net, x)
        self.run.step(self.optimizer)

    def spoil(self) -> None:
        """All that a script may do once the save has returned."""
        for group in self.optimizer.param_groups:
            group["lr"] = 123.0
        self.tracked.spoil()
        self.step()
        with torch.no_grad():
            for buffer in self.net.buffers():
                buffer.fill_(3)
            for parameter in self.net.parameters():
                parameter.zero_()
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def close(self) -> None:
        self.batches.close()  # type: ignore[attr-defined]
        self.run.close()


class Gate:
    """Holds the thread that writes until it is opened, and may have it fail then."""

    def __init__(self, patch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.open, self.reached, real = threading.Event(), threading.Event(), checkpoint._write_files

        def write(*arguments: Any) -> None:
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.open.wait(DEADLINE_SECONDS)
                if failure is not None:
                    raise failure
            real(*arguments)

        patch.setattr(checkpoint, "_write_files", write)


def files_of(directory: Path) -> dict[str, Any]:
    """The content of each file. (safetensors writes the entries of a header's metadata in any order, so that the header
    is compared as JSON, and hashes of such files are left out of the manifest.)"""
    found: dict[str, Any] = {}
    for path in (path for path in directory.rglob("*") if path.is_file() and path.name != FILE):
        content: Any = path.read_bytes()
        if path.suffix == ".safetensors":
            length = 8 + int.from_bytes(content[:8], "little")
            content = json.loads(content[8:length]), content[length:]
        elif path.name == "manifest.json":
            content = json.loads(content)
            for one in [content, *(own for name, own in content["files"].items() if name.endswith(".safetensors"))]:
                assert len(one.pop("sha256")) == 64
        found[str(path.relative_to(directory))] = content
    return found


def names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name != FILE)  # which a killed run leaves


# What is in the files


@pytest.mark.ranks(1, 2)
def test_the_files_are_those_of_the_moment_byte_for_byte(tmp_path: Path) -> None:
    compare_with_the_foreground(Training(), tmp_path, Training.spoil)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", ["fsdp", "shared", "local_sgd"])
def test_so_are_those_of_other_strategies(tmp_path: Path, strategy: str) -> None:
    compare_with_the_foreground(Training(strategy), tmp_path, Training.step)


def compare_with_the_foreground(training: Training, place: Path, go_on: Callable[[Training], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        training.run.save(place / "before")
        assert training.run.save(place / "behind", background=True) is None
        go_on(training)
        if training.run.main:
            assert gate.reached.wait(DEADLINE_SECONDS)
            assert not (place / "behind" / "step-00000002").exists()
        gate.open.set()
        assert training.run.wait_for_save() == place / "behind" / "step-00000002"
        assert training.run.wait_for_save() is None
        training.close()
    assert files_of(place / "behind") == files_of(place / "before")
    assert len(files_of(place / "before")) > 6


def test_plain_pytorch_finds_the_weights_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    training = Training()
    expected = {name: value.clone() for name, value in training.net.state_dict().items()}
    training.run.save(tmp_path, background=True)
    training.spoil()
    gate.open.set()
    training.close()
    found = load_file(tmp_path / "step-00000002" / "model_0.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.ranks(1, 2)
def test_the_next_save_waits_and_overwrites_nothing(tmp_path: Path) -> None:
    """The second save copies into the memory from which the first is still written."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        training = Training()
        weights = []
        threading.Timer(0.5, gate.open.set).start()
        for background in (True, True, False):
            weights.append(training.net.conv.weight.detach().clone())  # type: ignore[union-attr, operator]
            training.run.save(tmp_path, background=background)
            training.step()
        training.close()
    for step, weight in enumerate(weights, 2):
        found = load_file(tmp_path / f"step-{step:08d}" / "model_0.safetensors")["conv.weight"]
        assert torch.equal(found, weight)
    assert [found == [] for found in checkpoint.examine(tmp_path).values()] == [True] * 3


@pytest.mark.ranks(2)
def test_what_is_restored_is_what_was_saved_last(tmp_path: Path) -> None:
    training = Training()
    training.run.save(tmp_path)
    training.step()
    wanted = training.net.conv.weight.detach().clone()  # type: ignore[union-attr, operator]
    training.run.save(tmp_path, background=True)
    training.step()
    assert training.run.restore(tmp_path)
    assert training.run.steps == 3
    assert torch.equal(training.net.conv.weight, wanted)  # type: ignore[arg-type]
    training.close()


def test_what_stays_is_chosen_as_in_the_foreground(tmp_path: Path) -> None:
    for background in (False, True):
        place = tmp_path / str(background)
        training = Training()
        for score in (3.0, 1.0, 2.0, 5.0, 4.0):
            training.run.save(place, keep=1, keep_best=2, score=score, background=background)
            training.step()
        training.close()
        assert names(place) == ["latest", "step-00000003", "step-00000004", "step-00000006"]
        assert [one.score for one in checkpoint.ranking(place)] == [1.0, 2.0, 4.0]
    assert files_of(tmp_path / "True") == files_of(tmp_path / "False")


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    training = Training()
    training.run.save("checkpoints", background=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.open.set()
    training.close()
    assert checkpoint.find(tmp_path / "checkpoints").step == 2


def test_a_state_that_cannot_be_saved_is_said_at_once(tmp_path: Path) -> None:
    training = Training()
    training.tracked.state["function"] = len
    with pytest.raises(CheckpointError, match="a function cannot be saved"):
        training.run.save(tmp_path, background=True)
    assert training.run.wait_for_save() is None
    training.close()
    assert names(tmp_path) == []


def test_fit_trains_on_and_all_is_there_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    gate.open.set()
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))
    for background in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        where = paceline.Checkpoints(tmp_path / str(background), keep=2, every=3, keep_best=1, background=background)
        paceline.fit(
            model,
            lambda m, b: m(b[0]).square().mean(),
            data,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            global_batch=4,
            epochs=2,
            checkpoints=where,
            best=paceline.Best("loss"),
            run=paceline.start(device="cpu", progress="off"),
        )
        assert gate.reached.is_set() == background
        assert where.ranking()[0].step == 8
    paceline.start(progress="off").close()
    assert files_of(tmp_path / "True") == files_of(tmp_path / "False")
    with pytest.raises(SettingError, match=r"Checkpoints\(background='yes'\): pass True or False"):
        paceline.Checkpoints("checkpoints", background="yes")  # type: ignore[arg-type]


# What fails


FULL = OSError(28, "No space left on device")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("at", ["save", "wait_for_save", "restore", "close"])
def test_a_failure_is_raised_once_on_all_ranks(tmp_path: Path, at: str) -> None:
    said = r"the checkpoint of step 3 could not be saved in the background: .* saved to .*: No space left on device"
    with pytest.MonkeyPatch.context() as patch:
        training = Training()
        training.run.save(tmp_path)
        gate = Gate(patch, FULL)
        training.step()
        training.run.save(tmp_path, background=True)
        gate.open.set()
        training.step()
        call = getattr(training.run, at)
        with pytest.raises(CheckpointError, match=said):
            call(*[tmp_path] * (at in ("save", "restore")))
        assert names(tmp_path) == ["latest", "step-00000002"]
    if at != "close":
        assert training.run.save(tmp_path) == tmp_path / "step-00000004"
    training.close()
    assert checkpoint.find(tmp_path).damage == []


@pytest.mark.ranks(2)
def test_an_error_that_nobody_foresaw_is_raised_on_all_ranks_too(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, MemoryError("none left"))
        training = Training()
        training.run.save(tmp_path, background=True)
        gate.open.set()
        with pytest.raises(CheckpointError, match=r"step 2 .*: MemoryError: none left"):
            training.run.save(tmp_path)
        training.close()


def test_where_an_error_ends_the_run_that_is_raised_and_the_failure_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gate = Gate(monkeypatch, FULL)
    training = Training()
    training.run.save(tmp_path, background=True)
    gate.open.set()
    try:
        raise KeyError("of the script")
    except KeyError:
        training.close()
    assert "paceline: the checkpoint of step 2 could not be saved in the background" in capfd.readouterr()[1]


def test_a_warning_of_the_write_comes_at_the_scripts_line(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    training = Training()
    training.run.save(place, background=True)
    training.run.wait_for_save()
    place.rename(tmp_path / "elsewhere")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training.run.save(place, background=True)
    with pytest.warns(UserWarning, match="has been removed or replaced since the last save") as told:
        training.run.wait_for_save()
    assert [one.filename for one in told] == [__file__]
    training.close()


def test_no_thread_to_be_had_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    training = Training()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CheckpointError, match=r"step 2 cannot be saved in the background: can't start"):
            training.run.save(tmp_path, background=True)
        assert training.run.save(tmp_path).name == "step-00000002", "the foreground needs none"
    training.close()


def test_the_threads_that_help_do_all_work_and_hand_errors_on() -> None:
    with HelperThreads(2, "helper") as pool:
        results = [pool.submit(divmod, number, 3) for number in range(50)]
        wrong = pool.submit(divmod, 1, 0)
    assert [future.result(0) for future in results] == [divmod(number, 3) for number in range(50)]
    with pytest.raises(ZeroDivisionError):
        wrong.result(0)


def test_the_launcher_is_told_while_something_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ERROR_FILE", str(tmp_path / "error"))
    gate, writer = threading.Event(), BackgroundWrite()

    def write() -> Path:
        assert gate.wait(DEADLINE_SECONDS)
        return tmp_path

    writer.begin(7, write)
    assert (tmp_path / "error.writes").read_text() == "7"
    gate.set()
    assert writer.finish() == tmp_path
    assert not (tmp_path / "error.writes").exists()
    assert writer.finish() is None


# Processes that are forked meanwhile


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def test_workers_are_forked_while_it_writes(tmp_path: Path) -> None:
    training = Training(net=nn.Sequential(nn.Flatten(), nn.Linear(108, 4096), nn.Linear(4096, 512)))
    for _ in range(4):
        training.run.save(tmp_path, keep=1, background=True)
        for _ in range(3):
            batches = DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=60)
            assert torch.cat(list(batches)).tolist() == list(range(8))
        training.step()
    training.close()
    assert checkpoint.find(tmp_path).step == 5


FORKS = """
import os, signal, sys, time, torch
from paceline.state import checkpoint
from paceline.state.background_write import BackgroundWrite

def slow(*_):
    os.write(writer, b"x")
    time.sleep(60)

checkpoint._write_files = slow
reader, writer = os.pipe()
BackgroundWrite().begin(1, lambda: checkpoint.write(sys.argv[1], step=1, parts={"model": {"x": torch.ones(3)}}))
os.read(reader, 1)
child = os.fork()
if child == 0:
    time.sleep(100)
    os._exit(0)
open("child", "w").write(str(child))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_that_outlives_the_writer_does_not_keep_its_debris(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    done = subprocess.run([sys.executable, "-c", FORKS, place], cwd=tmp_path, timeout=60, check=False)
    try:
        assert done.returncode == -signal.SIGKILL
        assert any(name.startswith(".tmp") for name in names(place)), "the writer was killed too early or too late"
        checkpoint.write(place, step=2, parts={"model": 1})
        assert names(place) == ["latest", "step-00000002"]
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


# Ends of the process, with real launchers


SCRIPT = r"""
import os, sys, time
from pathlib import Path
import torch, paceline
from torch import nn
from paceline.state import checkpoint

how, seconds = sys.argv[1], float(sys.argv[2])
real = checkpoint._write_files

def slow(*arguments):
    Path("writes").touch()
    time.sleep(seconds)
    if how == "full":
        raise OSError(28, "No space left on device")
    real(*arguments)

checkpoint._write_files = slow
run = paceline.start(device="cpu", seed=3, progress="off")
net = nn.Linear(8, 1)
run.prepare(net, optimizer := torch.optim.AdamW(net.parameters()))
loader = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 8)), global_batch=8)
run.restore("checkpoints", missing_ok=True)
run.print("starts at", run.steps)
for epoch in run.epochs(100 if how == "long" else 1):
    for (x,) in loader:
        run.backward(net(x).square().mean())
        if run.step() and run.steps == 3:
            run.save("checkpoints", background=True)
            if how == "exit":
                sys.exit(3)
            if how == "error":
                raise ValueError("of the script")
        if how == "long" and run.steps > 3:
            time.sleep(0.05)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "train.py").write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def begin(*line: str, until_it_writes: bool = True) -> subprocess.Popen[str]:
        (tmp_path / "writes").unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, *line],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        began = time.monotonic()
        while until_it_writes and not (tmp_path / "writes").exists() and process.poll() is None:
            assert time.monotonic() - began < DEADLINE_SECONDS
            time.sleep(0.02)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


ALONE, TWO = ["train.py"], ["-m", "paceline", "run", "--nproc", "2", "train.py"]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("line", "how", "signum", "code"),
    [
        pytest.param(ALONE, "end", None, 0, marks=pytest.mark.full),
        (TWO, "end", None, 0),
        pytest.param(ALONE, "exit", None, 3, marks=pytest.mark.full),
        pytest.param(TWO, "exit", None, 3, marks=pytest.mark.full),
        (TWO, "error", None, 1),
        pytest.param(ALONE, "long", signal.SIGINT, 130, marks=pytest.mark.full),
        pytest.param(TWO, "long", signal.SIGINT, 130, marks=pytest.mark.full),
        ([*TWO[:3], "--grace", "0", *TWO[3:]], "long", signal.SIGTERM, 143),
    ],
    ids=lambda value: getattr(value, "name", None) or (str(len(value)) if isinstance(value, list) else str(value)),
)
def test_no_end_that_can_wait_breaks_a_write_off(
    start: Any, tmp_path: Path, line: list[str], how: str, signum: signal.Signals | None, code: int
) -> None:
    """The write takes longer than what a launcher gives ranks that it ends."""
    process = start(*line, how, "5")
    if signum is not None:
        process.send_signal(signum)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode in (code, -signum if signum else code), err
    assert names(tmp_path / "checkpoints") == ["latest", "step-00000003"], err
    assert checkpoint.find(tmp_path / "checkpoints").damage == []
    assert signum is not signal.SIGTERM or "waiting for the checkpoint of step 3, which is being written" in err


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_second_signal_waits_for_nothing(start: Any, tmp_path: Path) -> None:
    process = start(*TWO[:3], "--grace", "0", *TWO[3:], "long", "600")
    process.send_signal(signal.SIGTERM)
    assert any("waiting for the checkpoint of step 3, which is being written" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(name.startswith("step") for name in names(tmp_path / "checkpoints"))


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", [pytest.param(ALONE, marks=pytest.mark.full), TWO], ids=["1", "2"])
def test_a_failure_that_is_noticed_at_the_exit_is_the_exit_code(start: Any, line: list[str]) -> None:
    """The script closes nothing itself."""
    process = start(*line, "full", "1")
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1, err
    assert re.search(r"the checkpoint of step 3 could not be saved in .*No space left on device", err), err
    assert "Exception ignored" not in err
    assert "atexit" not in err


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("signum", "grace"), [(signal.SIGTERM, ["--grace", "60"]), pytest.param(signal.SIGUSR1, [], marks=pytest.mark.full)]
)
def test_a_run_that_is_asked_to_stop_ends_the_write_and_saves_once_more(
    start: Any, tmp_path: Path, signum: signal.Signals, grace: list[str]
) -> None:
    line = [*TWO[:3], *grace, *TWO[3:]]
    process = start(*line, "long", "3")
    process.send_signal(signum)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    last = int(re.search(r"after saving \S+/step-0*(\d+)\.", err)[1])  # type: ignore[index]
    assert last > 3
    assert names(tmp_path / "checkpoints") == ["latest", "step-00000003", f"step-{last:08d}"]
    assert all(damage == [] for damage in checkpoint.examine(tmp_path / "checkpoints").values())
    process = start(*line, "end", "0", until_it_writes=False)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    assert f"starts at {last}" in out


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_that_is_asked_to_stop_saves_though_the_write_before_has_failed(start: Any, tmp_path: Path) -> None:
    script = (tmp_path / "train.py").read_text()
    # The first write fails, wherever the training is by the time that the thread comes to it.
    fails = 'first = not Path("failed").exists()\n    Path("failed").touch()\n    if first:'
    (tmp_path / "train.py").write_text(script.replace('if how == "full":', fails))
    process = start(*TWO, "long", "0")
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == RESUMABLE, err
    assert err.count("paceline: the checkpoint of step 3 could not be saved in the background") == 1
    assert checkpoint.find(tmp_path / "checkpoints").step > 3


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_death_of_another_rank_does_not_break_a_write_off(start: Any, tmp_path: Path) -> None:
    script = (tmp_path / "train.py").read_text()
    dies = 'if how == "dies" and run.rank == 1 and run.steps == 3:\n    while not Path("writes").exists(): pass\n'
    dies += "    os.kill(os.getpid(), 9)\n"
    indented = "".join(f"        {line}\n" for line in dies.splitlines())
    (tmp_path / "train.py").write_text(
        script.replace('        if how == "long" and', indented + '        if how == "long" and')
    )
    process = start(*TWO, "dies", "6")
    _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 128 + signal.SIGKILL, err
    assert checkpoint.find(tmp_path / "checkpoints") == (tmp_path / "checkpoints" / "step-00000003", 3, [])
