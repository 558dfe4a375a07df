"""A pass over a loader that the script leaves open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline

run = paceline.start(progress="off", device="cpu")
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
batches = iter(run.loader(TensorDataset(torch.ones(64, 2)), global_batch=4, num_workers=WORKERS))
for _ in range(3):
    (x,) = next(batches)
    run.backward(model(x).mean())
    run.step(optimizer)
print("steps", run.steps)
"""


@pytest.mark.conformance
def test_an_iterator_that_is_never_read_to_its_end_says_nothing_when_the_script_ends(tmp_path: Path) -> None:
    for workers in ("0", "1"):
        (tmp_path / "script.py").write_text(SCRIPT.replace("WORKERS", workers))
        done = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "steps 3\n", "")
