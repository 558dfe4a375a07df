"""The script's lines of the nodes of a loss."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.doctor.recorders.loss_graph import loss_lines
from paceline.observe.graph_lines import GraphLines
from paceline.observe.script_stack import ScriptStack

SCRIPT = """
import torch
weight = torch.ones(4, requires_grad=True)
rows = torch.arange(8.0).view(2, 4)

def error():
    return ((rows @ weight) ** 2).mean()

mean = error()
penalty = weight.square().sum() / 7
loss = mean + penalty
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    yield path
    torch.autograd.set_detect_anomaly(False)


def test_the_terms_of_a_loss_have_the_lines_that_make_them(script: Path) -> None:
    lines = GraphLines(ScriptStack([str(script)]))
    loss = runpy.run_path(str(script))["loss"]
    found = loss_lines(loss, lines.line_of)
    # the mean is made inside a function; the second term is divided where it is assigned
    assert [line for _, line in found["terms"]] == [7, 10]
    assert [line for _, line in found["means"]] == [7]
    names = [node.name() for node in lines.nodes(loss.grad_fn)]
    assert names[0] == "AddBackward0"
    assert {"MeanBackward0", "DivBackward0"} <= set(names)


def test_nodes_have_no_lines_after_the_first_passes(script: Path) -> None:
    lines = GraphLines(ScriptStack([str(script)]), passes=1)
    assert torch.is_anomaly_enabled()
    lines.after_pass()
    assert not torch.is_anomaly_enabled()
    loss = runpy.run_path(str(script))["loss"]
    assert loss_lines(loss, lines.line_of)["terms"] == [[], []]


def test_anomaly_mode_of_the_script_stays_on(script: Path) -> None:
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    GraphLines(ScriptStack([str(script)]), passes=1).after_pass()
    assert torch.is_anomaly_enabled()
