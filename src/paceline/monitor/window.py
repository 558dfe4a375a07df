"""What a process has logged since the last exchange: weighted sums by key, collected without reading the device."""

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

# begins the keys of losses, before the number of the backward call and of a further term; no user's key begins so
LOSS = "\0loss"
CALLS = 8  # backward calls of a micro-batch that have a key of their own; later ones share the last one's

_LOSSES = [f"{LOSS}{call}" for call in range(CALLS)]
_CHANGED = (
    "run.log({key}=tensor): the tensor was changed in place after it was logged and before it was read, some steps "
    "later. Log a copy of it: run.log({key}=tensor.clone())."
)


class Window:
    """Sums of value x weight, and of weight, by key.

    A key stays where its weight is 0, as on an empty shard, so that the keys are the same on all ranks. The value
    there, a mean over nothing, is left out.
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
        """Add a value that is a mean over `weight` things."""
        self._sum(key, _CHANGED.format(key=key)).add(value, weight)

    def add_losses(self, losses: Iterable[LossRecord]) -> None:
        """Add the losses that the step has recorded. A loss that the script has changed in place since is left out."""
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
        """The sums of these keys: (on the host, [sum, weight, rest of the sum] of each key in turn; place of a key ->
        the same on the device, where it has any)."""
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
        """key -> (sum, weight), of this process. Waits for the device."""
        host, device = self.triples(self.keys)
        found = {}
        for place, key in enumerate(self.keys):
            top, weight, rest = host[3 * place : 3 * place + 3]
            if place in device:
                top, weight, rest = (a + b for a, b in zip((top, weight, rest), device[place].tolist(), strict=True))
            found[key] = top + rest, weight
        return found


def means(sums: Mapping[str, Sequence[float]]) -> tuple[float | None, dict[str, float]]:
    """Of key -> (sum, weight): the loss, which is the sum over the backward calls of their means, None without a call;
    and the mean of each logged key, NaN where its weight is 0."""
    ratios = {key: top / bottom if bottom else float("nan") for key, (top, bottom) in sums.items()}
    losses = [value for key, value in ratios.items() if key.startswith(LOSS)]
    values = {key: value for key, value in ratios.items() if not key.startswith(LOSS)}
    return (sum(losses) if losses else None), values


def checked(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `run.log` as one dict of numbers and detached 0-dim tensors. Raises UsageError."""
    if values is not None and not isinstance(values, Mapping):
        raise UsageError(f"run.log takes a dict or keywords, such as run.log(accuracy=0.9), not {values!r}.")
    logged: dict[str, Any] = {}
    for key, value in {**(values or {}), **named}.items():
        if not isinstance(key, str) or not key or "\0" in key or "\n" in key:
            raise UsageError(f"run.log: the name {key!r} is not a string of one line.")
        if isinstance(value, Tensor):
            if value.dim() or value.is_complex():
                raise UsageError(
                    f"run.log({key}=...): a tensor of shape {tuple(value.shape)} and {value.dtype} is not one number. "
                    "Log its mean: value.mean()."
                )
            own, value = value, value.detach()
            for name in ("loss_count", "loss_parts"):  # as the loss of forward_backward has them
                if hasattr(own, name):
                    setattr(value, name, getattr(own, name))
        elif not isinstance(value, numbers.Real):
            raise UsageError(f"run.log({key}={value!r}): a number or a 0-dim tensor is needed.")
        else:
            value = float(value)
        logged[key] = value
    return logged
