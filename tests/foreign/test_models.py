"""Hugging Face's BERT, ALBERT and GPT-2 under `tensor`, `pipeline`, `fsdp+tensor` and HSDP, in float64 against plain
PyTorch: masks and labels by keyword, outputs as objects, tied embeddings, one layer that is called many times."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
pytest.importorskip("transformers", reason="Hugging Face's models are what is tested")

JOBS = ["bert", "bert_logits", "bert_classifier", "albert", "gpt2"]
MODELS = ["bert", "albert", "gpt2"]
BAR = {"sgd": 1e-10, "adam": 1e-8}
CASES = [
    pytest.param(2, "tensor", "sgd", "0", "loop", marks=pytest.mark.full),
    (2, "tensor", "adam", "4", "closure"),
    pytest.param(4, "tensor:size=2", "adam", "2", "loop", marks=pytest.mark.full),
    pytest.param(2, "pipeline", "sgd", "4", "closure", marks=pytest.mark.full),
    (2, "pipeline:schedule=1f1b", "adam", "2", "closure"),
    pytest.param(4, "pipeline", "sgd", "1", "closure", marks=pytest.mark.full),
    pytest.param(4, "pipeline:stages=2,balance=cost", "adam", "2", "closure", marks=pytest.mark.full),
    pytest.param(4, "fsdp+tensor:size=2", "sgd", "2", "loop", marks=pytest.mark.full),
    (4, "fsdp:replicate=2", "adam", "1", "closure"),
]


@functools.cache
def distances(
    size: int, strategy: str, optimizer: str, micro: str, form: str, jobs: str = " ".join(JOBS), factor: str = "1"
) -> dict[str, float]:
    """Of each job the largest distance on any rank. The ranks are started once for all jobs."""
    everyone = run_ranks(
        size, "tests.foreign.models:all_trained", jobs, strategy, optimizer, micro, form, factor, deadline=500
    )
    assert len(everyone) == size
    return {job: max(found[job] for found in everyone) for job in jobs.split()}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize(("size", "strategy", "optimizer", "micro", "form"), CASES)
def test_weights_are_those_of_plain_pytorch(
    size: int, strategy: str, optimizer: str, micro: str, form: str, job: str
) -> None:
    assert distances(size, strategy, optimizer, micro, form)[job] <= BAR[optimizer]


@pytest.mark.parametrize(
    ("job", "strategy"),
    [
        pytest.param("bert", "pipeline:cut=bert.encoder.layer.3", marks=pytest.mark.full),
        ("albert", "pipeline:cut=albert.encoder.albert_layer_groups.0#2"),
        pytest.param("gpt2", "pipeline:cut=transformer.h.1", marks=pytest.mark.full),
        ("gpt2", "tensor:plan=transformer.h.*.attn.c_attn:qkv,transformer.h.*.attn.c_proj:row,lm_head:gather"),
        ("bert", "tensor:plan=bert.embeddings.word_embeddings:row,bert.encoder.layer.*.intermediate.dense:gather"),
    ],
)
def test_a_plan_or_cut_can_be_given(job: str, strategy: str) -> None:
    assert distances(2, strategy, "sgd", "4", "closure", job)[job] <= BAR["sgd"]


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
def test_one_process_reads_their_checkpoints(strategy: str, tmp_path: Path) -> None:
    from tests.foreign.models import JOBS, make, plainly, started

    run_ranks(2, "tests.foreign.models:all_saved", " ".join(MODELS), strategy, str(tmp_path), deadline=500)
    for job in MODELS:
        build, loss_fn = JOBS[job]
        plain = plainly(build, loss_fn, adam=False)
        with started(strategy="single") as run:
            model, _ = run.prepare(*make(build, adam=False))
            assert run.restore(tmp_path / job)
            own = model.state_dict()
            for name, tensor in plain.state_dict().items():
                torch.testing.assert_close(own[name], tensor, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("strategy", ["tensor:size=2", "pipeline:stages=2"])
def test_heads_and_layers_that_do_not_divide_are_said(strategy: str) -> None:
    (found, *_) = run_ranks(2, "tests.foreign.models:refusals", strategy, deadline=300)
    assert not found, found
