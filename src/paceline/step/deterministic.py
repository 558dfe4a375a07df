"""Handle operations that have no deterministic kernel, under `deterministic=True` and `reproducible=V`.

Some operations have no deterministic kernel on a GPU; torch's page on use_deterministic_algorithms lists them.

- Pooling over windows that do not overlap equals a mean over the window dimensions, and the backward of that mean is
  deterministic. `convert` makes such layers compute the mean.
- For all other operations torch raises an error that names a kernel, often in a backward, where the traceback shows no
  line of the model. `explained` finds the layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError

REFUSED = "does not have a deterministic implementation"
"""Identifies torch's error: this text is part of its message."""


def _window_mean(x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The mean over windows: (..., count x width, ...) -> (..., count, ...) for the last len(counts) dimensions."""
    first = x.dim() - len(counts)
    for number, count in enumerate(counts):
        x = x.unflatten(first + 2 * number, (count, -1))
    return x.mean([first + 2 * number + 1 for number in range(len(counts))])


def _sizes(value: Any, dims: int) -> tuple[Any, ...]:
    return (value,) * dims if isinstance(value, int) or value is None else tuple(value)


class _AdaptiveWindows:
    """Adaptive average pooling. Computes a mean over windows if each output size divides the input size."""

    dims: int
    output_size: Any

    def forward(self, x: Tensor) -> Tensor:
        sizes = x.shape[x.dim() - self.dims :]
        counts = tuple(
            size if count is None else count
            for size, count in zip(sizes, _sizes(self.output_size, self.dims), strict=True)
        )
        if x.numel() and all(size % count == 0 for size, count in zip(sizes, counts, strict=True)):
            return _window_mean(x, counts)
        return super().forward(x)  # type: ignore[misc]


class AdaptiveAvgPool1d(_AdaptiveWindows, nn.AdaptiveAvgPool1d):
    dims = 1


class AdaptiveAvgPool2d(_AdaptiveWindows, nn.AdaptiveAvgPool2d):
    dims = 2


class AdaptiveAvgPool3d(_AdaptiveWindows, nn.AdaptiveAvgPool3d):
    dims = 3


class AvgPool3d(nn.AvgPool3d):
    """Average pooling. Computes a mean over windows if they neither overlap nor leave elements out."""

    def forward(self, x: Tensor) -> Tensor:
        widths, strides, padding = (_sizes(v, 3) for v in (self.kernel_size, self.stride, self.padding))
        sizes = x.shape[-3:]
        whole = all(size % width == 0 for size, width in zip(sizes, widths, strict=True))
        if x.numel() and whole and widths == strides and not any(padding) and self.divisor_override is None:
            return _window_mean(x, tuple(size // width for size, width in zip(sizes, widths, strict=True)))
        return super().forward(x)


_EQUIVALENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.AdaptiveAvgPool1d: AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d: AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d: AdaptiveAvgPool3d,
    nn.AvgPool3d: AvgPool3d,
}


def convert(model: nn.Module) -> None:
    """Change the class of pooling layers, in place, to an exact equivalent with a deterministic backward."""
    for module in model.modules():
        equivalent = _EQUIVALENTS.get(type(module))
        if equivalent is not None:
            module.__class__ = equivalent


_REMEDIES = {
    "adaptiveavgpool": "Use an output size that divides the input size: the layer is then exactly a mean over windows.",
    "avgpool3d": "Use stride=kernel_size, no padding, and sizes that divide: the layer is then a mean over windows.",
    "upsample": "Use mode='nearest', or a transposed convolution.",
    "reflectionpad": "Pad with zeros or by replication.",
    "gridsampler": "torch.nn.functional.grid_sample calls it.",
    "nllloss": "Move the classes last and flatten: F.cross_entropy(logits.flatten(0, -2), targets.flatten()).",
    "cumsum": "Compute it in integers, or on the CPU.",
}
"""The remedy for a kernel, by the beginning of its name without underscores."""


def explained(error: BaseException, models: Iterable[nn.Module], setting: str) -> ModelError | None:
    """A better error than torch's for an operation without a deterministic kernel; None for other errors.

    setting: the setting that asks for deterministic kernels, as the user writes it.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or REFUSED not in text:
        return None
    kernel = text.partition(REFUSED)[0].strip().rpartition("\n")[2]
    plain = re.sub(r"_(backward|forward|out|frame|template|with_indices|cuda|gpu|kernel)|_", "", kernel.lower())
    found = [
        f"{name or '(the model itself)'} ({type(module).__name__})"
        for model in models
        for name, module in model.named_modules()
        if len(type(module).__name__) > 3 and plain.startswith(type(module).__name__.lower())
    ]
    listed = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    where = f"It belongs to {listed}." if found else "No layer of the model has this name: a torch function calls it."
    remedy = next((text for start, text in _REMEDIES.items() if plain.startswith(start)), "")
    return ModelError(
        f"{setting} requires deterministic kernels, but torch has none for {kernel or 'an operation'} on "
        f"{_device_of(models)}. {where} {remedy}{' ' if remedy else ''}Otherwise compute this part differently or on "
        "the CPU, or leave the setting out."
    )


def _device_of(models: Iterable[nn.Module]) -> torch.device | str:
    return next((p.device for model in models for p in model.parameters()), "this device")
