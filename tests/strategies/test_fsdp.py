"""fsdp: its memory against ZeRO's formulas, its layers, what it refuses. Its stages: test_fsdp_stages.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.fsdp_memory import PARAMETERS

from paceline.strategies.sharded.fsdp_wrapping import layers_of

# Bytes per parameter in fp32 with Adam, of n replicas: after an update; and with the gradients of a whole batch there.
# Stage 1's gradients lie in its buckets, which stay; stage 2's parameters are in slices while nothing is computed.
FORMULAS: dict[str, Any] = {
    "ddp:reducer=native": (lambda n: 4 + 4 + 8, lambda n: 4 + 4 + 8),
    "fsdp:stage=1,min_params=1": (lambda n: 4 + 4 + 8 / n, lambda n: 4 + 4 + 8 / n),
    "fsdp:stage=2,min_params=1": (lambda n: (4 + 8) / n, lambda n: (4 + 4 + 8) / n),
    "fsdp:stage=3,min_params=1": (lambda n: (4 + 8) / n, lambda n: (4 + 4 + 8) / n),
}


@pytest.mark.timeout(200)
def test_memory_per_rank_is_that_of_the_formula() -> None:
    for found in run_ranks(2, "tests.strategies.fsdp_memory:all_stages", deadline=150):
        for strategy, (after, fullest) in FORMULAS.items():
            its = found[strategy]
            assert its["all"] / PARAMETERS == pytest.approx(after(2), rel=0.05), strategy
            assert sum(its["with gradients"].values()) / PARAMETERS == pytest.approx(fullest(2), rel=0.05), strategy
            assert its["after the step"]["gradients"] == 0
            assert its["peak"] >= its["all"]


def test_layers_that_share_a_weight_travel_with_what_surrounds_them() -> None:
    blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
    blocks[2].weight = blocks[0].weight
    model = torch.nn.ModuleDict(
        {"blocks": blocks, "nested": torch.nn.Sequential(torch.nn.Sequential(*[torch.nn.Tanh()]))}
    )
    assert layers_of(model, "auto", 1) == [blocks[1], blocks[3]]
    assert layers_of(model, "Linear", 1) == [blocks[3], blocks[1]]
    assert layers_of(model, "auto", 21) == layers_of(model, "none", 1) == []
