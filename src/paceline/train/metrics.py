"""Numbers over all processes: exact under uneven and empty shards, and never a mean of means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.errors import UsageError


def total(values: Any, device: torch.device) -> Any:
    """The sum over all processes. values: a number, a tensor (same shape everywhere), or a dict of these."""
    if isinstance(values, dict):
        return {key: total(value, device) for key, value in values.items()}
    if isinstance(values, (bool, int, float)):
        exact = torch.int64 if isinstance(values, int) else torch.float64
        return collectives.all_reduce(torch.tensor(values, dtype=exact)).item()
    if isinstance(values, Tensor):
        summed = values.detach().to(torch.int64) if values.dtype == torch.bool else values.detach().clone()
        return collectives.all_reduce(summed)
    raise UsageError(f"run.sum takes a number, a tensor, or a dict of these, not {type(values).__name__}.")


def ratio(numerator: Any, denominator: Any, device: torch.device) -> float:
    """Sum of numerators / sum of denominators over all processes, both added in float64. NaN where nothing counts."""
    pair = torch.stack([_wide(numerator), _wide(denominator)])
    top, bottom = collectives.all_reduce(pair).tolist()
    return top / bottom if bottom else float("nan")


def mean(values: Any, examples: Callable[[], int], device: torch.device) -> Any:
    """The mean over the examples of all processes.

    values: a tensor with an example in each row, of which each process may have another number, or none; or a number or
    0-dim tensor that is already the mean over this process's current batch; or a dict of these.
    """
    if isinstance(values, dict):
        return {key: mean(value, examples, device) for key, value in values.items()}
    if isinstance(values, Tensor) and values.dim() > 0:
        return ratio(values.detach().double().sum(), values.numel(), device)
    if not isinstance(values, (Tensor, int, float)):
        raise UsageError(f"run.mean takes a number, a tensor, or a dict of these, not {type(values).__name__}.")
    count = _wide(getattr(values, "loss_count", None) if isinstance(values, Tensor) else None, examples)
    value = _wide(values)
    return ratio(torch.where(count > 0, value * count, 0.0), count, device)  # a mean over nothing is NaN: leave it out


def _wide(value: Any, otherwise: Callable[[], int] | None = None) -> Tensor:
    """A 0-dim float64 tensor on the CPU."""
    if value is None and otherwise is not None:
        value = otherwise()
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).reshape(())
    return torch.tensor(value, dtype=torch.float64)
