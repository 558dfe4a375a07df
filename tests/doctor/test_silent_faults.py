"""`paceline doctor` on scripts of benchmarks/silentdist that it once judged wrongly, as a person calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[2] / "benchmarks" / "silentdist" / "cases"

# A case -> the cause and the line of the first finding that changes the model, in the faulty script.
FAULTS: dict[str, tuple[str, int]] = {
    "epoch_leftover_grads": ("left_over", 53),
    "retriever_onecycle": ("schedule_length", 46),  # a number of examples, divided by a batch size
    "mixture_stop": ("local_metric", 39),  # Lightning's EarlyStopping
    "chess_heads": ("partly_reduced", 95),  # each rank computes some heads of the same batch
    "masked_shards": ("loss_mean_of_means", 102),  # and some tokens of it
    "accelerate_loss_scaled": ("factor", 41),
    "drafter_global_mean": ("factor", 62),
    "ddp_norm_summed_twice": ("norm_summed_twice", 43),
    "clip_then_allreduce": ("clip_before_reduce", 76),
    "caption_pairs": ("gathered_without_gradient", 42),  # gathered by Accelerate
    "mlp_columns": ("not_reduced", 36),  # tensor parallelism
    "span_encoder": ("not_reduced", 71),  # a sequence, gathered by torch.distributed.nn
    "momentum_fsdp": ("optimizer_differs", 24),
    "arm_observations": ("buffers_differ", 27),
    "scanner_norms": ("buffers_differ", 63),  # the healthy twin combines what it saves
    "pages_stream": ("examples_missed", 59),
    "byol_average": ("written_outside", 30),
}
IN_CI = ("epoch_leftover_grads", "momentum_fsdp", "pages_stream")


def find(script: Path, folder: Path) -> list[Any]:
    pytest.importorskip("lightning")
    found = folder / "found.json"
    line = [sys.executable, "-m", "paceline", "doctor", "--nproc", "2", "--json", str(found), str(script)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=200)
    assert found.exists(), done.stdout + done.stderr
    findings = json.loads(found.read_text())["findings"]
    return [(one["cause"], one["line"]) for one in findings if one["changes_model"]]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.conformance if name in IN_CI else pytest.mark.full) for name in FAULTS],
)
def test_the_fault_is_named_and_its_healthy_twin_is_not_accused(name: str, tmp_path: Path) -> None:
    assert find(CASES / name / "faulty.py", tmp_path)[:1] == [FAULTS[name]]
    assert find(CASES / name / "healthy.py", tmp_path) == []
