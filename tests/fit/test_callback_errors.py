"""A callback that raises on one process: the others do not wait for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Bad(paceline.Callback):
    def fail(self, fit):
        if fit.run.rank == 1:
            raise ValueError("the callback's own error")


setattr(Bad, sys.argv[1], Bad.fail)
torch.manual_seed(0)
model = nn.Linear(4, 2)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
paceline.fit(
    model, lambda m, b: (m(b[0]) - b[1]).square().mean(), data, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    global_batch=16, epochs=2, evaluate_on=data, val_check_interval=1, checkpoints=sys.argv[2], callbacks=[Bad()],
)
print("it ended")
"""


@pytest.mark.conformance
@pytest.mark.timeout(240)
@pytest.mark.parametrize("event", ["on_step", "on_evaluate"])
def test_all_processes_end_with_its_error(event: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc", "2", "train.py", event, "checkpoints"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode != 0
    assert "ValueError: the callback's own error" in done.stderr
    assert "rank 1" in done.stderr
    assert "it ended" not in done.stdout
