"""A script that paceline's launcher runs under parameter_server: server_script.py FOLDER WHERE VICTIM JOB [WHAT].

Each worker leaves its weights and what it has seen in FOLDER. The victim kills itself with SIGKILL at the place that
WHERE names; a server is killed by a worker. WHAT: "back" (the others wait for the victim to join them), "refused" (a
script that it cannot join), "late" (it never gets so far), "saved" (it saves and restores).
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

JOINS = bool(os.environ.get("PACELINE_TICKET"))  # the victim, started again
COMES_BACK = WHAT in ("back", "refused")
waited: list[None] = []


def die(run: paceline.Run, where: str) -> None:
    if not JOINS and where == WHERE and str(run.world.rank) == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)


def knock() -> None:
    """Where the victim comes back to."""
    if JOINS:
        (Path(FOLDER) / "knocks").touch()


def wait_for_it() -> None:
    """Until the victim stands before the door, with time for its word to be heard."""
    deadline = time.monotonic() + 60
    while not (Path(FOLDER) / "knocks").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)


def note(run: paceline.Run, epoch: int, loader: paceline.Loader) -> None:
    """Which examples an update is of."""
    with open(Path(FOLDER) / f"{run.world.rank}.seen", "a") as file:
        file.write(json.dumps([epoch, loader.step, loader.indices]) + "\n")


class Count:
    """Something that a run tracks."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def net(run: paceline.Run) -> dict[str, list[float]]:
    """In step, with batch norm: what the survivors end with is the model of plain PyTorch."""
    servers = [] if JOINS else run.gather(os.getpid())
    torch.manual_seed(0)
    model = checks.Net(norm=True).double()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    schedule = run.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    count = Count()
    run.track(count=count)
    loader = run.loader(data(), global_batch=BATCH)
    if WHAT == "saved":
        run.restore(Path(FOLDER) / "saved", missing_ok=True)
    knock()
    for epoch in run.epochs(EPOCHS):
        if WHAT == "refused":
            run.sum(1)
        for batch in loader:
            if COMES_BACK and not JOINS and epoch == 1 and loader.step == 3 and not waited:
                waited.append(wait_for_it())
            here = epoch == 1 and loader.step == 2
            if here:
                die(run, "forward")
            loss = checks.both_heads(model, batch)
            if here and str(run.world.rank) == VICTIM and WHERE == "backward":  # in the middle of it
                loss.register_hook(lambda _: die(run, "backward"))
            run.backward(loss)
            run.log(halved=loss.detach() / 2)
            if here and WHERE == "server" and run.main and not (Path(FOLDER) / "killed").exists():
                (Path(FOLDER) / "killed").touch()
                os.kill(servers[int(VICTIM)], signal.SIGKILL)
            if here:
                die(run, "step")
            if run.step(optimizer):
                note(run, epoch, loader)
                count.value += 1
            if here:
                die(run, "after")
        seen = 0
        for x, *_ in run.loader(data(), global_batch=BATCH, train=False):
            seen += len(x)
            if epoch == 1:
                die(run, "evaluation")
        assert run.sum(seen) == len(data())
        if WHAT == "saved":
            run.save(Path(FOLDER) / "saved")
    counted = {"counts": [count.value, run.steps, schedule.last_epoch]}
    return {name: value.double().flatten().tolist() for name, value in model.state_dict().items()} | counted


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
    last = 0 if COMES_BACK else 1  # the epoch in which the victim dies
    knock()
    for epoch in run.epochs(LINEAR_EPOCHS):
        if COMES_BACK and not JOINS and epoch == 1:
            wait_for_it()
        for (x,) in loader:
            slow = WHERE == "slow" and run.world.rank == 1
            time.sleep(0.04 if slow else 0.01)
            run.backward(model(x).sum() / len(x))
            if epoch == last and parts >= 4:
                die(run, "step")
            run.step(optimizer)
            parts += 1
            if epoch == last and parts >= 4:
                die(run, "after")
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
    if JOINS and WHAT == "late":
        time.sleep(600)
    logs = JOB == "digits" or COMES_BACK
    run = paceline.start(
        progress="off", log_dir=str(folder / "log") if logs else None, log_every=3 if COMES_BACK else None
    )
    found = {"net": net, "linear": linear, "digits": digits}[JOB](run)
    (folder / f"{run.world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
