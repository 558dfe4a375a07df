"""A user's script with a process that dies: killed_script.py STEP.

At its first start the process kills itself before the update after STEP steps, when the last in-memory checkpoint is
complete (-1: never). The last line of its output has the step that it resumed from, and a hash of the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def wait_until_kept(steps: int) -> None:
    """Wait until the thread has written the last in-memory checkpoint."""
    step = steps - steps % int(os.environ["PACELINE_MEMORY_EVERY"])
    began = time.monotonic()
    while not any(Path(os.environ["PACELINE_MEMORY"]).glob(f"run-*/step-{step:08d}")):
        if time.monotonic() - began > 60.0:
            sys.exit(f"the checkpoint of step {step} was not written within 60 s")
        time.sleep(0.01)


def main() -> None:
    run = paceline.start(seed=3, tf32=False, deterministic=True, progress="off")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    g = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(200, 12, generator=g), torch.randint(10, (200,), generator=g))
    loader = run.loader(data, global_batch=20, shuffle=True)
    run.restore("checkpoints", missing_ok=True)
    began = run.steps
    for _ in run.epochs(2):
        for batch in loader:
            if (os.environ["TORCHELASTIC_RESTART_COUNT"], run.steps) == ("0", int(sys.argv[1])):
                wait_until_kept(run.steps)
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(F.cross_entropy(model(batch[0]), batch[1]))
            run.step(optimizer)
    weights = b"".join(value.detach().cpu().numpy().tobytes() for value in model.parameters())
    run.print("ends", began, hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
