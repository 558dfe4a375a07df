"""A script of a user's that one of its processes does not survive: killed_script.py STEP.

At its first start the process kills itself before the update after STEP steps; -1: it does not. The last line that it
prints has the step from which it went on, and a hash of the weights.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


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
                os.kill(os.getpid(), signal.SIGKILL)
            run.backward(F.cross_entropy(model(batch[0]), batch[1]))
            run.step(optimizer)
    weights = b"".join(value.detach().cpu().numpy().tobytes() for value in model.parameters())
    run.print("ends", began, hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
