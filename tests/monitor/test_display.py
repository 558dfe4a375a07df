"""The progress display: on a terminal and not, at the end, and when it is cut short."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.monitor import display

SCRIPT = """
import sys, time, torch, paceline
from torch.utils.data import TensorDataset
run = paceline.start(progress="auto")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
loader = run.loader(TensorDataset(torch.ones(80, 2)), global_batch=4, num_workers=int(sys.argv[2]))
test = run.loader(TensorDataset(torch.ones(8, 2)), global_batch=4, train=False)
for epoch in run.epochs(2):
    for batch in loader:
        run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
        run.step(optimizer)
        time.sleep(float(sys.argv[1]))
        if run.steps == 10: print("a plain line"); run.print("a line of rank", run.world.rank)
    for batch in test: run.log(score=0.25)
print("after it")
"""


def on_terminal(
    folder: Path, *arguments: str, interrupt: bool = False, text: str = SCRIPT, launcher: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    """(exit code, what the terminal got, what went to the file that stdout is)."""
    script = folder / "script.py"
    script.write_text(text)
    terminal, other = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "OMP_NUM_THREADS": "1"}
    with open(folder / "stdout", "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *arguments],
            stdout=file,
            stderr=other,
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    os.close(other)
    got = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                got += os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if interrupt and b"eta" in got:
                process.send_signal(signal.SIGINT)
                interrupt = False
    os.close(terminal)
    return process.wait(20), got.decode(), (folder / "stdout").read_text()


@pytest.mark.conformance
@pytest.mark.timeout(90)
@pytest.mark.parametrize("workers", [pytest.param("0", marks=pytest.mark.conformance), "1"])
def test_a_bar_on_a_terminal(tmp_path: Path, workers: str) -> None:
    code, shown, printed = on_terminal(tmp_path, "0.06", workers)
    assert code == 0, shown
    drawn = re.findall(
        r"epoch 1/2  step (\d+)/20 .*?loss [\d.e+-]+  lr 0.1  [\d.,]+ examples/s  eta [\d.]+ s  [\d.]+ GiB", shown
    )
    assert drawn, shown
    assert [int(step) for step in drawn] == sorted(int(step) for step in drawn)
    assert "\x1b[?25l" not in shown, "the cursor is hidden: a process that is killed would leave it so"
    assert shown.count("epoch 1/2  score 0.25") == 1
    assert printed == "a plain line\na line of rank 0\nafter it\n", "what goes to a file stays as it is"
    last = shown.rstrip().splitlines()[-1].rpartition("\x1b[2K")[2]  # where the bar was
    assert re.fullmatch(r"paceline: 40 steps in [\d.]+ s, [\d.]+ examples/s, \d+% of it waiting for data", last), last


@pytest.mark.conformance
@pytest.mark.timeout(90)
def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    code, shown, _ = on_terminal(tmp_path, "0.2", "0", interrupt=True)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in shown
    assert "\x1b[?25l" not in shown
    assert re.search(r"\x1b\[2Kpaceline: \d+ steps? in .*data\r\n$", shown), repr(shown[-300:])  # the bar is erased


def short(run: paceline.Run, steps: int = 6) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for batch in run.loader(TensorDataset(torch.randn(4 * steps, 2)), global_batch=4):
        run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
        run.step(optimizer)
        run.log(accuracy=0.5)


def test_plain_lines_where_there_is_no_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "LINE_SECONDS", 0.0)
    run = paceline.start(deterministic=False, tf32=True)
    short(run)
    run.log(test=2)
    run.close()
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    threads = torch.get_num_threads()  # 1 where OMP_NUM_THREADS says so
    noun = "thread" if threads == 1 else "threads"
    assert lines[0] == f"paceline: 1 process, cpu, strategy single, {threads} {noun} per process"
    assert lines[1] == "paceline: global batch 4"
    assert lines[2] == "paceline: precision fp32, seed 0"
    assert lines[3] == "paceline: set: tf32=true (float32 products with 10 bits of mantissa)"
    assert any(line.startswith("epoch 1  step 5/6  loss ") and "accuracy 0.5" in line for line in lines), err
    assert re.match(r"epoch 1  loss [\d.]+  accuracy 0.5  [\d.]+ m?s", lines[-3]), err
    assert lines[-2] == "epoch 1  test 2"
    assert re.match(r"paceline: 6 steps in ", lines[-1])


def test_off_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    run = paceline.start(progress="off")
    short(run)
    run.log(test=2)
    run.close()
    assert capfd.readouterr() == ("", "")


def test_short_epochs_do_not_flood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty lines, then one a second, and the last."""
    run = paceline.start(progress="lines", device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(torch.ones(2, 2)), global_batch=2)
    for _ in run.epochs(60):
        for batch in loader:
            run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
            run.step(optimizer)
    run.close()
    shown = re.findall(r"^epoch (\d+)/60 ", capsys.readouterr().err, re.M)
    assert shown[: display.MANY_EPOCHS] == [str(n + 1) for n in range(display.MANY_EPOCHS)]
    assert shown[-1] == "60"
    assert len(shown) < 40


def test_the_last_line_counts_steps_and_not_batches(capsys: pytest.CaptureFixture[str]) -> None:
    run = paceline.start(progress="lines", device="cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(torch.ones(6, 2)), global_batch=2)
    next(iter(loader))  # looked at
    for batch in loader:
        run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
        run.step(optimizer)
    run.close()
    assert "paceline: 3 steps in " in capsys.readouterr().err


KILLED = """
import os, signal, time, torch, paceline
from torch.utils.data import TensorDataset
run = paceline.start(progress="bar")
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
for batch in run.loader(TensorDataset(torch.ones(80, 2)), global_batch=4):
    run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
    run.step(optimizer)
    time.sleep(0.1)
    if run.steps == 10 and run.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.conformance
@pytest.mark.timeout(90)
def test_what_the_launcher_says_of_a_killed_rank_has_a_line_of_its_own(tmp_path: Path) -> None:
    """The bar of rank 0, whose line has no end, is wiped away; and no count of steps follows a failure."""
    launcher = ("-m", "paceline", "run", "--nproc", "2")
    code, shown, _ = on_terminal(tmp_path, text=KILLED, launcher=launcher)
    assert code == 128 + signal.SIGKILL, shown
    assert "step 0/20" in shown, shown
    (line,) = [line for line in shown.splitlines() if "was killed by SIGKILL" in line]
    assert line.rpartition("\x1b[2K")[2].startswith("rank 1 was killed"), repr(line)


@pytest.mark.conformance
@pytest.mark.timeout(90)
def test_a_traceback_of_the_launcher_is_the_last_word(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        KILLED.replace("os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('why')").replace("1:", "0:")
    )
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "1", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert "ValueError: why" in done.stderr
    assert "steps in" not in done.stderr, done.stderr


def test_between_two_writes_to_trackers_the_loss_is_shown_all_the_same(tmp_path: Path) -> None:
    """The first epoch has six steps, and log_every is 100. What is written stays the exact mean."""
    run = paceline.start(log_dir=tmp_path, log_every=100, progress="lines", device="cpu")
    view, model = run._monitor.view, nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    shown, losses = [], []
    for _ in run.epochs(1):
        for batch in run.loader(TensorDataset(torch.ones(24, 1)), global_batch=4):
            losses.append(float(run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)))
            run.step(optimizer)
            shown.append(view.loss)
    run.close()
    assert shown[0] is None
    assert shown[2] == pytest.approx(losses[0], rel=1e-12)
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 6
    assert line["loss"] == pytest.approx(sum(losses) / 6, rel=1e-7)
