"""Hugging Face's models, whose attention torch cannot give a batch of 0 rows, with a rank that has no examples: in
float64 against plain PyTorch on one process."""

from __future__ import annotations

import pytest
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
pytest.importorskip("transformers", reason="Hugging Face's models are what is tested")

ALL = "bert_masked bert bert_eager recomputed lora albert distilbert gpt2 t5 vit swin"
CASES = [
    pytest.param(2, "ddp", "loop", ALL, marks=pytest.mark.full),
    pytest.param(3, "ddp", "closure", ALL, marks=pytest.mark.campaign),
    (2, "fsdp", "loop", ALL),
    pytest.param(3, "fsdp", "closure", "bert_masked bert recomputed lora albert", marks=pytest.mark.campaign),
    pytest.param(2, "fsdp:stage=1", "closure", "bert_masked lora albert", marks=pytest.mark.campaign),
    pytest.param(2, "local_sgd:every=1,average_state=true", "loop", "bert lora albert", marks=pytest.mark.full),
    (1, "data_parallel:devices=cpu,cpu,cpu", "closure", ALL),
    pytest.param(
        1, "mirrored:devices=cpu,cpu", "closure", "bert_masked recomputed lora albert", marks=pytest.mark.full
    ),
    pytest.param(4, "pipeline:stages=2", "closure", "bert albert", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("size", "strategy", "form", "models"), CASES)
def test_weights_are_those_of_plain_pytorch(size: int, strategy: str, form: str, models: str) -> None:
    """T5 computes its norms in fp32, whatever it is in."""
    for found in run_ranks(size, "tests.foreign.empty_shards:all_trained", models, strategy, form, deadline=500):
        assert {name: apart for name, apart in found.items() if not apart <= (1e-8 if name == "t5" else 1e-10)} == {}


@pytest.mark.parametrize(
    ("size", "strategy"),
    [
        (2, "ddp"),
        pytest.param(3, "ddp", marks=pytest.mark.campaign),
        (1, "data_parallel:devices=cpu,cpu,cpu"),
    ],
)
@pytest.mark.parametrize("model", ["bert", "albert"])
def test_dropout_and_predictions_are_those_of_one_process(size: int, strategy: str, model: str) -> None:
    (alone,) = run_ranks(1, "tests.foreign.empty_shards:dropped", model, "", deadline=300)
    for found in run_ranks(size, "tests.foreign.empty_shards:dropped", model, strategy, deadline=300):
        assert found == pytest.approx(alone, rel=1e-10, abs=1e-10)
