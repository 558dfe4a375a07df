"""Runs that are traced: really started, with a deadline; what they leave is read as Perfetto reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.timeline.chrome_trace import parts_of

DEADLINE = 100
PHASES = {"data", "forward", "backward", "communication", "update", "checkpoint", "evaluation"}

# Each rank sleeps in its forward, so that a step is long beside what else the machine does.
SCRIPT = """
import os, signal, sys, time, torch, paceline
from torch.utils.data import TensorDataset
slow, kill = float(sys.argv[1]), int(sys.argv[2])

def collate(items):
    time.sleep(slow if run.rank == 1 else 0.0)
    return torch.stack([row for row, in items])

def loss_fn(model, batch):
    time.sleep(0.03)
    return model(batch).square().mean()

run = paceline.start(seed=0, progress="off")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.prepare(model, optimizer)
rows = TensorDataset(torch.randn(96, 8))
train = run.loader(rows, global_batch=8, shuffle=True, collate_fn=collate)
test = run.loader(rows, global_batch=32, train=False, collate_fn=collate)
for epoch in run.epochs(2):
    for batch in train:
        if run.rank == kill and run.steps == 15:
            os.kill(os.getpid(), signal.SIGKILL)
        run.forward_backward(loss_fn, model, batch)
        run.step()
    with torch.no_grad():
        for batch in test:
            model(batch)
    run.save("checkpoints")
"""

# As users write it who come from plain PyTorch: a DataLoader with workers, and a loop with a loss of its own.
PLAIN = """
import time
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset
import paceline

class Images(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((1, 8, 8), index / 64), index % 4

def main():
    run = paceline.start(trace="out/trace.json")
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Images(), batch_size=8, shuffle=True, num_workers=2)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for epoch in range(2):
        running = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            run.backward(loss)
            run.step(optimizer)
            running += loss.item()
        run.print(f"epoch {epoch}: {running / len(loader):.3f}")
    run.print("done")

if __name__ == "__main__":
    main()
"""


def launch(folder: Path, script: str, nproc: int, *options: str) -> subprocess.CompletedProcess[str]:
    """paceline run of this script, in this folder. options: those of `paceline run`, `--`, those of the script."""
    (folder / "script.py").write_text(script)
    place = options.index("--") if "--" in options else len(options)
    words = [*options[:place], "script.py", *options[place + 1 :]]
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--nproc", str(nproc), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def spans_of(file: Path) -> dict[int, list[dict[str, Any]]]:
    """pid -> its complete events, in the order of time. Every event has what the format asks for, and the
    number of its step but for exchanges before the first."""
    found = defaultdict(list)
    names = {}
    for event in json.loads(file.read_text())["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "M":
            if event["name"] == "process_name":
                names[event["pid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert set(event["args"]) >= {"epoch", "step"} or event["name"] in ("communication", "waiting")
        found[event["pid"]].append(event)
    assert all(name.startswith(f"rank {pid} (") for pid, name in names.items())
    assert set(names) == set(found)
    assert not parts_of(file).exists()
    return {pid: sorted(events, key=lambda event: event["ts"]) for pid, events in found.items()}


def assert_spans_lie_well(events: list[dict[str, Any]]) -> None:
    """Phases follow each other; a step contains those of its own, and they are not longer than it."""
    rounding = 0.002  # microseconds
    phases = [event for event in events if event["name"] != "step"]
    for before, after in pairwise(phases):
        assert before["ts"] + before["dur"] <= after["ts"] + rounding, (before, after)
    steps = [event for event in events if event["name"] == "step"]
    assert len({(step["args"]["epoch"], step["args"]["step"]) for step in steps}) == len(steps)
    for before, after in pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + rounding, (before, after)
    for step in steps:
        end = step["ts"] + step["dur"] + rounding
        key = step["args"]["epoch"], step["args"]["step"]
        inside = [one for one in phases if step["ts"] - rounding <= one["ts"] and one["ts"] + one["dur"] <= end]
        assert {(one["args"]["epoch"], one["args"]["step"]) for one in inside} == {key}
        assert sum(one["dur"] for one in inside) <= step["dur"] + rounding * len(inside)
        assert {"data", "update"} <= {one["name"] for one in inside}


@pytest.mark.conformance
@pytest.mark.timeout(DEADLINE + 20)
def test_a_rank_with_slow_data_is_named(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT, 2, "--trace", "trace.json", "--", "0.02", "-1")
    assert done.returncode == 0, done.stderr
    assert "paceline: trace of 2 ranks, 24 steps, in " in done.stderr
    slow = [line for line in done.stderr.splitlines() if "was slower than the others" in line]
    assert len(slow) == 1, done.stderr
    assert slow[0].startswith("paceline: rank 1 was slower than the others in data, by "), slow
    spans = spans_of(tmp_path / "trace.json")
    assert set(spans) == {0, 1}
    for rank, events in spans.items():
        assert_spans_lie_well(events)
        assert {event["name"] for event in events} >= PHASES, rank
        assert len([event for event in events if event["name"] == "step"]) == 24
    waited = [sum(event["dur"] for event in events if event["name"] == "waiting") for events in spans.values()]
    assert waited[0] > waited[1], waited
    forwards = [sum(event["dur"] for event in events if event["name"] == "forward") for events in spans.values()]
    assert min(forwards) >= 24 * 30_000  # what the closure sleeps
    # The clocks are one: no rank begins a step before the other has begun the step before, whose gradients it needs.
    zero, one = ([event["ts"] for event in events if event["name"] == "step"] for events in spans.values())
    assert all(before < after for before, after in zip(zero[:-1], one[1:], strict=True)), (zero, one)
    assert all(before < after for before, after in zip(one[:-1], zero[1:], strict=True)), (zero, one)


@pytest.mark.conformance
@pytest.mark.timeout(DEADLINE + 20)
def test_equal_ranks_are_not_named(tmp_path: Path) -> None:
    done = launch(tmp_path, SCRIPT, 2, "--trace", "trace.json", "--", "0", "-1")
    assert done.returncode == 0, done.stderr
    assert "paceline: no rank was slower than the others\n" in done.stderr
    assert "was slower than the others in" not in done.stderr
    for events in spans_of(tmp_path / "trace.json").values():
        assert_spans_lie_well(events)


@pytest.mark.full
@pytest.mark.timeout(DEADLINE + 20)
@pytest.mark.parametrize("killed", [1, 0])
def test_a_rank_that_is_killed(tmp_path: Path, killed: int) -> None:
    """What all ranks had recorded until then is in the file, that of the killed one too. Of rank 0, who joins the
    others' otherwise, the launcher takes the place."""
    done = launch(tmp_path, SCRIPT, 2, "--trace", "trace.json", "--", "0", str(killed))
    assert done.returncode != 0
    assert f"rank {killed} was killed" in done.stderr, done.stderr
    assert "paceline: trace of 2 ranks, " in done.stderr, done.stderr
    spans = spans_of(tmp_path / "trace.json")
    assert set(spans) == {0, 1}
    for events in spans.values():
        assert len([event for event in events if event["name"] == "backward"]) >= 15
        assert {event["args"]["epoch"] for event in events if event["args"]} == {0, 1}


