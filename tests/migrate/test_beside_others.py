"""docs/beside_others.md names the versions that it speaks of."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch

import paceline

PAGE = (Path(__file__).parents[2] / "docs" / "beside_others.md").read_text(encoding="utf-8")
INTRO = PAGE.partition("<div")[0].replace("\n", " ")


def test_the_versions_are_those_that_were_looked_at() -> None:
    assert f"Paceline {paceline.__version__}" in INTRO
    assert f"torch {torch.__version__.partition('+')[0]}" in INTRO or not torch.__version__.startswith("2.13")
    assert re.search(r"Accelerate [\d.]+, Lightning [\d.]+ .* TensorFlow [\d.]+ with Keras [\d.]+", INTRO)


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readmes_short_table_is_of_the_versions_that_the_page_names(readme: str) -> None:
    text = (Path(__file__).parents[2] / readme).read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("|") and "| torch 2." in line)
    torch_, accelerate, lightning, tensorflow, _ = (cell.strip() for cell in row.strip("|").split("|")[1:])
    for named in (torch_, f"Accelerate {accelerate}", f"Lightning {lightning}", f"TensorFlow {tensorflow}"):
        assert named in INTRO, named


def test_torchrun_is_as_the_page_says() -> None:
    from torch.distributed.run import get_args_parser

    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert {"--max-restarts", "--nnodes", "--rdzv-backend"} <= flags
    assert "expected input tensor to be on" in inspect.getsource(torch.nn.SyncBatchNorm.forward), "on CPUs too?"
