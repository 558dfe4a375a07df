"""In a notebook: the bar and the curve in the cell, drawn again in place; in a real kernel, and interrupted there."""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import time
import types
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import TensorDataset

import paceline
from paceline import notebook
from paceline.monitor import notebook_display
from paceline.monitor.notebook_display import MOST_POINTS, WIDTH, curves
from paceline.world import CELL_FILE

FIT = """
import time, torch, paceline
from torch.utils.data import TensorDataset

def train(epochs=2, seconds=0.0, workers=0):
    torch.manual_seed(0)
    x = torch.randn(80, 4)
    def loss_fn(model, batch):
        time.sleep(seconds)
        return model(batch[0]).square().mean()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(x)
    return paceline.fit(model, loss_fn, data, optimizer=optimizer, global_batch=4, epochs=epochs, num_workers=workers,
                        evaluate_on=TensorDataset(x[:8]))["loss"]
"""


def lines_of(svg: str) -> dict[str, list[tuple[float, float]]]:
    """The points of each curve, by its name."""
    root = ET.fromstring(svg.replace("currentColor", "black"))
    names = {text.get("fill"): text.text for text in root.iter("text")}
    return {
        str(names[line.get("stroke")]): [tuple(map(float, at.split(","))) for at in str(line.get("points")).split()]  # type: ignore[misc]
        for line in root.iter("polyline")
    }


def test_the_curve_shows_the_numbers() -> None:
    """Straight lines stay straight; falls over decades are drawn on a logarithmic scale; names are escaped."""
    ((name, line),) = lines_of(curves({"a<b": [(1, 4.0), (2, 3.0), (5, 0.0)]})).items()
    assert name == "a<b"
    steps, heights = zip(*line, strict=True)
    assert steps[-1] == WIDTH - 8
    assert (steps[1] - steps[0]) * 3 == pytest.approx(steps[2] - steps[1], abs=1)
    assert (heights[1] - heights[0]) * 3 == pytest.approx(heights[2] - heights[1], abs=1)
    ((_, line),) = lines_of(curves({"loss": [(0, 100.0), (1, 1.0), (2, 0.01)]})).items()
    assert line[1][1] - line[0][1] == pytest.approx(line[2][1] - line[1][1], abs=0.2)
    assert "step 2<" in curves({"loss": [(0, 1.0), (2, 1.0)]})
    assert curves({}) == ""


def test_a_curve_stays_small_and_leaves_out_what_is_no_number() -> None:
    points: notebook_display.Points = []
    for step in range(100_000):
        notebook_display._append(points, step, float(step))
    notebook_display._append(points, 100_000, float("nan"))
    assert len(points) <= MOST_POINTS
    assert points[0] == (0, 0.0)
    assert points[-1] == (99_999, 99_999.0)


