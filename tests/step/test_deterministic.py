"""Kernels that give the same bits each time: layers with an exact equivalent, and errors that name a layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline
from paceline.errors import ModelError
from paceline.step.deterministic import convert, explained

POOLS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.AdaptiveAvgPool1d(3), (2, 4, 12)),
    (nn.AdaptiveAvgPool2d(4), (2, 3, 16, 8)),
    (nn.AdaptiveAvgPool2d((None, 1)), (2, 3, 6, 8)),
    (nn.AdaptiveAvgPool2d((2, 3)), (3, 6, 9)),
    (nn.AdaptiveAvgPool3d((1, 2, 2)), (2, 3, 4, 6, 8)),
    (nn.AvgPool3d(2), (2, 3, 4, 6, 8)),
    # no equivalent: torch's own
    (nn.AdaptiveAvgPool2d(4), (2, 3, 15, 8)),
    (nn.AvgPool3d(3, stride=2), (2, 3, 7, 7, 7)),
    (nn.AvgPool3d(2, padding=1, ceil_mode=True), (2, 3, 4, 4, 4)),
    (nn.AvgPool3d(2), (2, 3, 5, 4, 4)),
    (nn.AdaptiveAvgPool2d(2), (0, 3, 4, 4)),
]


@pytest.mark.parametrize(("pool", "shape"), POOLS, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_pooling_is_torchs(pool: nn.Module, shape: tuple[int, ...], last: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    if last and len(shape) > 3:
        x = x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    inputs = x.clone().requires_grad_(), x.clone().requires_grad_()
    theirs = pool(inputs[0])
    model = nn.Sequential(pool)
    convert(model)
    ours = model(inputs[1])
    weights = torch.randn_like(theirs)
    (theirs * weights).sum().backward()
    (ours * weights).sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-14, atol=1e-15)


def kernels_of(graph: Any) -> set[str]:
    """The names of the nodes of an autograd graph."""
    found, stack = set(), [graph]
    while stack:
        node = stack.pop()
        if node is not None:
            found.add(type(node).__name__)
            stack += [below for below, _ in node.next_functions]
    return found


@pytest.mark.parametrize("setting", [{"deterministic": True}, {"reproducible": 2}], ids=str)
def test_a_run_with_deterministic_kernels_pools_without_the_kernel_that_has_none(setting: dict[str, Any]) -> None:
    def graph(**settings: Any) -> set[str]:
        run = paceline.start(device="cpu", progress="off", **settings)
        try:
            model = run.prepare(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.AdaptiveAvgPool2d(4)))
            return kernels_of(model(torch.randn(2, 1, 8, 8)).grad_fn)
        finally:
            run.close()

    assert any("AdaptiveAvgPool2D" in name for name in graph())
    assert not any("AdaptiveAvgPool2D" in name for name in graph(**setting))


def message(kernel: str) -> str:
    """torch's, of one kernel."""
    return (
        f"{kernel} does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'. You can turn off determinism just for this operation, or you can "
        "use the 'warn_only=True' option, if that's acceptable for your application."
    )


LAYERS = nn.ModuleDict({
    "pool": nn.AdaptiveAvgPool2d(4),
    "most": nn.AdaptiveMaxPool2d(2),
    "pad": nn.ReflectionPad2d(1),
    "up": nn.Upsample(scale_factor=2, mode="bicubic"),
    "criterion": nn.CTCLoss(),
    "nll": nn.NLLLoss(),
    "bag": nn.EmbeddingBag(3, 2, mode="max"),
    "cube": nn.MaxPool3d(2),
})  # fmt: skip
KERNELS = {
    "adaptive_avg_pool2d_backward_cuda": "pool (AdaptiveAvgPool2d)",
    "adaptive_max_pool2d_backward_cuda": "most (AdaptiveMaxPool2d)",
    "reflection_pad2d_backward_cuda": "pad (ReflectionPad2d)",
    "upsample_bicubic2d_backward_out_cuda": "up (Upsample)",
    "ctc_loss_backward_gpu": "criterion (CTCLoss)",
    "nll_loss2d_forward_out_cuda_template": "nll (NLLLoss)",
    "embedding_bag_backward_cuda_max": "bag (EmbeddingBag)",
    "max_pool3d_with_indices_backward_cuda": "cube (MaxPool3d)",
    "grid_sampler_2d_backward_cuda": "grid_sample",
    "cumsum_cuda_kernel": "in integers",
    "kthvalue CUDA": "a torch function calls it",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_layer_of_a_kernel_is_named(kernel: str) -> None:
    found = explained(RuntimeError(message(kernel)), [LAYERS], "deterministic=True")
    assert isinstance(found, ModelError)
    text = str(found)
    assert text.startswith(f"deterministic=True requires deterministic kernels, but torch has none for {kernel} on ")
    assert KERNELS[kernel] in text
    assert "leave the setting out" in text


def test_other_errors_are_left_alone() -> None:
    assert explained(RuntimeError("shapes"), [LAYERS], "deterministic=True") is None
    assert explained(ValueError(message("x")), [LAYERS], "deterministic=True") is None


class AsOnCuda(torch.autograd.Function):
    """An operation whose backward has no deterministic kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(message("adaptive_max_pool2d_backward_cuda"))


@pytest.mark.parametrize("form", ["loop", "closure"])
def test_the_error_of_a_backward_is_explained(form: str) -> None:
    run = paceline.start(device="cpu", progress="off", reproducible=1)
    try:
        model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.AdaptiveMaxPool2d(1))
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.batches(lambda rows: torch.randn(len(rows), 1, 5, 5), global_batch=2)

        def loss_fn(model: Any, x: Tensor) -> Tensor:
            return AsOnCuda.apply(model(x)).mean()  # type: ignore[no-any-return]

        batches = iter(loader)
        batch = next(batches)

        def backward() -> None:
            if form == "loop":
                run.backward(loss_fn(model, batch))
            else:
                run.forward_backward(loss_fn, model, batch)

        with pytest.raises(ModelError, match=r"^reproducible=1 requires .*1 \(AdaptiveMaxPool2d\)"):
            backward()
    finally:
        run.close()


SCRIPT = """
import torch, paceline
from torch import nn
run = paceline.start(device="cpu", progress="off", deterministic=True)
model = run.prepare(nn.Sequential(nn.Linear(2, 2), nn.AdaptiveMaxPool1d(1)))
raise RuntimeError({text!r})
"""


@pytest.mark.conformance
def test_an_uncaught_error_of_a_forward_names_the_layer(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(text=message("adaptive_max_pool1d_cuda")))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "does not have a deterministic implementation" in done.stderr
    assert "It belongs to 1 (AdaptiveMaxPool1d)" in done.stderr


def test_cross_entropy_is_what_the_remedy_says() -> None:
    """The remedy for nll_loss2d computes the same loss."""
    logits, targets = torch.randn(2, 5, 3, 4), torch.randint(5, (2, 3, 4))
    moved = logits.movedim(1, -1).flatten(0, -2)
    torch.testing.assert_close(F.cross_entropy(moved, targets.flatten()), F.cross_entropy(logits, targets))
