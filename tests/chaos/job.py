"""The job whose processes `make chaos` kills: job.py STRATEGY [REPRODUCIBLE] [background | unsaved], from the latest
checkpoint in `checkpoints`. background: it saves in the background, after every step, so that a kill is likely to meet
a write. unsaved: it writes no checkpoint, and leaves that to the launcher (--memory-every).

Its checkpoints hold which examples the model has been trained on, so that a step that is lost or made twice is seen.
The last line that it prints has the hashes of this ledger and of the weights, which it writes into weights.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import paceline

EXAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 96, 8, 5, 5
STEPS = EXAMPLES // GLOBAL_BATCH * EPOCHS
STEP_SECONDS = 0.02  # a sleep, so that most of a run is training


class Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor, int]]):
    """(x, y, the example's number)."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.y = (torch.randn(EXAMPLES, size, generator=draw, dtype=torch.float64) for size in (8, 1))

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


class Ledger:
    """The numbers of the examples of each step, in the order of the steps. A checkpoint holds it."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = [list(step) for step in state["steps"]]


def note_start(rank: int, step: int) -> None:
    """Write down how many steps a rank had made, and how many of them this start has."""
    if rank == 0:
        made = [int(path.read_text() or 0) for path in Path().glob("made-*")]
        with open("starts", "a") as file:
            file.write(f"{max(made, default=0)} {step}\n")


def main() -> None:
    reproducible = next((int(word) for word in sys.argv[2:] if word.isdigit()), None)
    background, unsaved = ("background" in sys.argv[2:]), ("unsaved" in sys.argv[2:])
    run = paceline.start(
        seed=5, strategy=sys.argv[1], device="cpu", progress="off", noise="example", reproducible=reproducible
    )
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(32, 1)).double()
    model, optimizer = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    loader = run.loader(Numbered(), global_batch=GLOBAL_BATCH, shuffle=True)
    ledger = Ledger()
    run.track(ledger=ledger)
    run.restore("checkpoints", missing_ok=True)
    note_start(run.rank, run.steps)
    batch: list[int] = []
    for _ in run.epochs(EPOCHS):
        for x, y, numbers in loader:
            run.backward(nn.functional.mse_loss(model(x), y))
            stepped = run.step(optimizer)
            if stepped:
                Path(f"made-{run.rank}").write_text(str(run.steps))
            batch += run.gather(numbers).tolist()
            if stepped:  # with `reproducible` a global batch may come in several parts
                ledger.steps.append(sorted(batch))
                batch = []
                if run.rank == 0:
                    Path("began").touch()
                if background or (run.steps % SAVE_EVERY == 0 and not unsaved):
                    run.save("checkpoints", keep=2, background=background)
                time.sleep(STEP_SECONDS)
    run.export("weights.safetensors")
    if run.main:
        from safetensors.torch import load_file

        weights = b"".join(value.numpy().tobytes() for _, value in sorted(load_file("weights.safetensors").items()))
        told = {
            "ledger": hashlib.sha256(json.dumps(ledger.steps).encode()).hexdigest()[:16],
            "steps": len(ledger.steps),
            "weights": hashlib.sha256(weights).hexdigest()[:16],
        }
        print("ends", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
