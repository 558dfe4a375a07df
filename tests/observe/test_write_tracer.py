"""The lines of a script that change weights and gradients."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.observe.patching import Patches
from paceline.observe.script_stack import ScriptStack
from paceline.observe.write_tracer import COLLECTIVE, GRADIENT, WEIGHT, WriteTracer

SCRIPT = """
import torch
import torch.distributed as dist

def halve(tensors):
    for tensor in tensors:
        tensor.mul_(0.5)

def step(model):
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    halve([p.grad for p in model.parameters()])
    total = torch.zeros(())
    dist.all_reduce(total)
    for p in model.parameters():
        p.data.add_(p.grad)
    model.weight.grad = None

tracer.start()
step(model)
"""


CALLED: list[str] = []  # the functions that were called


def trace(path: Path, model: torch.nn.Module, returned: list[Any], patches: Patches) -> WriteTracer:
    CALLED.clear()
    return WriteTracer(
        ScriptStack([str(path)]),
        model.parameters,
        patches,
        lambda: True,
        lambda frame: CALLED.append(frame.f_code.co_name),
        lambda frame, value: returned.append(value),
    )


@pytest.fixture
def tracer(tmp_path: Path) -> Iterator[tuple[WriteTracer, Path, list[Any], Patches]]:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    model, returned, patches = torch.nn.Linear(3, 2), [], Patches()
    before = sys.gettrace()
    sys.settrace(None)  # a measurement of coverage
    tracer = trace(path, model, returned, patches)
    yield tracer, path, [model, returned], patches
    tracer.stop()
    patches.undo()
    sys.settrace(before)


def test_writes_and_collectives_have_their_lines_in_order(tracer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, path, (model, returned), patches = tracer
    patches.undo()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    watch = trace(path, model, returned, patches)
    runpy.run_path(str(path), {"tracer": watch, "model": model})
    watch.stop()
    found = [(kind, [frame[1] for frame in stack][:2]) for kind, _, stack in watch.take()]
    text = SCRIPT.split("\n")
    lines = {words: number for number, line in enumerate(text, 1) for words in [line.strip()] if words}
    call = lines["halve([p.grad for p in model.parameters()])"]
    expected = [
        (GRADIENT, lines["loss.backward()"]),
        (GRADIENT, lines["tensor.mul_(0.5)"]),
        (COLLECTIVE, lines["dist.all_reduce(total)"]),
        (WEIGHT, lines["p.data.add_(p.grad)"]),
        (GRADIENT, lines["model.weight.grad = None"]),
    ]
    assert list(dict.fromkeys((kind, stack[0]) for kind, stack in found)) == expected
    assert next(stack for kind, stack in found if stack[0] == lines["tensor.mul_(0.5)"])[1] == call
    assert [name for name in CALLED if not name.startswith("<")] == ["step", "halve"]


def test_a_debugger_keeps_its_trace_function(tracer: Any) -> None:
    watch, *_ = tracer

    def debugger(frame: Any, event: str, value: Any) -> None:
        return None

    sys.settrace(debugger)
    try:
        watch.start()
        assert sys.gettrace() is debugger
        assert not watch.on
    finally:
        sys.settrace(None)
