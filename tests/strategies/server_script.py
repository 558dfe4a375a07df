"""A script that paceline's launcher runs under parameter_server: server_script.py FOLDER WHERE VICTIM JOB [WHAT].

Each worker leaves its weights in FOLDER. The victim is killed with SIGKILL once, where WHERE is: a worker at that place
of its own loop, a server by rank 0. WHAT: "saved" (the script saves and restores).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from tests.strategies import checks
from tests.strategies.checks import BATCH, EPOCHS, data
from torch import nn

import paceline

FOLDER, WHERE, VICTIM, JOB, WHAT = (sys.argv[1:] + [""] * 5)[:5]
LINEAR_EPOCHS, LINEAR_N, LINEAR_BATCH, RATE = 2, 46, 4, 0.125


def kill(pid: int) -> None:
    killed = Path(FOLDER) / "killed"
    if not killed.exists():
        killed.touch()
        os.kill(pid, signal.SIGKILL)


def die(run: paceline.Run, where: str) -> None:
    if where == WHERE and str(run.world.rank) == VICTIM:
        kill(os.getpid())


def net(run: paceline.Run) -> dict[str, list[float]]:
    """In step, with batch norm: the model of plain PyTorch."""
    pids = run.gather(os.getpid())
    torch.manual_seed(0)
    model = checks.Net(norm=True).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    loader = run.loader(data(), global_batch=BATCH)
    if WHAT == "saved":
        run.restore(Path(FOLDER) / "saved", missing_ok=True)
    for epoch in run.epochs(EPOCHS):
        for batch in loader:
            here = epoch == 1 and loader.step == 2
            run.backward(checks.both_heads(model, batch))
            if here and WHERE == "server" and run.main:
                kill(pids[int(VICTIM)])
            if here:
                die(run, "step")
            run.step(optimizer)
        seen = 0
        for x, *_ in run.loader(data(), global_batch=BATCH, train=False):
            seen += len(x)
            if epoch == 1:
                die(run, "evaluation")
        assert run.sum(seen) == len(data())
        if WHAT == "saved":
            run.save(Path(FOLDER) / "saved")
    return {name: value.double().flatten().tolist() for name, value in model.state_dict().items()}


def linear(run: paceline.Run) -> dict[str, list[float]]:
    """Not in step, with gradients that do not depend on the weights: the weights tell exactly how often each example
    was used, in whatever order."""
    model = nn.Linear(LINEAR_N, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, schedule = run.prepare(model, optimizer, schedule)
    eye = torch.utils.data.TensorDataset(torch.eye(LINEAR_N, dtype=torch.float64))
    loader = run.loader(eye, global_batch=LINEAR_BATCH, shuffle=True)
    parts = 0
    for epoch in run.epochs(LINEAR_EPOCHS):
        for (x,) in loader:
            slow = WHERE == "slow" and run.world.rank == 1
            time.sleep(0.04 if slow else 0.01)
            run.backward(model(x).sum() / len(x))
            if epoch == 1:
                die(run, "step")
            run.step(optimizer)
            parts += 1
    return {
        "weight": model.weight.flatten().tolist(),
        "parts": [parts],
        "steps": [run.steps, schedule.last_epoch],
        "members": run.gather([float(run.world.rank)]),
    }


def digits(run: paceline.Run) -> dict[str, list[float]]:
    from sklearn.datasets import load_digits

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    images = (images / 16).float()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5))
    one = run.loader(torch.utils.data.TensorDataset(images[:1], labels[:1]), global_batch=1, name="one")
    for x, y in one:  # of this pass one worker has no part
        run.backward(0 * F.cross_entropy(model(x), y))
        run.log(halved=0.0)
        run.step(optimizer)
    assert run.gather([run.world.rank]) == [0, 1]
    loader = run.loader(torch.utils.data.TensorDataset(images[:1500], labels[:1500]), global_batch=50, shuffle=True)
    for _ in run.epochs(14):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            run.log(halved=loss.detach() / 2)
            run.step(optimizer)
    guessed = run.predict(model, images[1500:], global_batch=100, fn=lambda m, x: m(x).argmax(1))
    return {"accuracy": [float((guessed == labels[1500:]).double().mean())]}


def main() -> None:
    folder = Path(FOLDER)
    run = paceline.start(progress="off", log_dir=str(folder / "log") if JOB == "digits" else None)
    found = {"net": net, "linear": linear, "digits": digits}[JOB](run)
    (folder / f"{run.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
