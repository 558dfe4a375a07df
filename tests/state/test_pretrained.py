"""Weights from and to directories in Hugging Face's layout, under every strategy, compared with transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.strategies import checks
from torch import Tensor, nn

from paceline.comm import dtensor
from paceline.comm.mesh import world_group
from paceline.errors import CheckpointError, SettingError, UsageError
from paceline.state import pretrained, sharded_export

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).reshape(2, 6) % 11


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**options: Any) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=8, n_layer=2, n_head=2, **options)
    )


def built(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make().eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS).logits
        return found


def by_rank_0(folder: Path, make: Callable[[], Any], shards: str = "1KB") -> Tensor:
    """Have transformers write a model into a folder. Returns its logits."""
    model = built(make)
    if world_group().rank == 0:
        model.save_pretrained(folder, max_shard_size=shards)
    world_group().barrier()
    return logits(model)


STRATEGIES = [
    "ddp",
    "fsdp:min_params=0",
    "fsdp:stage=1",
    "fsdp:stage=2,offload=true",
    "tensor",
    "pipeline:stages=2",
    "local_sgd:every=2",
    "shared",
]


def strategies(*more: str) -> Any:
    return pytest.mark.parametrize("strategy", [*STRATEGIES, *more])


def there_and_back(strategy: str, make: Callable[[], Any], folder: Path) -> None:
    """A model of other weights takes those of a directory, and writes them into another one."""
    expected = by_rank_0(folder / "in", make)
    with checks.started(strategy=strategy) as run:
        model = run.prepare(built(make, seed=1))
        assert run.load_pretrained(folder / "in", model) == ([], [])
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
        run.export(folder / "out", model, shards="1KB")
    world_group().barrier()
    assert json.loads((folder / "out" / pretrained.INDEX).read_text())["weight_map"].keys() == files_of(folder / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "out").eval()
    assert type(again) is type(built(make))
    assert torch.equal(logits(again), expected)
    assert again.generation_config is not None


def files_of(folder: Path) -> Any:
    return json.loads((folder / pretrained.INDEX).read_text())["weight_map"].keys()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_one_process(make: Any, tmp_path: Path) -> None:
    there_and_back("single", make, tmp_path)


@pytest.mark.ranks(2)
@strategies()
def test_there_and_back_under_every_strategy(strategy: str, tmp_path: Path) -> None:
    there_and_back(strategy, llama, tmp_path)
