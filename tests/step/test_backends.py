"""Settings of torch's backends: set while a run is open, put back when it is closed; channels_last and checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline


def switches() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "benchmark": backends.cudnn.benchmark,
        "cudnn deterministic": backends.cudnn.deterministic,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fills new memory": torch.utils.deterministic.fill_uninitialized_memory,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "matmul": backends.cuda.matmul.allow_tf32,
        "cudnn": backends.cudnn.allow_tf32,
        **(
            {place: getattr(getattr(backends, place[0]), place[1]).fp32_precision for place in NEW}
            if hasattr(backends.cudnn, "rnn")
            else {}
        ),
    }


NEW = (("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {}),
        ({"cudnn_benchmark": True}, {"benchmark": True}),
        ({"cudnn_benchmark": False}, {"benchmark": False}),
        (
            {"deterministic": True},
            {
                "deterministic": True,
                "fills new memory": False,
                "cudnn deterministic": True,
                "benchmark": False,
                "workspace": ":4096:8",
            },
        ),
        ({"tf32": True}, {"matmul": True, "cudnn": True}),
        ({"tf32": False}, {"matmul": False, "cudnn": False}),
    ],
)
def test_they_are_set_and_put_back(settings: dict[str, Any], expected: dict[str, Any]) -> None:
    before = switches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = paceline.start(device="cpu", **settings)
        now = switches()
        run.close()
    old = {name: value for name, value in now.items() if not isinstance(name, tuple)}
    assert old == {**{name: before[name] for name in old}, **expected}
    if "tf32" in settings:
        assert all((value == "tf32") is settings["tf32"] for name, value in now.items() if isinstance(name, tuple))
    assert switches() == before


def test_the_next_run_in_a_process_does_not_inherit_them() -> None:
    before = switches()
    paceline.start(device="cpu", deterministic=True, tf32=True)
    run = paceline.start(device="cpu")  # which closes the first
    assert switches() == before
    run.close()


def test_what_the_person_set_in_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    run = paceline.start(device="cpu", deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    run.close()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.full
def test_a_script_that_uses_the_new_switches_of_torch(tmp_path: Path) -> None:
    """In a process of its own: the old ones cannot be read any more once these are written."""
    code = """
import torch, paceline
places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn]
for place, value in zip(places, ("tf32", "ieee", "tf32")):
    place.fp32_precision = value
for on in (True, False):
    run = paceline.start(device="cpu", tf32=on)
    assert torch.backends.cuda.matmul.allow_tf32 is on and torch.backends.cudnn.allow_tf32 is on
    assert [place.fp32_precision == "tf32" for place in places] == [on] * 3
    run.close()
    assert [place.fp32_precision for place in places] == ["tf32", "ieee", "tf32"]
"""
    if not hasattr(torch.backends.cudnn, "rnn"):
        pytest.skip("torch before 2.9 has only the old ones")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_whether_a_gpu_may_use_tf32_is_read_from_torchs_own_switches() -> None:
    """In a process of its own: the old switches cannot be read any more once the new ones are written."""
    code = """
import torch
from paceline.step.backends import allows_tf32

b, gpu = torch.backends, torch.device("cuda", 0)
places = [b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn]
capability = (9, 0)
torch.cuda.get_device_capability = lambda device: capability
assert allows_tf32(gpu), "convolutions, by default"
b.cudnn.allow_tf32 = False
assert not allows_tf32(gpu)
torch.set_float32_matmul_precision("high")
assert allows_tf32(gpu), "matrix products"
torch.set_float32_matmul_precision("highest")
b.cudnn.allow_tf32 = True
for values in (("ieee", "ieee", "tf32"), ("ieee", "tf32", "ieee"), ("tf32", "ieee", "ieee"), ("ieee", "ieee", "ieee")):
    for place, value in zip(places, values):
        place.fp32_precision = value
    assert allows_tf32(gpu) is ("tf32" in values), values
for place in places:
    place.fp32_precision = "none"
for value in ("tf32", "ieee"):
    b.fp32_precision = value  # which all of them inherit
    assert allows_tf32(gpu) is (value == "tf32")
b.fp32_precision = "tf32"
assert not allows_tf32(torch.device("cpu"))
capability = (7, 5)
assert not allows_tf32(gpu), "no such arithmetic"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- channels_last

G = torch.Generator().manual_seed(0)
IMAGES = torch.randn(24, 3, 6, 6, generator=G, dtype=torch.float64)
LABELS = torch.randint(2, (24,), generator=G)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).double()


def loss_fn(model: Any, batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def trained(channels_last: bool, epochs: int, folder: Path | None, fused: bool) -> tuple[nn.Module, Any]:
    run = paceline.start(device="cpu", channels_last=channels_last, progress="off")
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    kept = [id(p) for p in model.parameters()]
    data = TensorDataset(IMAGES, LABELS)
    paceline.fit(model, loss_fn, data, optimizer=optimizer, global_batch=8, epochs=epochs, checkpoints=folder, run=run)
    assert [id(p) for p in model.parameters()] == kept
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) is channels_last
    run.close()
    return model, optimizer


def close(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=name)


def equal(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.conformance
@pytest.mark.parametrize("fused", [False, True])
def test_channels_last_is_the_same_model_and_its_checkpoints_fit_both_ways(fused: bool, tmp_path: Path) -> None:
    """fused: an optimizer that goes through memory without looking at strides: its state must lie as the weights do."""
    plain, _ = trained(False, 4, None, fused)
    last, _ = trained(True, 4, None, fused)
    close(last, plain)
    for first, then in ((True, True), (True, False), (False, True)):
        folder = tmp_path / f"{first} {then}"
        half, before = trained(first, 2, folder, fused)
        run = paceline.start(device="cpu", channels_last=then, progress="off")
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        run.prepare(model, optimizer)
        run.restore(folder)
        equal(model, half)
        for p, q in zip(model.parameters(), half.parameters(), strict=True):
            for key, value in before.state[q].items():
                kept = optimizer.state[p][key]
                assert torch.equal(kept, value)
                assert kept.dim() == 0 or kept.stride() == p.stride()
        run.close()
        whole, _ = trained(then, 4, folder, fused)
        if first and then:
            equal(whole, last)
        close(whole, plain)
