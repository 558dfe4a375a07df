"""peak_flops: the FLOPs of a global batch are those of the formula, on any number of processes."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import SettingError
from paceline.planning.device_figures import DEVICES, PRODUCTS
from paceline.run import parts_of
from paceline.utilization import peak_of

WIDTHS = (8, 24, 16, 8, 4)
BATCH = 8
# Forward and the gradient of the weight: 2 x in x out each. The gradient of the input: not in the first layer.
EXPECTED = sum(6 * a * b for a, b in itertools.pairwise(WIDTHS)) - 2 * WIDTHS[0] * WIDTHS[1]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(WIDTHS):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers)


def loss_fn(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def reached(strategy: str, micro_batch: int | None = None, form: str = "closure", **settings: Any) -> float | None:
    """The part of a peak of 1 FLOP/s for each process, at one example per second, after three global batches."""
    run = paceline.start(strategy=strategy, device="cpu", peak_flops="1FLOP/s", progress="lines", **settings)
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(20, WIDTHS[0]), torch.randn(20, WIDTHS[-1]))
    for batch in run.loader(data, global_batch=BATCH, micro_batch=micro_batch, drop_last=True, name="other"):
        run.forward_backward(loss_fn, model, batch)
        run.step(optimizer)
    for batch in run.loader(data, global_batch=BATCH, micro_batch=micro_batch):  # the last one has 4 examples
        if form == "closure":
            run.forward_backward(loss_fn, model, batch)
        else:
            run.backward(loss_fn(model, batch))
        run.step(optimizer)
        model(batch[0]) if form == "another forward" else None
    totals = parts_of(run).totals
    run.close()
    return totals.utilization(1.0)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("micro_batch", "form"), [(None, "closure"), (1, "loop"), (2, "closure"), (None, "another forward")]
)
def test_the_flops_of_an_example_are_those_of_the_formula(micro_batch: int | None, form: str) -> None:
    assert reached("ddp", micro_batch, form) == EXPECTED / world_group().size


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("when", ["at the top", "between micro-batches"])
def test_an_evaluation_in_the_counted_batch_does_not_count(when: str) -> None:
    run = paceline.start(device="cpu", peak_flops="1FLOP/s", progress="lines")
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(40, WIDTHS[0]), torch.randn(40, WIDTHS[-1]))
    validation = run.loader(data, global_batch=BATCH, train=False)
    micro_batch = BATCH // world_group().size // 2
    train = run.loader(data, global_batch=BATCH, micro_batch=micro_batch)
    for _ in range(2):
        for batch in train:
            assert train.current is not None
            if train.current.micro == (when != "at the top"):
                with torch.no_grad():
                    for other in validation:
                        model(other[0])
            run.backward(loss_fn(model, batch))
            run.step(optimizer)
    totals = parts_of(run).totals
    run.close()
    assert totals.utilization(1.0) == EXPECTED / world_group().size


@pytest.mark.ranks(1, 2)
def test_of_two_loaders_the_first_ones_examples_count() -> None:
    run = paceline.start(device="cpu", peak_flops="1FLOP/s", progress="lines")
    model = net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(96, WIDTHS[0]), torch.randn(96, WIDTHS[-1]))
    first = run.loader(data, global_batch=8, name="first")
    second = run.loader(data, global_batch=24, name="second")
    for one, other in zip(first, second, strict=False):
        run.backward(loss_fn(model, one), of=first)
        run.backward(loss_fn(model, other), of=second)
        run.step(optimizer)
    totals = parts_of(run).totals
    run.close()
    assert totals.utilization(1.0) == 4 * EXPECTED / world_group().size


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("strategy", "form"),
    [("fsdp", "closure"), ("fsdp:stage=2", "loop"), ("tensor:size=2", "loop"), ("pipeline", "closure"),
     ("shared", "loop"), ("local_sgd", "loop")],
)  # fmt: skip
def test_parts_of_a_batch_or_a_model_add_up(strategy: str, form: str) -> None:
    assert reached(strategy, form=form) == EXPECTED / 2


class Attending(nn.Module):
    """flex_attention, an operator of higher order that compiles itself: (batch, 16, 8) -> (batch, 16, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        query, key, value = self.project(x).unsqueeze(1).chunk(3, dim=-1)
        found = flex_attention(query.detach(), key.detach(), value.detach())  # it has no backward on a CPU
        summed: Tensor = (value + found).squeeze(1)
        return summed


def test_an_operator_of_higher_order_does_not_end_the_training() -> None:
    """Whether its own products are counted is left to torch's formulas; those of the layer are."""
    run = paceline.start(device="cpu", peak_flops="1FLOP/s", progress="lines")
    model = Attending()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.loader(TensorDataset(torch.randn(24, 16, 8)), global_batch=8):
        run.backward(model(x).square().mean())
        run.step(optimizer)
    totals = parts_of(run).totals
    run.close()
    assert (totals.utilization(1.0) or 0) >= 2 * 2 * 16 * 8 * 24


@pytest.mark.conformance
def test_a_compiled_model_runs_uncompiled_in_the_counted_batch() -> None:
    pytest.importorskip("torch._inductor")
    assert reached("single", compile=True) == EXPECTED


@pytest.mark.parametrize("strategy", ["data_parallel:devices=cpu,cpu", "mirrored:devices=cpu,cpu"])
def test_threads_are_refused(strategy: str) -> None:
    with pytest.raises(SettingError, match="several threads"):
        reached(strategy)


def test_the_peak_of_a_device() -> None:
    cpu = torch.device("cpu")
    assert peak_of("70 GFLOP/s", cpu, "fp32") == 70e9
    with pytest.raises(SettingError, match="no peak is known for cpu"):
        peak_of("auto", cpu, "bf16")
    with pytest.raises(SettingError, match="peak_flops 70GB/s: write 989TFLOP/s"):
        peak_of("70GB/s", cpu, "bf16")
    assert set(PRODUCTS.values()) <= set(DEVICES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
        assert peak_of("auto", torch.device("cuda", 0), "bf16") == 989e12
        with pytest.raises(SettingError, match="16-bit"):
            peak_of("auto", torch.device("cuda", 0), "fp32")


def test_the_launcher_refuses_a_peak_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')\n")
    line = [sys.executable, "-m", "paceline", "run", "--device", "cpu", "--nproc", "2", "--peak-flops", "many"]
    done = subprocess.run([*line, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "peak_flops many: write 989TFLOP/s" in done.stderr


def test_a_formula_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*shapes: Any, **named: Any) -> int:
        raise ValueError("no such layout")

    formulas = dict.fromkeys([torch.ops.aten.addmm], fails)
    monkeypatch.setattr("paceline.step.flops.flop_counter", lambda: SimpleNamespace(flop_registry=formulas))
    with pytest.warns(UserWarning, match="torch cannot count the FLOPs of aten.addmm.default, so the run shows no MFU"):
        assert reached("single") is None


SCRIPT = """
import time
import torch
import paceline
from torch import nn

run = paceline.start(log_dir="logs", log_every=1)
model = nn.Linear(64, 10)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(10, (256,)))
for x, y in run.loader(data, global_batch=8):
    run.backward(nn.functional.cross_entropy(model(x), y))
    run.step(optimizer)
    time.sleep(0.05)
run.close()
"""


@pytest.mark.parametrize(
    ("strategy", "processes", "devices"),
    [
        ("ddp", 2, 2),
        pytest.param("parameter_server", 2, 1, marks=pytest.mark.conformance),
        pytest.param("parameter_server:mode=async", 3, 2, marks=pytest.mark.conformance),
    ],
)
def test_it_is_logged_and_stands_in_the_last_line(strategy: str, processes: int, devices: int, tmp_path: Path) -> None:
    """Servers are no devices that compute."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--nproc", str(processes), "--strategy", strategy]
    command += ["--peak-flops", "1MFLOP/s", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()]
    shown = [line for line in lines if "mfu" in line]
    assert shown, lines
    for line in shown:
        assert line["mfu"] == pytest.approx(line["examples_per_second"] * 4 * 64 * 10 / (1e6 * devices))
    rate, used = re.search(r"([\d.,]+) examples/s, ([\d.]+)% of the peak FLOP/s \(MFU\)", done.stderr).groups()  # type: ignore[union-attr]
    assert float(used) / 100 == pytest.approx(
        float(rate.replace(",", "")) * 4 * 64 * 10 / (1e6 * devices), rel=0.02, abs=0.001
    )