@pytest.mark.full
@pytest.mark.timeout(DEADLINE + 20)
@pytest.mark.parametrize(
    ("kind", "told"),
    [("file in the way", "trace='here/trace.json': "), ("directory", "trace='here' is not the path of a regular file")],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, kind: str, told: str) -> None:
    (tmp_path / "here").touch() if kind == "file in the way" else (tmp_path / "here").mkdir()
    file = "here/trace.json" if kind == "file in the way" else "here"
    done = launch(tmp_path, SCRIPT, 1, "--trace", file, "--", "0", "-1")
    assert done.returncode != 0
    assert told in done.stderr
    assert "--trace trace.json" in done.stderr
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.conformance
@pytest.mark.timeout(DEADLINE + 20)
def test_a_script_of_plain_pytorch_with_loader_workers(tmp_path: Path) -> None:
    done = launch(tmp_path, PLAIN, 2)
    assert done.returncode == 0, done.stderr
    assert "done\n" in done.stdout
    spans = spans_of(tmp_path / "out" / "trace.json")
    assert set(spans) == {0, 1}
    for events in spans.values():
        assert_spans_lie_well(events)
        names = [event["name"] for event in events]
        assert names.count("step") == 16
        assert {"data", "forward", "backward", "communication", "update"} <= set(names)
    assert {event["args"]["epoch"] for event in spans[0] if event["args"]} == {0, 1}


STRATEGIES = {
    "single": 1,
    "data_parallel:devices=cpu,cpu": 1,
    "ddp:reducer=native": 2,
    "fsdp": 2,
    "shared": 2,
    "local_sgd": 2,
    "pipeline": 2,
    "parameter_server": 3,
    "parameter_server:mode=async": 3,
}


@pytest.mark.timeout(DEADLINE + 20)
@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[pytest.mark.full] * (number % 2 == 0)) for number, name in enumerate(STRATEGIES)],
)
def test_every_kind_of_strategy(tmp_path: Path, strategy: str) -> None:
    nproc = STRATEGIES[strategy]
    done = launch(tmp_path, SCRIPT, nproc, "--strategy", strategy, "--trace", "trace.json", "--", "0", "-1")
    assert done.returncode == 0, done.stderr
    ranks = nproc - ("parameter_server" in strategy)
    assert f"paceline: trace of {ranks} rank" in done.stderr, done.stderr
    spans = spans_of(tmp_path / "trace.json")
    assert len(spans) >= ranks
    for rank in range(ranks):
        assert_spans_lie_well(spans[rank])
        names = {event["name"] for event in spans[rank]}
        assert {"step", "data", "update"} <= names
        assert {"forward", "backward"} <= names or "forward and backward" in names


@pytest.mark.full
def test_ranks_that_do_not_all_trace(tmp_path: Path) -> None:
    """An error on all ranks, in place of a file without some."""
    script = "import os, paceline\npaceline.start(trace='t.json' if os.environ['RANK'] == '1' else None)\n"
    done = launch(tmp_path, script, 2)
    assert done.returncode != 0
    assert "trace is set: False on rank 0, True on rank 1" in done.stderr
