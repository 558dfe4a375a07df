"""A model's summary beside what can be counted by hand; traces beside the steps that were made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fit.problem import BATCH, TRAIN, adamw, equal, loss_fn, net, started
from tests.fit.test_fit_on_ranks import directory
from torch import nn

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError


class Tied(nn.Module):
    """A layer that is called twice, a weight that two layers share, a frozen norm, a dict for an output."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4, bias=False)))
        self.out = nn.Linear(6, 6)
        self.out.weight = self.inside.weight
        self.unused = nn.Linear(2, 2)
        for parameter in self.norm.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        x = self.norm(self.inside(self.inside(x)))
        return {"a": self.body(x) * scale, "b": (self.out(x), None)}


def test_the_layers_of_a_model() -> None:
    model = Tied()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    found = paceline.summary(model, (torch.randn(7, 6, generator=torch.Generator().manual_seed(1)), 2.0))
    assert torch.equal(torch.rand(3), drawn), "the generators are as they were"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == [True, True, False, *[True] * 7]
    assert not any(m._forward_hooks for m in model.modules())
    by_name = {one.name: one for one in found.layers}
    assert list(by_name) == [name for name, _ in model.named_modules()]
    assert (by_name["inside"].trainable, by_name["inside"].calls, by_name["inside"].output) == (42, 2, "(7, 6)")
    assert (by_name["out"].trainable, by_name["norm"].trainable, by_name["norm"].frozen) == (6, 0, 12)
    assert by_name[""].output == "(7, 4), (7, 6)"
    assert (by_name["unused"].output, by_name["unused"].calls) == (None, 0)
    assert found.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.parameter_bytes == 4 * found.parameters
    assert found.buffer_bytes == sum(b.numel() * b.element_size() for b in model.buffers())
    assert "  inside: Linear" in str(found)
    assert "(7, 6) x2" in str(found)
    shallow = str(paceline.summary(model, depth=1)).splitlines()
    (body,) = [line for line in shallow if "body" in line]
    assert body.split() == ["body:", "Sequential", "44"]
    assert not [line for line in shallow if "Dropout" in line]


def test_dicts_and_what_is_no_model() -> None:
    assert paceline.summary(Tied(), {"x": torch.randn(2, 6), "scale": 0.5}).layers[0].calls == 1
    assert paceline.summary(nn.Flatten(), torch.zeros(2, 3, 4)).layers[0].output == "(2, 12)"
    with pytest.raises(SettingError, match=r"summary\(list\)"):
        paceline.summary([nn.Linear(1, 1)])  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="depth=-1"):
        paceline.summary(Tied(), depth=-1)


@pytest.mark.ranks(conformance=2)
def test_a_sharded_model_is_refused() -> None:
    with started(strategy="fsdp") as run:
        model = run.prepare(net())
        with pytest.raises(UsageError, match=r"Call it before run\.prepare"):
            paceline.summary(model)


@contextmanager
def without_kinetos_lines() -> Iterator[None]:
    """torch's profiler writes lines of its own to stderr, from C++."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@pytest.mark.ranks(1, conformance=2)
@pytest.mark.timeout(240)
def test_a_trace_for_each_process_and_cycle() -> None:
    def fit(*callbacks: paceline.Callback) -> Any:
        with started() as run:
            model = net()
            paceline.fit(
                model, loss_fn, TRAIN, optimizer=adamw(model), global_batch=BATCH, epochs=2, run=run,
                callbacks=callbacks,
            )  # fmt: skip
            return model

    with directory() as folder, without_kinetos_lines():
        trace = paceline.Profiler(folder / "new" / "traces", wait=1, warmup=1, active=2, repeat=2, record_shapes=True)
        model = fit(trace)
        rank = world_group().rank
        names = [f"rank{rank}.step{step}.pt.trace.json" for step in (4, 8)]
        assert [path.name for path in trace.files] == names
        for path in trace.files:
            events = json.loads(path.read_text())["traceEvents"]
            steps = {event["name"] for event in events if str(event.get("name", "")).startswith("ProfilerStep#")}
            assert len(steps) == 2
            assert all("Input Dims" in e["args"] for e in events if e.get("name") == "aten::tanh")
        short = paceline.Profiler(folder / "short", wait=7, active=50)  # longer than the fit: what there is
        fit(short)
        assert len(short.files) == 1
        equal(model, fit())
        world_group().barrier()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wait": -1}, "wait=-1"),
        ({"active": 0}, "active=0"),
        ({"repeat": 0}, "repeat=0"),
        ({"schedule": None}, "Use torch.profiler.profile directly"),
    ],
)
def test_a_schedule_that_cannot_be(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=message):
        paceline.Profiler(tmp_path, **options)
