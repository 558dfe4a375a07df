"""`make scale`: one rank of many emulated ones holds and sends what formulas say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCALE = Path(__file__).parents[1] / "benchmarks" / "scale.py"
PARAMETERS = 8 * (8 * 256**2 + 7 * 256)  # of eight blocks
P = 4 * PARAMETERS  # bytes


def measured(strategy: str, ranks: int) -> Any:
    done = subprocess.run(
        [sys.executable, SCALE, "--measure", strategy, str(ranks)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.conformance
def test_ddp_on_1024_ranks() -> None:
    """Weights and two moments, and 32 bytes of counters; all gradients in two buckets."""
    found = measured("ddp:reducer=native", 1024)
    assert found["state_bytes"] == pytest.approx(3 * P, rel=1e-4)
    assert found["messages"] == {"allreduce": 2}
    assert found["message_bytes"] == P
    assert found["store_operations"] == {"set": 1, "get": 1024}


@pytest.mark.conformance
def test_fsdp_on_64_ranks() -> None:
    """1/64 of weights and moments. Each of eight layers gathers twice and reduces once: shards, and whole gradients."""
    found = measured("fsdp:stage=3", 64)
    assert found["state_bytes"] == pytest.approx(3 * P / 64, rel=1e-3)
    assert found["messages"] == {"allgather_base": 16, "reduce_scatter_base": 8, "allreduce": 1}
    assert found["message_bytes"] == pytest.approx(P + 2 * P / 64, rel=1e-3)


@pytest.mark.conformance
def test_tensor_on_two_ranks() -> None:
    """Each of eight blocks sums 2 x 16 x 256 numbers in the forward and in the backward. After it come the gradients
    that no layer splits, and a loss."""
    found = measured("tensor:size=2", 2)
    assert found["messages"]["all_reduce"] == 16
    assert set(found["messages"]) == {"all_reduce", "allreduce"}
    assert found["message_bytes"] == pytest.approx(16 * 4 * 2 * 16 * 256, rel=0.1)
