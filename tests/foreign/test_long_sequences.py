"""Hugging Face's Llama, BERT and GPT-2 under `ulysses`, in float64 against plain PyTorch: padded and packed sequences
of a length that no group divides, grouped key heads, eager attention, activation checkpointing."""

from __future__ import annotations

import pytest
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
pytest.importorskip("transformers", reason="Hugging Face's models are what is tested")

EXACT = (
    "llama llama_packed llama_one_key_head llama_3_heads llama_checkpointing bert bert_eager llama_in_model "
    "llama_eager gpt2"
)
IN_FLOAT32 = "llama_in_model llama_eager gpt2"
"""Hugging Face computes these losses or softmaxes in float32. Their last bits depend on the number of rows."""
JOBS = "llama llama_packed llama_one_key_head llama_3_heads bert bert_eager"


@pytest.mark.parametrize(
    ("size", "strategy", "micro", "form", "jobs", "bar"),
    [
        (2, "ulysses", "0", "loop", EXACT, 1e-10),
        (4, "ulysses:size=2", "2", "closure", JOBS, 1e-10),
        (2, "fsdp+ulysses:min_params=0", "0", "loop", "llama_packed bert", 1e-10),
        pytest.param(4, "fsdp+ulysses:size=2,min_params=0", "0", "loop", JOBS, 1e-10, marks=pytest.mark.full),
        pytest.param(4, "ulysses", "0", "loop", EXACT, 1e-10, marks=pytest.mark.full),
        pytest.param(4, "ulysses:size=2", "2", "loop", IN_FLOAT32, 1e-6, marks=pytest.mark.full),
    ],
)
def test_weights_are_those_of_plain_pytorch(
    size: int, strategy: str, micro: str, form: str, jobs: str, bar: float
) -> None:
    everyone = run_ranks(
        size, "tests.foreign.long_sequences:all_trained", jobs, strategy, "adam", micro, form, deadline=500
    )
    assert len(everyone) == size
    for found in everyone:
        assert all(distance <= bar for distance in found.values()), found
