"""`paceline verify` on losses of several terms, each a mean over other things, of which shards have unequally many; and
on updates that no optimizer of Paceline's makes from one gradient: by hand, LBFGS, a batch that is fetched ahead.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.verify.prepared import answer_of

from paceline.monitor.window import Window
from paceline.step.loss import local_loss, term_losses
from paceline.strategies.base import Term
from paceline.verify.answer import DIFFERENT, SAME, UNKNOWN

TERMS = """
import torch
from torch import nn
from torch.nn import functional as F

import paceline

run = paceline.start(device="cpu", seed=3)
g = torch.Generator().manual_seed(0)
x, y = torch.randn(40, 6, generator=g), torch.randn(40, 3, generator=g)
mask = torch.rand(40, 3, generator=g) < torch.rand(40, 1, generator=g)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = run.prepare(model, optimizer)


def terms(model, batch):
    x, y, mask = batch
    out = model(x)
    each = (out - y).abs() * mask
    return each.sum(), mask.sum(), F.mse_loss(out, y) if len(x) else out.sum() * 0


def loss_fn(model, batch):
    total, count, mean = terms(model, batch)
    return {returned}


loader = run.loader(torch.utils.data.TensorDataset(x, y, mask), {loader}, shuffle=True)
for batch in loader:
    {step}
    run.step(optimizer, max_grad_norm=0.1)
"""
CLOSURE = "run.forward_backward(loss_fn, model, batch)"
LOOP = "total, count, mean = terms(model, batch)\n    run.backward("
LOADER = "global_batch=9"
HEALTHY = {
    "total and mean": ("paceline.Total(5 * total, count), mean", CLOSURE, LOADER),
    "mean and total": ("mean, paceline.Total(total, count)", CLOSURE, LOADER),
    "totals of micro-batches": ("paceline.Total(5 * total, count), mean", CLOSURE, "global_batch=9, micro_batch=2"),
    "sum and total": ("paceline.Total(0.1 * total), paceline.Total(total, count)", CLOSURE, LOADER),
    "sum": ("paceline.Total(total)", CLOSURE, LOADER),
    "sum/loop": ("0", f"{LOOP}total=total)", LOADER),
    "two backwards": ("0", f"{LOOP}total=5 * total, count=count, retain_graph=True)\n    run.backward(mean)", LOADER),
    "mean with count": ("0", f"{LOOP}total / count.clamp(min=1), count=count)", LOADER),
}


@pytest.mark.full
@pytest.mark.parametrize("name", HEALTHY)
def test_terms_over_different_things_are_the_same_model(name: str, tmp_path: Path) -> None:
    returned, step, loader = HEALTHY[name]
    answer = answer_of(tmp_path, TERMS.format(returned=returned, step=step, loader=loader))
    assert (answer.code, answer.cause) == (SAME, None), answer.text


@pytest.mark.full
def test_a_mean_over_a_shards_own_things_beside_a_total_is_still_found(tmp_path: Path) -> None:
    mean = "paceline.Total(total, count), mean + total / count.clamp(min=1)"
    answer = answer_of(tmp_path, TERMS.format(returned=mean, step=CLOSURE, loader=LOADER))
    assert answer.code == DIFFERENT, answer.text


def test_recorded_terms_of_the_shards_make_those_of_the_whole_batch() -> None:
    """Sum of (sum of sums) / (sum of counts), where boxes and examples lie unequally in the shards."""
    sums, boxes, means, examples = (6.0, 1.0), (1, 4), (2.0, 5.0), (3, 1)
    window = Window(torch.device("cpu"))
    for total, count, mean, n in zip(sums, boxes, means, examples, strict=True):
        request = SimpleNamespace(parts=[SimpleNamespace(indices=range(n))], examples=n)
        terms = [[Term(torch.tensor(total), count), Term(torch.tensor(mean), None)]]
        loss = local_loss(terms, [n])
        assert float(loss) == total / count + mean
        found = term_losses(loss, terms, [n], False)
        window.add_losses([(0, value, each, request, False, value._version, i) for i, value, each in found])  # type: ignore[misc]
    pairs = window.totals()
    assert sum(top / weight for top, weight in pairs.values()) == pytest.approx(7 / 5 + 11 / 4)
    assert list(pairs.values()) == [(7.0, 5.0), (11.0, 4.0)]


UPDATES = """
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


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_the_steps_are_compared_or_it_is_said_why_not(name: str, tmp_path: Path) -> None:
    loop, lr, code = CASES[name]
    answer = answer_of(tmp_path, UPDATES.format(loop=loop, lr=lr))
    assert answer.code == code, answer.text
    if code == DIFFERENT:
        assert answer.quantity in ("weights", "learning rate"), answer.text
    if code == SAME:
        assert answer.steps == 3
        assert answer.tolerance is not None
    if code == UNKNOWN:
        assert "fetches its next batch before" in answer.text