class Seen:
    """Stands in for IPython.display, and for the events of a kernel's shell."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, dict[str, str]]] = []
        self.called: list[Any] = []  # after each cell

    def register(self, event: str, function: Any) -> None:
        assert event == "post_run_cell"
        self.called.append(function)

    def unregister(self, event: str, function: Any) -> None:
        self.called.remove(function)  # which raises ValueError, as IPython does, where it is not there

    def display(self, data: dict[str, str], raw: bool, display_id: str) -> None:
        assert raw
        self.shown.append((display_id, data))

    update_display = display


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    shell: Any = type("Shell", (type("ZMQInteractiveShell", (), {}),), {})()  # Colab's is a subclass
    shell.events = seen
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: shell  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setitem(sys.modules, "IPython.display", seen)  # type: ignore[arg-type]
    return seen


def short(run: paceline.Run, epochs: int = 2) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(torch.ones(24, 2)), global_batch=4)
    for _ in run.epochs(epochs):
        for batch in loader:
            run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
            run.step(optimizer)
        run.log(val_loss=0.5)


def test_one_picture_in_place_of_the_one_before(cell: Seen, capfd: pytest.CaptureFixture[str]) -> None:
    run = paceline.start(device="cpu")
    short(run)
    run.close()
    out, err = capfd.readouterr()
    assert err == "", "a cell shows stderr as an error"
    assert [line for line in out.splitlines() if "steps in" in line] == out.splitlines()[-1:], "told once"
    assert len({name for name, _ in cell.shown}) == 1
    last = cell.shown[-1][1]
    assert re.match(r"epoch 2/2  step 6/6  loss [\d.e-]+  .*lr 0.1 .*GiB\n", last["text/plain"])
    for told in ("epoch 1/2  loss", "epoch 1/2  val_loss 0.5", "epoch 2/2  loss", "epoch 2/2  val_loss 0.5"):
        assert last["text/plain"].count(told) == last["text/html"].count(told) == 1
    found = lines_of(re.search(r"<svg.*</svg>", last["text/html"])[0])  # type: ignore[index]
    assert set(found) == {"loss", "val_loss"}
    assert "step 12<" in last["text/html"]
    assert "width:100.0%" in last["text/html"]
    ET.fromstring(last["text/html"])  # it is well formed


def test_the_end_of_a_cell_shows_where_a_loop_has_come(cell: Seen) -> None:
    """Of a loop that is not inside of run.epochs, or was interrupted: then nothing else says that it has ended."""
    run = paceline.start(device="cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    for batch in run.loader(TensorDataset(torch.ones(24, 2)), global_batch=4):
        run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
        run.step(optimizer)
        if run.steps == 5:
            break
    (ended,) = cell.called
    ended("the cell's result")
    assert "step 4/6" in cell.shown[-1][1]["text/plain"] or "step 5/6" in cell.shown[-1][1]["text/plain"]
    drawn = len(cell.shown)
    ended("another cell's")
    assert len(cell.shown) == drawn
    run.close()
    assert not cell.called


def test_it_is_drawn_as_seldom_as_it_says(cell: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_display, "DRAW_SECONDS", 1000.0)
    run = paceline.start(device="cpu")
    short(run, epochs=30)
    run.close()
    assert len(cell.shown) == 2  # the first time, and at the end


@pytest.mark.parametrize(
    ("progress", "pictures", "lines"), [("bar", True, False), ("lines", False, True), ("off", False, False)]
)
def test_the_setting(cell: Seen, progress: str, pictures: bool, lines: bool, capfd: pytest.CaptureFixture[str]) -> None:
    run = paceline.start(device="cpu", progress=progress)
    short(run)
    run.close()
    assert bool(cell.shown) == pictures
    assert ("epoch 2/2  loss" in capfd.readouterr().err) == lines


def test_a_worker_writes_the_picture_and_the_kernel_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: Seen
) -> None:
    path = tmp_path / "cell"
    relay = notebook.Relay(str(path), notebook.Cell())
    relay.show()
    assert not cell.shown
    monkeypatch.setenv(CELL_FILE, str(path))
    run = paceline.start(device="cpu")
    short(run)
    run.close()
    assert not cell.shown
    relay.show()
    relay.show()
    ((_, shown),) = cell.shown
    assert "epoch 2/2  step 6/6" in shown["text/plain"]
    assert json.loads(path.read_text()) == [shown["text/html"], shown["text/plain"]]
    notebook.CellFile(str(tmp_path / "no folder" / "cell")).show("a", "b")  # ends no training


def test_without_a_kernel_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notebook.in_kernel()
    error = KeyboardInterrupt()
    notebook.shorten(error, "text")
    assert not hasattr(error, "_render_traceback_")
    module = types.ModuleType("IPython")
    module.get_ipython = lambda: type("TerminalInteractiveShell", (), {})()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", module)
    assert not notebook.in_kernel()


# --- with a real kernel


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A running kernel: (its manager, its client)."""
    pytest.importorskip("ipykernel", reason="ipykernel is not installed: make conformance installs it")
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manager, client = start_new_kernel(startup_timeout=120)
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def executed(client: Any, code: str, interrupt: Any = None, deadline: float = 120) -> list[dict[str, Any]]:
    """The messages of a cell, each with its type. interrupt: is called once the first picture with a step has come.

    Python swallows a KeyboardInterrupt in the hooks that it calls around a fork, as that of a worker, and writes
    so. The interrupt is then made again, as a user would.
    """
    sent = client.execute(code)
    found: list[dict[str, Any]] = []
    again = interrupt
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        try:
            message = client.get_iopub_msg(timeout=1)
        except queue.Empty:
            continue
        if message["parent_header"].get("msg_id") != sent:
            continue
        kind, content = message["msg_type"], message["content"]
        if again and re.match(
            r"Exception ignored in: <function _\w+Lock\b[^>]*>(.|\n)*KeyboardInterrupt", content.get("text", "")
        ):
            again()
            continue
        found.append({"type": kind, **content})
        drawn = content["data"]["text/plain"] if kind in ("display_data", "update_display_data") else ""
        if interrupt is not None and re.search(r"step [1-9]", drawn):
            interrupt()
            interrupt = None
        if kind == "status" and content["execution_state"] == "idle":
            return found
    raise AssertionError(found)


