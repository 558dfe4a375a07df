"""Check hyperparameters, images and histograms, and convert them for trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.dtensor import is_sharded
from paceline.errors import UsageError


def hyperparameters(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Flatten the arguments of `run.log_hyperparameters`: {"model": {"width": 8}} becomes {"model.width": 8}.

    Values other than strings, finite numbers and booleans are converted to strings. Raises UsageError.
    """
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"run.log_hyperparameters takes a dict or keywords, such as vars(args), not {values!r}.")
    found: dict[str, str | int | float | bool] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}.{key}" if name else str(key), inner)
        elif isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.item()
        else:
            finite = isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))
            found[name] = value if finite else str(value)

    add("", {**(values or {}), **named})
    return found


def image(name: str, value: Any) -> Any:
    """Convert an image to a uint8 array (height, width, 3). Raises UsageError.

    Args:
        value: (3 or 1, height, width) or (height, width); integers from 0 to 255, or floats from 0 to 1.
    """
    pixels = _numbers_of("log_image", name, value)
    if pixels.ndim == 2:
        pixels = pixels[None]
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3) or not pixels.size:
        hint = (
            " It looks like (height, width, channels): permute(2, 0, 1)." if pixels.shape[-1:] in ((1,), (3,)) else ""
        )
        raise UsageError(
            f"run.log_image({name!r}): the image has shape {tuple(np.shape(value))}. Pass (3, height, width), "
            f"(1, height, width) or (height, width).{hint}"
        )
    if pixels.dtype.kind == "f":
        if not (np.isfinite(pixels).all() and pixels.min() >= 0 and pixels.max() <= 1):
            raise UsageError(
                f"run.log_image({name!r}): floats from {pixels.min():.3g} to {pixels.max():.3g}. Pass floats from 0 "
                "to 1: undo the normalisation, or clamp them."
            )
        pixels = (pixels * 255).round()
    elif pixels.dtype != bool and (pixels.min() < 0 or pixels.max() > 255):
        raise UsageError(f"run.log_image({name!r}): pass integers from 0 to 255, or floats from 0 to 1.")
    elif pixels.dtype == bool:
        pixels = pixels * 255
    pixels = np.broadcast_to(pixels, (3, *pixels.shape[1:]))
    return np.ascontiguousarray(pixels.transpose(1, 2, 0)).astype(np.uint8)


def histogram(name: str, value: Any) -> Any:
    """Return the finite values as a 1-dim float64 array. Raises UsageError if there are none."""
    values = _numbers_of("log_histogram", name, value).astype(np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    if not values.size:
        raise UsageError(f"run.log_histogram({name!r}): it has no finite value.")
    return values


def _numbers_of(call: str, name: Any, value: Any) -> Any:
    if not isinstance(name, str) or not name:
        raise UsageError(f"run.{call}: the name {name!r} is not a string.")
    if is_sharded(value):
        raise UsageError(
            f"run.{call}({name!r}): the tensor is sharded over the processes. Gather it on all of them first: "
            "value.full_tensor()."
        )
    if isinstance(value, Tensor):
        value = value.detach().to("cpu")
        value = value.float() if value.dtype == torch.bfloat16 else value
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise UsageError(f"run.{call}({name!r}): pass numbers, not {type(value).__name__}.")
    return array
