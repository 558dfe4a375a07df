"""How tensor and pipeline find what to cut: on one process."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from paceline.errors import ModelError
from paceline.strategies.kit import dtensor_context
from paceline.strategies.pipeline import pipeline_cut
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