def of(messages: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [message for message in messages if message["type"] == kind]


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_a_notebook_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By nbclient: fit on one process, a loop, and paceline.launch on two; the notebook keeps one picture of each."""
    for library in ("nbclient", "ipykernel"):
        pytest.importorskip(library, reason=f"{library} is not installed: make conformance installs it")
    import nbclient
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    loop = """
run = paceline.start()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)
for epoch in run.epochs(2):
    for batch in run.loader(TensorDataset(torch.ones(80, 4)), global_batch=4, name=f"train {epoch}"):
        run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
        run.step(optimizer)
run.close()
"""
    codes = [FIT + "\nprint(train())", loop, 'print(paceline.launch(train, 3, 0.02, nproc=2, device="cpu")[1])']
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes])
    nbclient.NotebookClient(made, timeout=150).execute()
    for made_cell, position in zip(made.cells, ["2/2  step 20/20", "2/2  step 20/20", "3/3  step 20/20"], strict=True):
        outputs = made_cell.outputs
        assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, outputs
        pictures = [output.data for output in outputs if output.output_type == "display_data"]
        assert len(pictures) == 1
        assert pictures[0]["text/plain"].startswith(f"epoch {position}  loss")
        assert "<svg" in pictures[0]["text/html"]
        text = "".join(output.get("text", "") for output in outputs)
        assert text.count("steps in") == 1
    printed = ["".join(output.get("text", "") for output in one.outputs).splitlines()[-1] for one in made.cells]
    one, two = json.loads(printed[0]), json.loads(printed[2])
    assert one == pytest.approx(two[:2], rel=1e-5)


def left_by(pid: int) -> list[str]:
    """The processes that a kernel has started and that have not ended, after some seconds."""
    until = time.monotonic() + 15
    while True:
        left = [child for child in psutil.Process(pid).children(recursive=True) if child.status() != "zombie"]
        if not left or time.monotonic() > until:
            return [" ".join(child.cmdline()) for child in left]
        time.sleep(0.2)


@pytest.mark.conformance
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("train(100, 0.05)", r"fit was interrupted in epoch 1, after step \d+\."),
        ("train(100, 0.05, workers=2)", r"fit was interrupted in epoch 1, after step \d+\."),
        (
            'paceline.launch(train, 100, 0.05, nproc=2, device="cpu")',
            r"paceline\.launch was interrupted\. All its processes have ended\.",
        ),
    ],
)
def test_an_interrupted_cell(call: str, told: str, kernel: Any) -> None:
    """No process is left, the message is one line, and the next cell runs."""
    manager, client = kernel
    executed(client, FIT)
    pid = int(of(executed(client, "import os; print(os.getpid())"), "stream")[0]["text"])
    messages = executed(client, call, interrupt=manager.interrupt_kernel)
    (error,) = of(messages, "error")
    assert error["ename"] == "KeyboardInterrupt"
    assert len(error["traceback"]) == 1
    assert re.fullmatch(rf"KeyboardInterrupt: {told}", error["traceback"][0])
    assert not [message for message in of(messages, "stream") if message["name"] == "stderr"], messages
    assert left_by(pid) == []
    (again,) = of(executed(client, "print(len(train(1)))"), "display_data")
    assert "epoch 1/1" in again["data"]["text/plain"]


@pytest.mark.conformance
@pytest.mark.timeout(200)
def test_a_failed_rank_is_told_without_the_launchers_lines(kernel: Any) -> None:
    _, client = kernel
    messages = executed(
        client, "import paceline\ndef fails():\n    raise ValueError('bad data')\npaceline.launch(fails)"
    )
    (error,) = of(messages, "error")
    told = r"LaunchError: launch\(__main__\.fails\): rank [01] failed: ValueError: bad data"
    assert re.fullmatch(told, error["traceback"][0])
    assert "ValueError: bad data" in error["traceback"]
    assert len(error["traceback"]) <= 6
    assert os.sep + "launcher" + os.sep not in "\n".join(error["traceback"])
