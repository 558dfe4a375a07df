"""The measured step of one process, against plain PyTorch and formulas."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.planning.measurement import Measurement, read_measurement
from paceline.planning.worker.step_inspection import flop_counter
from paceline.trials.spec import TrialEnded
from paceline.world import TRIAL

WIDTH, BATCH = 512, 8


@pytest.fixture(autouse=True)
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A trial's spec in the environment."""
    asked = {"directory": str(tmp_path), "steps": 4, "warmup": 1, "launched_at": time.time(), "measures_step": True}
    monkeypatch.setenv(TRIAL, json.dumps(asked))
    monkeypatch.chdir(tmp_path)
    return asked


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


def train(model: nn.Module, closure: bool = False, epochs: int = 100, **options: Any) -> None:
    run = paceline.start(device="cpu", progress="off", seed=0)
    x = torch.randn(24, WIDTH)
    model, optimizer = run.prepare(model, torch.optim.Adam(p for p in model.parameters() if p.requires_grad))
    loader = run.loader(TensorDataset(x, torch.randn(24, 2)), **{"global_batch": BATCH, **options})
    test = run.loader(TensorDataset(x), global_batch=24, train=False)

    def loss_fn(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    try:
        for _ in run.epochs(epochs):
            for batch in loader:
                if closure:
                    run.forward_backward(loss_fn, model, batch)
                else:
                    run.backward(loss_fn(model, batch))
                run.step(optimizer, max_grad_norm=1.0)
            with torch.no_grad():
                for (batch_x,) in test:
                    model(batch_x)
    finally:
        run.close()


def measured(spec: dict[str, Any], *arguments: Any, **options: Any) -> Measurement:
    with pytest.raises(TrialEnded) as ended:
        train(*arguments, **options)
    assert ended.value.code == 0
    record = json.loads((Path(spec["directory"]) / "rank-0.json").read_text())
    return read_measurement({"schema": 1, "script": "train.py", **record}, "the record")


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_sizes_flops_and_activations(closure: bool, micro_batch: int | None, spec: dict[str, Any]) -> None:
    model = network()
    sizes = [p.numel() * 4 for p in model.parameters()]
    found = measured(spec, model, closure, micro_batch=micro_batch)
    assert found.parameter_bytes == found.gradient_bytes == sum(sizes)
    assert found.state_bytes == 2 * sum(sizes) + 4 * len(sizes), "Adam: two moments, and a step counter each"
    assert found.gathered_bytes == sum(sizes) / 2
    assert (found.examples, found.micro_batch, found.precision, found.device) == (BATCH, micro_batch, "fp32", "cpu")
    # Products: 2 per weight in the forward, 4 in the backward; the first layer's input needs no gradient.
    first, last = 2 * WIDTH * WIDTH, 2 * WIDTH * 2
    assert found.flops == 2 * first + 3 * first + 3 * last
    # Linear layers save their inputs, ReLUs their outputs, which are the next inputs; the loss saves a difference.
    assert found.example_activation_bytes == pytest.approx(4 * (3 * WIDTH + 2))
    assert found.input_bytes == 4 * WIDTH
    assert [(layer.name, layer.parameter_bytes) for layer in found.layers] == [
        ("0", 4 * (WIDTH + 1) * WIDTH),
        ("2", 4 * (WIDTH + 1) * WIDTH),
    ], "the last layer has fewer parameters than fsdp gathers by itself"
    assert [layer.flops for layer in found.layers] == [2 * first, 3 * first]
    assert [layer.output_bytes for layer in found.layers] == [4 * WIDTH] * 2
    assert all(len(getattr(found, name)) == 3 for name in ("forward", "backward", "update", "other"))
    assert all(min(getattr(found, name)) > 0 for name in ("forward", "backward", "update"))
    assert set(found.cuts) == {2, 4, 8, 16}
    assert found.cuts[2].parameter_bytes > found.layers[0].parameter_bytes


def test_live_bytes(spec: dict[str, Any]) -> None:
    """Of a forward: its activations. At the end of the backward: all gradients. In Adam's update of the largest weight:
    the root of the second moment, and its quotient with the bias correction."""
    found = measured(spec, network())
    activations = BATCH * found.example_activation_bytes
    assert activations <= found.loss_live_bytes < 1.5 * activations
    assert found.gradient_bytes <= found.live_bytes < 1.05 * found.gradient_bytes
    assert 2 * 4 * WIDTH * WIDTH <= found.update_bytes < 1.05 * 2 * 4 * WIDTH * WIDTH


def test_frozen_parameters_have_no_gradients(spec: dict[str, Any]) -> None:
    model = network()
    model[0].requires_grad_(False)
    found = measured(spec, model)
    assert found.parameter_bytes - found.gradient_bytes == 4 * (WIDTH + 1) * WIDTH
    assert found.layers[0].gradient_bytes == 0
    assert found.layers[0].flops == 2 * WIDTH * WIDTH, "the forward only"


def test_another_batch(spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRIAL, json.dumps({**spec, "global_batch": 12}))
    assert measured(spec, network()).examples == 12


def test_a_script_that_ends_first_has_no_measurement(spec: dict[str, Any]) -> None:
    train(network(), epochs=1)
    assert json.loads((Path(spec["directory"]) / "rank-0.json").read_text()) is None


def test_fused_attention_is_counted_as_its_two_products() -> None:
    """Batch 2, 3 heads, 5 queries, 7 keys, width 8. The backward has twice the products of the forward."""
    query, key, value = (torch.randn(2, 3, n, 8, requires_grad=True) for n in (5, 7, 7))
    products = 2 * (2 * 3 * 5 * 7 * 8) * 2
    with flop_counter() as counter:
        out = nn.functional.scaled_dot_product_attention(query, key, value)
    assert counter.get_total_flops() == products
    with flop_counter() as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * products
