"""What one sees of a run on several processes that is never closed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, torch, paceline
from torch.utils.data import TensorDataset
run = paceline.start(log_dir=sys.argv[1], log_every=4)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.prepare(model, optimizer)
for number, batch in enumerate(run.loader(TensorDataset(torch.ones(24, 1)), global_batch=4)):
    run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
    run.step(optimizer)
    run.log(x=number)
    if sys.argv[2] == "raise" and number == 5 and run.main:
        raise ValueError("boom")
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("how", "written"),
    [("end", [(4, 1.5), (6, 4.5)]), pytest.param("raise", [(4, 1.5)], marks=pytest.mark.conformance)],
)
def test_a_script_that_never_closes_its_run(tmp_path: Path, how: str, written: list[tuple[int, float]]) -> None:
    """Nothing that was told is lost, and a rank that fails waits for nobody."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", str(script), str(tmp_path), how]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environ)
    assert (done.returncode == 0) == (how == "end"), done.stderr
    assert ("ValueError: boom" in done.stderr) == (how == "raise")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["x"]) for line in lines] == written
