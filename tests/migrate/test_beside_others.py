"""docs/beside_others.md says what the other tools' installed versions do, where they can be asked."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline

PAGE = (Path(__file__).parents[2] / "docs" / "beside_others.md").read_text(encoding="utf-8")
INTRO = PAGE.partition("<div")[0].replace("\n", " ")
ROWS = {
    cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
    for line in PAGE.splitlines()
    if (cells := line.split("|"))[2:]
}


def of(name: str) -> Any:
    return pytest.importorskip(name)


def test_the_versions_are_those_that_were_looked_at() -> None:
    assert f"Paceline {paceline.__version__}" in INTRO
    assert f"torch {torch.__version__.partition('+')[0]}" in INTRO or not torch.__version__.startswith("2.13")
    assert re.search(r"Accelerate [\d.]+, Lightning [\d.]+ .* TensorFlow [\d.]+ with Keras [\d.]+", INTRO)
    assert all(len(cells) == 5 for cells in ROWS.values())


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readmes_short_table_is_of_the_versions_that_the_page_names(readme: str) -> None:
    text = (Path(__file__).parents[2] / readme).read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("|") and "| torch 2." in line)
    torch_, accelerate, lightning, tensorflow, _ = (cell.strip() for cell in row.strip("|").split("|")[1:])
    for named in (torch_, f"Accelerate {accelerate}", f"Lightning {lightning}", f"TensorFlow {tensorflow}"):
        assert named in INTRO, named


@pytest.mark.conformance
def test_accelerate_is_as_the_page_says() -> None:
    accelerate = of("accelerate")
    assert f"Accelerate {version('accelerate')}" in INTRO
    defaults = {
        field.name: field.default for field in dataclasses.fields(of("accelerate.utils").DataLoaderConfiguration)
    }
    assert (defaults["split_batches"], defaults["even_batches"]) == (False, True)
    assert callable(accelerate.skip_first_batches)
    importlib.import_module("accelerate.local_sgd")
    tracking = inspect.getsource(importlib.import_module("accelerate.tracking"))
    assert str(len(re.findall(r"^class \w+\(GeneralTracker\)", tracking, re.M))) == ROWS["trackers"][1]


@pytest.mark.conformance
def test_lightning_is_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing Lightning sets it
    lightning = of("lightning.pytorch")
    assert f"Lightning {version('lightning')}" in INTRO
    assert inspect.signature(lightning.Trainer).parameters["sync_batchnorm"].default is False
    assert inspect.signature(lightning.LightningModule.log).parameters["sync_dist"].default is False
    strategies = importlib.import_module("lightning.pytorch.strategies")
    assert {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAStrategy"} <= set(dir(strategies))
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    assert {"SLURMEnvironment", "LSFEnvironment", "KubeflowEnvironment", "MPIEnvironment"} <= set(dir(environments))
    loggers = Path(importlib.import_module("lightning.pytorch.loggers").__file__ or "").parent
    kinds = {path.stem for path in loggers.glob("*.py")} - {"__init__", "logger", "utilities"}
    assert ROWS["trackers"][2] == str(len(kinds))


def test_torchrun_is_as_the_page_says() -> None:
    from torch.distributed.run import get_args_parser

    flags = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert {"--max-restarts", "--nnodes", "--rdzv-backend"} <= flags
    assert "expected input tensor to be on" in inspect.getsource(torch.nn.SyncBatchNorm.forward), "on CPUs too?"
