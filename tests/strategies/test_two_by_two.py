"""The main paths of tensor and pipeline on four processes: two pairs, each of which holds one model."""

from __future__ import annotations

import pytest
from tests.strategies import test_pipeline_schedules as pipelines
from tests.strategies import test_tensor as tensors
from tests.strategies.checks import layers, plainly
from tests.strategies.test_tensor import Transformer, counted, counted_by_hand, loss_fn, same


@pytest.mark.ranks(conformance=4)
def test_tensor_of_two_pairs_trains_as_plain_pytorch() -> None:
    ours = tensors.trained(Transformer, loss_fn, "tensor:size=2", adam=True, micro=1, loop=True, clip=1e9)
    same(ours, plainly(Transformer, loss_fn, adam=True), 1e-8)
    same(tensors.trained(Transformer, counted, "tensor:size=2"), plainly(Transformer, counted_by_hand))


@pytest.mark.ranks(conformance=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_of_two_pairs_train_as_plain_pytorch(schedule: str) -> None:
    strategy = f"pipeline:stages=2,schedule={schedule}"
    ours = pipelines.trained(layers, pipelines.two_counts, strategy, adam=True, micro=1)
    same(ours, plainly(layers, pipelines.two_counts_by_hand, adam=True), 1e-8)
