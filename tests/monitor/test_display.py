"""The progress display: on a terminal and not, at the end, and when it is cut short."""

from __future__ import annotations

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


def on_terminal(folder: Path, *arguments: str, interrupt: bool = False) -> tuple[int, str, str]:
    """(exit code, what the terminal got, what went to the file that stdout is)."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    terminal, other = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "140", "OMP_NUM_THREADS": "1"}
    with open(folder / "stdout", "wb") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=file, stderr=other, stdin=subprocess.DEVNULL, env=environ
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


@pytest.mark.timeout(90)
@pytest.mark.parametrize("workers", ["0", "1"])
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


@pytest.mark.timeout(90)
def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    code, shown, _ = on_terminal(tmp_path, "0.2", "0", interrupt=True)
    assert code == -signal.SIGINT
    assert "KeyboardInterrupt" in shown
    assert "\x1b[?25l" not in shown
    assert re.search(r"\x1b\[2Kpaceline: \d+ steps in .*data\r\n$", shown), repr(shown[-300:])  # the bar is erased


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
    assert lines[0] == f"paceline: 1 process, cpu, strategy single, {threads} {noun} a process"
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
