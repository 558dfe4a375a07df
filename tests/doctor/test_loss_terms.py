"""The terms of a loss, read from real graphs, and what is judged of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.doctor.recorders.loss_graph import Term, loss_terms
from paceline.doctor.rules import loss_rules
from paceline.doctor.rules.loss_rules import fractions_line, term_line
from paceline.doctor.rules.recorded_run import Event, RecordedRun

EXPERTS = 4


def sums(scale: float, count: float) -> torch.Tensor:
    """A cross-entropy of 6 targets, of which 2 are ignored."""
    logits = torch.randn(6, 3, requires_grad=True)
    targets = torch.tensor([0, 1, 2, 0, -100, -100])
    return F.cross_entropy(logits, targets, reduction="sum") * scale / count


def balance(tokens: int = 24, layers: int = 1, fractions: torch.Tensor | None = None) -> torch.Tensor:
    """The load balancing of one layer or several, as the Switch Transformer has it."""
    gate = nn.Linear(5, EXPERTS, bias=False)
    found = []
    for _ in range(layers):
        probabilities = gate(torch.randn(2, tokens // 2, 5)).softmax(-1).reshape(-1, EXPERTS)
        own = F.one_hot(probabilities.argmax(-1), EXPERTS).float().mean(0)
        found.append(EXPERTS * ((own if fractions is None else fractions) * probabilities.mean(0)).sum())
    return torch.stack(found).mean() if layers > 1 else found[0]


def test_each_term_has_its_count_and_its_factors() -> None:
    chosen = torch.randn(7, requires_grad=True)[torch.tensor([True, False] * 3 + [True])]
    loss = (sums(2.0, 9.0) + 0.5 * F.mse_loss(chosen, torch.zeros(4)) + 0.01 * balance()) * 3
    first, second, third = loss_terms(loss)
    assert (first["kind"], first["count"], first["own"], first["outer"]) == ("sum", 9.0, 4.0, [3.0])
    assert (second["kind"], second["count"], second["factor"]) == ("mean", 4.0, 1.5)
    assert third["kind"] == "weighed"
    assert third["weights"][1:] == [pytest.approx(1.0), EXPERTS]


@pytest.mark.parametrize("layers", [1, 3])
def test_fractions_weigh_means_over_the_outputs_of_a_layer(layers: int) -> None:
    kinds = [term["kind"] for term in loss_terms(sums(1.0, 4.0) + 0.01 * balance(layers=layers))]
    assert kinds == ["sum", *["weighed"] * layers]


def test_weights_of_examples_are_no_fractions() -> None:
    """A mean over time of a sequence-first loss, then a weighted sum over the examples."""
    steps = nn.Linear(3, 1)(torch.randn(8, EXPERTS, 3)).squeeze(-1)
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert [t["kind"] for t in loss_terms((steps.mean(0) * weights).sum() + sums(1.0, 4.0))] == ["sum", "sum"]


def term(kind: str = "sum", count: float | None = None, factor: float = 1.0, **more: Any) -> Term:
    plain = {"own": None, "inner": [], "divided": [], "outer": [], "weights": None}
    return {"kind": kind, "count": count, "factor": factor, **plain, **more}


def causes(*ranks: list[Term], passes: int = 6) -> list[str]:
    """What is found where each rank's loss has these terms in every backward pass. (The path names no file.)"""
    per_rank: list[list[Event]] = []
    for terms in ranks:
        backward = {"k": "backward", "at": ["no such file", 7], "mean": "other", "form": "other", "terms": terms}
        begin = {"k": "ddp", "ddp": 0, "ranks": list(range(len(ranks))), "at": []}
        per_rank.append([begin, *(dict(backward) for _ in range(passes))])
    return [finding.cause for finding in loss_rules.findings(RecordedRun(per_rank))]


FIRST = term(count=20.0, factor=2.0, own=9.0)


def test_a_later_term_divided_by_a_ranks_own_count() -> None:
    unequal = [[FIRST, term("mean", count)] for count in (12.0, 8.0)]
    assert causes(*unequal) == ["loss_mean_of_means"]
    assert causes(*unequal, passes=2) == []
    assert causes([FIRST, term("mean", 10.0)], [FIRST, term("mean", 10.0)]) == []
    weighed = [[FIRST, term("mean", count, factor=count / 20)] for count in (12.0, 8.0)]  # its share of all
    assert causes(*weighed) == []


def test_a_mean_times_the_processes() -> None:
    first = term(count=20.0, own=9.0, outer=[2.0], factor=2.0)
    aux = term("mean", inner=[0.5], outer=[2.0])
    assert causes([first, aux], [first, aux]) == ["term_times_processes"]
    divided = term("mean", inner=[0.5], divided=[2.0], outer=[2.0])
    assert causes([first, divided], [first, divided]) == []
    apart = term("mean", inner=[0.5])
    assert causes([first, apart], [first, apart]) == []  # the first alone is multiplied
    own = term(
        count=9.0, own=9.0, outer=[2.0], factor=2.0
    )  # divided by each rank's own targets: a factor of the script's
    other = term(count=8.0, own=8.0, outer=[2.0], factor=2.0)
    assert causes([own, aux], [other, aux]) == ["loss_mean_of_means"]


def test_fractions_of_a_ranks_own_rows() -> None:
    def fractions(*sums_: tuple[int, float]) -> list[str]:
        return causes(*([term(), term("weighed", weights=[digest, total, 4])] for digest, total in sums_))

    assert fractions((1, 1.0), (2, 1.0)) == ["own_fractions"]
    assert fractions((1, 1.0), (1, 1.0)) == []  # of the global batch
    assert fractions((1, 1.0), (2, 3.0)) == []  # no fractions


SCRIPT = """def auxiliary(p):
    f = one_hot(p.argmax(-1)).mean(0)
    return (f * p.mean(0)).sum()

def train(model, x, y):
    out, p = model(x)
    ce = cross_entropy(out, y) / n * world
    value = mse(out, y)
    loss = ce + 0.5 * value
    loss += 0.01 * auxiliary(p)
    loss = loss * world
    scaler.scale(loss).backward()
"""


@pytest.mark.parametrize(
    "last", ["acc.backward(ce + 0.5 * value)", "(ce + 0.5 * value).backward()", "return ce + value"]
)
def test_terms_that_are_added_where_they_are_used(last: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"def train(x, y):\n    ce = mean(x)\n    value = mse(x, y)\n    {last}\n")
    lines = [term_line({"at": [str(path), 4], "library": False}, place) for place in range(2)]
    assert [line and line[1] for line in lines] == [2, 3]


def test_the_line_of_a_term(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    backward = {"at": [str(path), 12], "library": False}
    lines = [term_line(backward, place) for place in range(4)]
    assert [line and line[1] for line in lines] == [7, 8, 10, None]
    found = fractions_line(backward)
    assert found is not None
    assert found[1] == 3
