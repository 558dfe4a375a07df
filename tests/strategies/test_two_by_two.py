"""The main paths of tensor and pipeline on four processes: two pairs, each of which holds one model."""

from __future__ import annotations

import pytest
import torch
from tests.strategies import test_pipeline_schedules as pipelines
from tests.strategies import test_tensor as tensors
from tests.strategies.checks import layers, plainly, same, started
from tests.strategies.test_tensor import Transformer, counted, loss_fn
from torch import Tensor, nn

from paceline.comm.mesh import world_group


@pytest.mark.ranks(conformance=4)
def test_tensor_of_two_pairs_trains_as_plain_pytorch() -> None:
    ours = tensors.trained(Transformer, loss_fn, "tensor:size=2", adam=True, micro=1, closure=False, clip=1e9)
    same(ours, plainly(Transformer, loss_fn, adam=True), 1e-8)
    same(tensors.trained(Transformer, counted, "tensor:size=2"), plainly(Transformer, counted))


@pytest.mark.ranks(conformance=4)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelines_of_two_pairs_train_as_plain_pytorch(schedule: str) -> None:
    strategy = f"pipeline:stages=2,schedule={schedule}"
    ours = pipelines.trained(layers, pipelines.two_counts, strategy, adam=True, micro=1)
    same(ours, plainly(layers, pipelines.two_counts, adam=True), 1e-8)


class Fused(nn.Module):
    """Attention whose q, k and v are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        heads = [third.unflatten(-1, (4, 4)).transpose(1, 2) for third in self.c_attn(x).split(16, -1)]
        return self.c_proj(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


@pytest.mark.ranks(conformance=4)
def test_whole_weights_load_into_fused_attention_that_is_cut_and_sharded() -> None:
    model = Fused()
    with started(strategy="fsdp+tensor:size=2,min_params=0") as run:
        whole = world_group().broadcast({name: torch.randn_like(p) for name, p in model.state_dict().items()})
        model = run.prepare(model)
        model.load_state_dict(whole)
        state = run._strategy.state_dict()["models"][0]
        if run.main:
            assert [name for name in whole if not torch.equal(state[name], whole[name])] == []
