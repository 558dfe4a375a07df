"""Masked-language-model training with Hugging Face's own collator and model, in float64: masks and weights on any
number of processes are those of one, and of a plain loop. The last global batch is short, and is cut unevenly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(600)]
pytest.importorskip("transformers", reason="Hugging Face's collator is what is tested")
pytest.importorskip("tokenizers", reason="Hugging Face's tokenizer is what is tested")

STEPS, EXAMPLES, EPOCHS = 6, 19, 2
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="module")
def alone() -> Any:
    from tests.foreign.bert import trained

    found = trained(None, "0")
    assert found["distance"] <= 1e-8
    assert len(found["masks"]) == EPOCHS * EXAMPLES
    assert len({str(mask) for mask in found["masks"].values()}) > EPOCHS * EXAMPLES / 2
    return found["masks"]


@pytest.mark.parametrize(
    ("strategy", "size", "micro"),
    [
        ("", 1, "4"),
        ("ddp", 2, "4"),
        ("fsdp", 2, "0"),
        pytest.param("ddp", 2, "0", marks=pytest.mark.full),
        pytest.param("ddp", 3, "0", marks=pytest.mark.full),
        pytest.param("fsdp", 3, "4", marks=pytest.mark.full),
    ],
)
def test_masks_and_weights_are_those_of_one_process(strategy: str, size: int, micro: str, alone: Any) -> None:
    found = run_ranks(size, "tests.foreign.bert:trained", strategy, micro, deadline=300)
    masks: dict[str, Any] = {}
    for one in found:
        assert not masks.keys() & one["masks"].keys()
        masks |= one["masks"]
        assert one["steps"] == STEPS
        assert one["distance"] <= 1e-8
    assert masks == alone


def test_replicas_of_one_process_train_as_the_plain_loop() -> None:
    (found,) = run_ranks(1, "tests.foreign.bert:trained", "data_parallel:devices=cpu,cpu", "0", deadline=300)
    assert found["distance"] <= 1e-8


def test_a_collator_with_a_seed_draws_the_same_on_several_processes() -> None:
    (one,) = run_ranks(1, "tests.foreign.bert:trained", "", "0", "7", deadline=300)
    masks: dict[str, Any] = {}
    for found in run_ranks(2, "tests.foreign.bert:trained", "ddp", "2", "7", deadline=300):
        masks |= found["masks"]
    assert masks == one["masks"]


def test_a_shard_without_examples() -> None:
    """transformers' attention has view(..., -1, ...), which torch alone refuses for a batch of no examples."""
    from tests.foreign.bert import trained

    assert trained("single:shards=4", "0")["distance"] <= 1e-8


@pytest.mark.parametrize(
    ("script", "code", "cause"),
    [pytest.param("bert_tokens", 0, None, marks=pytest.mark.full), ("bert_mean_of_means", 1, "mean-of-means")],
)
def test_verify_tells_the_right_loss_from_the_mean_of_means(
    script: str, code: int, cause: str | None, tmp_path: Path
) -> None:
    told = tmp_path / "found.json"
    command = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "4", "--json", str(told)]
    done = subprocess.run([*command, str(SCRIPTS / f"{script}.py")], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    found = json.loads(told.read_text())
    assert found["cause"] == cause
    if cause is not None:
        lines = (SCRIPTS / f"{script}.py").read_text().splitlines()
        assert lines[found["line"] - 1].strip() == found["source"] == "loss = model(**batch).loss"
