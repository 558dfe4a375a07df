"""How tensor and pipeline find what to cut, and what a closure may not do in a pipeline: on one process."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ModelError, UsageError
from paceline.strategies.base import Term
from paceline.strategies.kit import dtensor_context
from paceline.strategies.pipeline import pipeline_cut
from paceline.strategies.pipeline.pipeline_loss import ModelStub, terms_from
from paceline.strategies.tensor import tensor_plan


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_balanced_cuts_make_the_largest_part_as_small_as_can_be(stages: int) -> None:
    generator = torch.Generator().manual_seed(stages)
    for _ in range(20):
        sizes = torch.randint(1, 9, (7,), generator=generator).tolist()
        cuts = pipeline_cut.balanced(sizes, stages)
        assert len(cuts) == stages + 1
        assert all(a < b for a, b in pairwise(cuts)), cuts
        assert (cuts[0], cuts[-1]) == (0, 7)
        largest = max(sum(sizes[a:b]) for a, b in pairwise(cuts))
        inner = torch.combinations(torch.arange(1, 7), stages - 1).tolist() if stages > 1 else [[]]
        assert largest == min(max(sum(sizes[a:b]) for a, b in pairwise([0, *c, 7])) for c in inner)


def test_the_units_of_a_model_compute_what_it_computes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 3)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
            self.positions = nn.Parameter(torch.randn(5, 8))

        def forward(self, tokens: torch.Tensor, shift: float | None = None) -> torch.Tensor:
            h = self.embed(tokens) + self.positions[: tokens.size(1)]
            for block in self.blocks:
                h = h + block(h)
                h.mul_(0.5)  # in place, and its result is not used
            return self.head(h).mean(1)

    model = Model()
    units = pipeline_cut.units_of(model)
    assert len(units) >= 5, units.names
    tokens = torch.randint(9, (4, 5))
    value = tokens
    for unit in units.modules:
        value = unit(value)
    assert torch.equal(value, model(tokens))
    assert {id(p) for unit in units.modules for p in unit.parameters()} == {id(p) for p in model.parameters()}
    assert units.mode is None


def test_a_model_that_computes_otherwise_in_evaluation_is_cut_for_one_of_both() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.dropout(self.a(x), 0.5, self.training))

    model = Model()
    assert pipeline_cut.units_of(model).mode is True
    assert pipeline_cut.units_of(model.eval()).mode is False


@pytest.mark.parametrize(
    ("plan", "pairs"),
    [
        ("a.*.b:row,c:gather", {"a.*.b": "row", "c": "gather"}),
        ("a=column, b = row", {"a": "column", "b": "row"}),
        ({"x": "row"}, {"x": "row"}),
    ],
)
def test_a_plan_is_read(plan: object, pairs: dict[str, str]) -> None:
    assert tensor_plan.read(plan) == pairs


def test_dropout_in_fused_attention_is_refused() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    dtensor_context.refuse_dropout(op, (None, None, None))
    dtensor_context.refuse_dropout(op, (None, None, None, 0.0, True))
    with pytest.raises(ModelError, match="dropout in a fused attention kernel"):
        dtensor_context.refuse_dropout(op, (None, None, None, 0.1, True))


def test_blocks_are_found() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    class Attention(nn.Module):
        def __init__(self, heads: int, keys: int) -> None:
            super().__init__()
            self.num_heads, self.num_kv_heads = heads, keys
            self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)
            self.k_proj, self.v_proj = nn.Linear(8, 2 * keys), nn.Linear(8, 2 * keys)

    model = nn.ModuleDict(
        {
            "gated": Gated(),
            "good": Attention(4, 2),
            "odd": Attention(4, 1),
            "layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            "plain": nn.Sequential(
                nn.Linear(8, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
            ),
            "far": nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
        }
    )
    plan, passed = tensor_plan.found(model, 2)
    assert {name: kind for name, (_, kind) in plan.items()} == {
        **{f"gated.{name}_proj": kind for name, kind in (("gate", "column"), ("up", "column"), ("down", "row"))},
        **{f"good.{name}_proj": "row" if name == "o" else "column" for name in "qkvo"},
        "layer.linear1": "column",
        "layer.linear2": "row",
        "plain.0": "column",
        "plain.3": "row",
    }
    assert any("odd" in line and "1 heads" in line for line in passed), passed
    shared = nn.ModuleDict({"a": Gated(), "b": Gated()})
    shared["a"].up_proj.weight = shared["b"].up_proj.weight
    assert not tensor_plan.found(shared, 2)[0]
    with pytest.raises(ModelError, match="share a parameter"):
        tensor_plan.matched(shared, {"a.up_proj": "column", "b.up_proj": "row"}, 2)


def test_a_closure_that_calls_the_model_twice_is_refused_in_a_pipeline() -> None:
    """One input goes through the stages: the second call would get the output of the first."""
    model = ModelStub(torch.ones(2, 3))
    assert model(torch.zeros(2, 3)).sum() == 6
    with pytest.raises(UsageError, match=r"a second time.*torch\.cat"):
        model(torch.ones(2, 3))


def test_a_closure_that_differentiates_by_its_input_is_refused_in_a_pipeline() -> None:
    """The layers between are other processes'. By the output, which it has, it may."""
    x = torch.ones(2, 3, requires_grad=True)

    def penalty(model: Any, by_input: bool) -> Tensor:
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x if by_input else output, create_graph=True)
        return slope.sum()

    def terms(by_input: bool) -> list[Term]:
        work = SimpleNamespace(compute=lambda model, piece, device: [Term(penalty(model, by_input), None)])
        return terms_from(work, torch.ones(2, 3, requires_grad=True), None, torch.device("cpu"))  # type: ignore[arg-type]

    assert float(terms(False)[0].value.detach()) == 12
    with pytest.raises(UsageError, match=r"gradient penalty.*'ddp'"):
        terms(True)
