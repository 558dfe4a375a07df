"""`--balance` on a job with a model, a tokenizer and a collator of transformers, against plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.data import randomness

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(400)]
pytest.importorskip("transformers", reason="its model and its collator are what is tested")
ROOT = Path(__file__).resolve().parents[2]


def trained(folder: Path, *options: str, killed: bool = False) -> tuple[dict[str, Tensor], list[int], str]:
    """Returns the weights, each rank's share at the end, and what the run said."""
    folder.mkdir()
    line = [sys.executable, "-m", "paceline", "run", *options, "-m", "tests.foreign.balanced_bert", str(folder)]
    more = {"KILLED": "1"} if killed else {}
    done = subprocess.run(line, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    shares = [int(word) for word in (folder / "shares").read_text().split()]
    return load_file(folder / "weights.safetensors"), shares, done.stderr


def plainly(folder: Path) -> dict[str, Tensor]:
    from tests.foreign.balanced_bert import BATCH, EPOCHS, EXAMPLES, examples, made_model, made_tokenizer
    from transformers import DataCollatorWithPadding

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", "plain")
        tokenizer = made_tokenizer(folder)
    data, collate, model = examples(tokenizer), DataCollatorWithPadding(tokenizer), made_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(EPOCHS):
        order = randomness.permutation(EXAMPLES, 0, "train", epoch)
        for first in range(0, EXAMPLES, BATCH):
            model(**collate([data[number] for number in order[first : first + BATCH]])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def difference(one: dict[str, Tensor], other: dict[str, Any]) -> float:
    return max((one[name] - value).abs().max().item() for name, value in other.items())


@pytest.mark.parametrize(
    ("processes", "strategy"),
    [(2, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.full), pytest.param(4, "ddp", marks=pytest.mark.full)],
)
def test_the_weights_are_those_of_plain_pytorch(processes: int, strategy: str, tmp_path: Path) -> None:
    line = ["--nproc", str(processes), "--strategy", strategy, "--balance"]
    weights, shares, said = trained(tmp_path / "job", *line)
    assert difference(weights, plainly(tmp_path)) < 1e-12
    assert sum(shares) == 12
    assert shares[-1] < 12 // processes < shares[0], said
    assert "12 examples are now split" in said


@pytest.mark.full
def test_a_killed_rank_and_a_restart_do_not_change_them(tmp_path: Path) -> None:
    line = ["--nproc", "2", "--balance", "--max-restarts", "1"]
    weights, shares, said = trained(tmp_path / "job", *line, killed=True)
    assert "restart" in said
    assert difference(weights, plainly(tmp_path)) < 1e-12
    assert shares[-1] < 6 < shares[0], said
