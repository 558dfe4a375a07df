"""Numbers on a device: in which type, and how they get there without waiting.

`torch.as_tensor(3, device="cuda")` makes a tensor in pageable memory of the host and copies it: the host waits until
the device has done all that is enqueued. To fill a tensor on the device starts one kernel and waits for nothing, and
neither does a copy from pinned memory.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type that the device computes in."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def readable(tensor: Tensor) -> bool:
    """Whether reading this tensor waits for no device. Tests replace this function to stand in for an accelerator."""
    return tensor.device.type == "cpu"


def scalar(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(): a number, or a tensor of one element, detached, on a device, without waiting for one."""
    if isinstance(value, Tensor):
        if value.device == device or not readable(value):
            return value.detach().to(device, dtype).reshape(())
        value = value.item()
    return torch.full((), value, dtype=dtype, device=device)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
