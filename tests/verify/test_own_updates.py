"""`paceline verify` on scripts whose updates no optimizer of Paceline's makes from one gradient: by hand, LBFGS, and a
batch that is fetched ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.prepared import Prepared

from paceline.verify.answer import DIFFERENT, SAME, UNKNOWN, Answer
from paceline.verify.decision import decide

JOB = """
import torch
from torch import nn
from torch.nn import functional as F

import paceline

run = paceline.start(device="cpu", seed=3)
g = torch.Generator().manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(45, 6, generator=g), torch.randn(45, 1, generator=g))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
lr = {lr}
{loop}
"""
BY_HAND = """
model = run.prepare(model)
for x, y in run.loader(data, global_batch=9, shuffle=True{more}):
    run.backward(F.mse_loss(model(x), y))
    if run.latest.current.final:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
                p.grad = None
"""
LBFGS = """
model, optimizer = run.prepare(model, torch.optim.LBFGS(model.parameters(), lr=lr, max_iter=4))
for x, y in run.loader(data, global_batch=9, shuffle=True):
    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        run.backward(loss)
        return loss
    run.step(optimizer, closure)
"""
AHEAD = """
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
batches = iter(run.loader(data, global_batch=9, shuffle=True))
x, y = next(batches)
for _ in range(4):
    loss = F.mse_loss(model(x), y)
    x, y = next(batches)
    run.backward(loss)
    run.step(optimizer)
"""
CASES = {
    "by hand": (BY_HAND.format(more=""), "0.1", SAME),
    "by hand/lr": (BY_HAND.format(more=""), "0.1 * run.world_size", DIFFERENT),
    "by hand/micro-batches": (BY_HAND.format(more=", micro_batch=3"), "0.1", SAME),
    "lbfgs": (LBFGS, "0.5", SAME),
    "lbfgs/lr": (LBFGS, "0.5 / run.world_size", DIFFERENT),
    "ahead": (AHEAD, "0.1", UNKNOWN),
}
QUICK = ("by hand/lr", "ahead")


def asked(folder: Path, loop: str, lr: str, steps: int = 3) -> Answer:
    path = folder / "train.py"
    path.write_text(JOB.format(loop=loop, lr=lr))
    return decide(Prepared(folder, (), 2, None, "fp32", steps, path))


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES],
)
def test_the_steps_are_compared_or_it_is_said_why_not(name: str, tmp_path: Path) -> None:
    loop, lr, code = CASES[name]
    answer = asked(tmp_path, loop, lr)
    assert answer.code == code, answer.text
    if code == DIFFERENT:
        assert answer.quantity in ("weights", "learning rate"), answer.text
    if code == SAME:
        assert answer.steps == 3
        assert answer.tolerance is not None
    if code == UNKNOWN:
        assert "fetches its next batch before" in answer.text
