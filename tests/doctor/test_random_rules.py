"""Random numbers that ranks share by mistake, on written records; and what the recorder takes for such a draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.rules import random_rules
from paceline.doctor.rules.recorded_run import Event, RecordedRun

SEED, DRAW, LOADER = ["train.py", 3], ["no such file", 20], ["train.py", 9]


def rank(
    number: int, draws: list[int] | None = None, masked: list[int] | None = None, data: int | None = None,
    seeded: bool = False, own: list[int] | None = None, states: list[int] | None = None,
) -> list[Event]:  # fmt: skip
    """The events of one rank: for each batch what it drew, or the generator's state before its forward.

    data: which rows it reads; seeded: is torch's generator seeded before each draw? own: seeds of a generator of the
    script's; states: of the workers, in two passes.
    """
    events: list[Event] = [
        {"k": "group", "op": "init_process_group", "world": 2, "at": []},
        {"k": "ddp", "ddp": 0, "ranks": [0, 1], "at": []},
        {"k": "seed", "generator": "torch's", "value": 5, "at": SEED},
        {"k": "loader", "loader": "l", "workers": 2, "iterable": False, "at": LOADER},
    ]
    length = len(draws or masked or [0] * 8)
    for batch in range(length):
        if batch % (length // 2 or 1) == 0:
            events.append({"k": "pass", "loader": "l", "n": batch + 1, "at": LOADER})
            n = batch + 1
        row = batch + 100 * (number if data is None else data)
        events.append({"k": "yield", "loader": "l", "n": n, "idx": [row], "rows": [[row]], "grad": True, "at": []})
        taken = [[DRAW, draws[batch], 32, own[batch] if own else None]] if draws else []
        events += [{"k": "seed", "generator": "torch's", "value": batch, "at": SEED}] if seeded else []
        events.append({"k": "backward", "at": DRAW, "draws": taken, "masked": masked[batch] if masked else None})
    for place, state in enumerate(states or []):
        begun = {"torch's": state}
        events.append({"k": "worker", "n": 1 + place * (length // 2), "worker": 0, "begun": begun})
    return events


def found(*ranks: list[Event]) -> list[tuple[str, str]]:
    return [(f.cause, f.at) for f in random_rules.findings(RecordedRun(ranks))]


MANY = list(range(50, 58))


def test_noise_that_is_the_same_on_ranks_with_other_data() -> None:
    assert found(rank(0, MANY), rank(1, MANY)) == [("same_noise", "train.py:3")]
    assert found(rank(0, MANY), rank(1, [d + 1 for d in MANY])) == []
    assert found(rank(0, MANY), rank(1, MANY, data=0)) == []  # they read the same: another finding
    assert found(rank(0, MANY[:3]), rank(1, MANY[:3])) == []
    assert found(rank(0, [50] * 8), rank(1, [50] * 8)) == []  # a constant


def test_noise_that_is_shared_on_purpose() -> None:
    assert found(rank(0, MANY, seeded=True), rank(1, MANY, seeded=True)) == []
    steps = list(range(8))  # a generator of its own, seeded for each step
    assert found(rank(0, MANY, own=steps), rank(1, MANY, own=steps)) == []
    once = [3] * 8
    assert [cause for cause, _ in found(rank(0, MANY, own=once), rank(1, MANY, own=once))] == ["same_noise"]


def test_masks_are_a_note() -> None:
    assert found(rank(0, masked=MANY), rank(1, masked=MANY)) == [("same_masks", "train.py:3")]
    assert found(rank(0, masked=MANY), rank(1, masked=[m + 1 for m in MANY])) == []


def test_workers_that_begin_alike() -> None:
    assert found(rank(0, states=[7, 8]), rank(1, states=[7, 8])) == [("same_augmentations", "train.py:3")]
    assert found(rank(0, states=[7, 8]), rank(1, states=[17, 18])) == []
    assert found(rank(0, states=[7, 8]), rank(1, states=[7, 18])) == []
    stream: Any = [{**e, "iterable": True} if e["k"] == "loader" else e for e in rank(0, states=[7, 8])]
    assert found(stream, rank(1, states=[7, 8])) == []  # their order may be shuffled alike


DRAWS = """
import sys, tempfile
import torch
from torch import nn
from paceline.doctor.recorders import install

log = install({"directory": tempfile.mkdtemp(), "steps": None}, "script", __file__)

class Noisy(nn.Linear):
    def forward(self, x):
        return x @ (self.weight + torch.randn(8, 8)).T + torch.randn(8)

class Drop(nn.Module):
    def forward(self, x):
        return x * x.new_empty((len(x), 1)).bernoulli_(0.5)

@torch.jit.script
def scripted(x):
    return x + torch.rand(x.shape[0]) + torch.randn_like(x)

x = torch.ones(8, 8)
def taken(function):
    log.shared.draws.clear()
    function()
    return len(log.shared.draws.take(8)["draws"])

print([taken(f) for f in (
    lambda: torch.randn_like(x),
    lambda: torch.randint(0, 9, (8,)),
    lambda: torch.empty(8, 3).uniform_(),
    lambda: torch.distributions.Normal(x, x).rsample(),
    lambda: torch.randn(5, 8),
    lambda: torch.randperm(8),
    lambda: torch.rand(()),
    lambda: Noisy(8, 8)(x),
    lambda: Drop()(x),
    lambda: nn.functional.dropout(x, 0.5),
)])
with torch.device("meta"):
    print(torch.randn(3).device, scripted(torch.ones(3, device="cpu")).shape)
compiled = torch.compile(lambda x: x + torch.randn_like(x), backend="aot_eager")
torch.manual_seed(0)
first = compiled(x)
torch.manual_seed(0)
print(bool((first == x + torch.randn_like(x)).all()))
"""


@pytest.mark.conformance
def test_which_draws_count_and_that_torch_works_as_before(tmp_path: Path) -> None:
    """In a process of its own, since the recorders replace functions of torch."""
    (tmp_path / "script.py").write_text(DRAWS)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1, 1, 1, 1, 0, 0, 0, 0, 0, 0]", "meta torch.Size([3])", "True"]
