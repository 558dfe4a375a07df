"""Weighted sums of the values that a process has logged since the last exchange, without waiting for the device."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.metrics.weighted_sum import WeightedSum
from paceline.step.loss import LossRecord
from paceline.strategies.base import Weight

# The key of a loss: this prefix, the number of the backward call, and ".TERM" for a further term. No user's key has it.
LOSS = "\0loss"
CALLS = 8  # number of keys for the losses of a micro-batch; further backward calls share the last key

_LOSSES = [f"{LOSS}{call}" for call in range(CALLS)]
_CHANGED = (
    "run.log({key}=tensor): the tensor was changed in place after it was logged and before it was read, some steps "
    "later. Log a copy of it: run.log({key}=tensor.clone())."
)


class Window:
    """For each key, the sum of value x weight and the sum of weight.

    On an empty shard a value is a mean over nothing. It is left out, but its key stays, with weight 0, so that all
    ranks have the same keys.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, WeightedSum] = {}

    def __bool__(self) -> bool:
        return bool(self._sums)

    @property
    def keys(self) -> list[str]:
        return sorted(self._sums)

    def _sum(self, key: str, changed: str) -> WeightedSum:
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = WeightedSum(self._device, changed)
        return found

    def add(self, key: str, value: Any, weight: Weight) -> None:
        """Add a mean over `weight` items."""
        self._sum(key, _CHANGED.format(key=key)).add(value, weight)

    def add_losses(self, losses: Iterable[LossRecord]) -> None:
        """Add the losses that the step has recorded, except losses that the script has changed in place since then."""
        for call, value, count, request, summed, version, term in losses:
            weight: Weight
            if count is not None:
                weight = count
            else:
                parts = request.parts
                weight = len(parts[0].indices) if len(parts) == 1 else request.examples
            key = _LOSSES[min(call, CALLS - 1)]
            self._sum(f"{key}.{term}" if term else key, "").add(value, weight, summed=summed, version=version)

    def triples(self, keys: Iterable[str]) -> tuple[list[float], dict[int, Tensor]]:
        """Return the sums of these keys as (host, device).

        host: a flat list with three numbers per key: sum, weight, and the rest of the sum. device: the same three
        numbers as a tensor, by the position of the key, for keys with sums on the device.
        """
        host: list[float] = []
        device: dict[int, Tensor] = {}
        for place, key in enumerate(keys):
            sums = self._sums[key]
            sums.fold()
            host += sums.host
            if sums.device is not None:
                device[place] = sums.device
        return host, device

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return this process's (sum, weight) by key. Waits for the device."""
        host, device = self.triples(self.keys)
        found = {}
        for place, key in enumerate(self.keys):
            top, weight, rest = host[3 * place : 3 * place + 3]
            if place in device:
                top, weight, rest = (a + b for a, b in zip((top, weight, rest), device[place].tolist(), strict=True))
            found[key] = top + rest, weight
        return found


def means(sums: Mapping[str, Sequence[float]]) -> tuple[float | None, dict[str, float]]:
    """Return the loss, and the mean of each logged key (NaN if its weight is 0). sums: (sum, weight) by key.

    The loss is the sum of the means of all backward calls; None if there was no call.
    """
    ratios = {key: top / bottom if bottom else float("nan") for key, (top, bottom) in sums.items()}
    losses = [value for key, value in ratios.items() if key.startswith(LOSS)]
    values = {key: value for key, value in ratios.items() if not key.startswith(LOSS)}
    return (sum(losses) if losses else None), values


def checked(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `run.log` as one dict of numbers and detached 0-dim tensors. Raises UsageError."""
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"run.log takes a dict or keywords, such as run.log(accuracy=0.9), not {values!r}.")
    logged: dict[str, Any] = {}
    for key, value in {**(values or {}), **named}.items():
        if not isinstance(key, str) or not key or "\0" in key or "\n" in key:
            raise UsageError(f"run.log: the name {key!r} is not a non-empty string of one line.")
        if isinstance(value, Tensor):
            if value.dim() or value.is_complex():
                raise UsageError(
                    f"run.log({key}=...): a tensor of shape {tuple(value.shape)} and {value.dtype} is not one number. "
                    "Log its mean: value.mean()."
                )
            original, value = value, value.detach()
            for name in ("loss_count", "loss_parts"):  # attributes of the loss of forward_backward
                if hasattr(original, name):
                    setattr(value, name, getattr(original, name))
        elif not isinstance(value, numbers.Real):
            raise UsageError(f"run.log({key}={value!r}): pass a number or a 0-dim tensor.")
        else:
            value = float(value)
        logged[key] = value
    return logged
