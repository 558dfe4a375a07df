"""Numbers on a device: their dtype, and how to create them without waiting.

`torch.as_tensor(3, device="cuda")` makes a tensor in pageable host memory and copies it. The host then waits until the
device has finished all enqueued work. Filling a tensor on the device starts one kernel and does not wait; a copy from
pinned memory does not wait either.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point dtype that the device supports."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def readable(tensor: Tensor) -> bool:
    """Whether the tensor can be read without waiting for a device. Tests patch this to simulate an accelerator."""
    return tensor.device.type == "cpu"


def scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(): a number or a one-element tensor, detached and moved to `device`. Does not wait for any device."""
    if isinstance(value, Tensor):
        if value.device == device or not readable(value):
            return value.detach().to(device, dtype).reshape(())
        value = value.item()
    return torch.full((), value, dtype=dtype, device=device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
