"""`paceline verify` on losses of several terms, each a mean over other things, of which shards have unequally many."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.verify.prepared import Prepared

from paceline.monitor.window import Window
from paceline.step.loss import local_loss, term_losses
from paceline.strategies.base import Term
from paceline.verify.answer import DIFFERENT, SAME, Answer
from paceline.verify.decision import decide

JOB = """
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
QUICK = ("total and mean",)


def asked(folder: Path, returned: str, step: str, loader: str, steps: int = 3) -> Answer:
    path = folder / "train.py"
    path.write_text(JOB.format(returned=returned, step=step, loader=loader))
    return decide(Prepared(folder, (), 2, None, "fp32", steps, path))


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in HEALTHY])
def test_terms_over_different_things_are_the_same_model(name: str, tmp_path: Path) -> None:
    answer = asked(tmp_path, *HEALTHY[name])
    assert (answer.code, answer.cause) == (SAME, None), answer.text


@pytest.mark.full
def test_a_mean_over_a_shards_own_things_beside_a_total_is_still_found(tmp_path: Path) -> None:
    answer = asked(tmp_path, "paceline.Total(total, count), mean + total / count.clamp(min=1)", CLOSURE, LOADER)
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
