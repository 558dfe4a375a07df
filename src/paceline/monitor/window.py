"""What a process has logged since the last write: weighted sums by key, collected without reading the device.

A number is added up on the host at once. A tensor on an accelerator is only kept, and read into a sum on that device
with many others later: a call of `run.log` starts no kernel and waits for nothing. A tensor that was changed in place
in between would give a wrong mean, so that its version is compared.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.strategies.base import Weight
from paceline.train.step import Seen

LOSS = "\0loss"  # followed by the number of the backward call; no key of a user's begins so
CALLS = 8  # backward calls of a micro-batch that are told apart; later ones count as the last of these
FOLD_AT = 256  # kept tensors that are read into a sum together


_LOSSES = [f"{LOSS}{call}" for call in range(CALLS)]


class _Kept(NamedTuple):
    value: Tensor  # 0-dim
    weight: float | Tensor
    summed: bool  # the value is a sum over `weight` things already, and not their mean
    version: int | None


class Window:
    """Sums of value x weight, and of weight, by key. Keys stay where a weight is 0, as on an empty shard, so that they
    are alike on all ranks; the value there, a mean over nothing, is left out."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wide = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._host: dict[str, list[float]] = {}  # key -> [sum of value x weight, sum of weight]
        self._kept: dict[str, list[_Kept]] = {}
        self._sums: dict[str, Tensor] = {}  # key -> (2,) on the device

    def __bool__(self) -> bool:
        return bool(self._host)

    @property
    def keys(self) -> list[str]:
        return sorted(self._host)

    def add(self, key: str, value: Any, weight: float | Tensor) -> None:
        """A value that is a mean over `weight` things."""
        sums = self._host.setdefault(key, [0.0, 0.0])
        if isinstance(weight, Tensor) and weight.device.type == "cpu":
            weight = float(weight)
        if isinstance(value, Tensor) and value.device.type == "cpu":
            value = float(value)
        if isinstance(weight, float | int):
            if not weight:
                return
            if not isinstance(value, Tensor):
                sums[0] += value * weight
                sums[1] += weight
                return
        self._keep(key, _Kept(torch.as_tensor(value), weight, False, _version(value)))

    def add_losses(self, losses: Iterable[Seen]) -> None:
        """What the step has seen. A loss that the script changed in place since is left out."""
        for call, value, count, request, summed, version in losses:
            key = _LOSSES[min(call, CALLS - 1)]
            sums = self._host.get(key)
            if sums is None:
                sums = self._host[key] = [0.0, 0.0]
            weight: Weight
            if count is None:
                parts = request.parts
                weight = len(parts[0].indices) if len(parts) == 1 else request.examples
                if not weight:
                    continue
            else:
                weight = count
            if value._version != version:
                continue
            if value.device.type != "cpu":
                self._keep(key, _Kept(value, weight, summed, version))
            elif number := float(weight):
                sums[0] += value.item() if summed else value.item() * number
                sums[1] += number

    def take(self, other: Window) -> None:
        """Adds what another window has."""
        for key, (top, bottom) in other._host.items():
            sums = self._host.setdefault(key, [0.0, 0.0])
            sums[0] += top
            sums[1] += bottom
        for key, kept in other._kept.items():
            self._kept.setdefault(key, []).extend(kept)
        for key, pair in other._sums.items():
            self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def _keep(self, key: str, kept: _Kept) -> None:
        waiting = self._kept.setdefault(key, [])
        waiting.append(kept)
        if len(waiting) >= FOLD_AT:
            self._fold(key)

    def _fold(self, key: str) -> None:
        kept = self._kept.pop(key)
        same = [item for item in kept if _version(item.value) == item.version]
        if len(same) < len(kept) and not key.startswith(LOSS):
            raise UsageError(
                f"run.log({key}=tensor): the tensor was changed in place after it was logged and before it was read, "
                f"some steps later. Log a copy of it: run.log({key}=tensor.clone())."
            )
        if not same:
            return
        kept = same
        values = self._column([item.value for item in kept])
        weights = self._column([item.weight for item in kept])
        factors = self._column([1.0 if item.summed else item.weight for item in kept])
        pair = torch.stack([torch.where(weights > 0, values * factors, 0.0).sum(), weights.sum()])
        self._sums[key] = self._sums[key] + pair if key in self._sums else pair

    def _column(self, items: list[Any]) -> Tensor:
        """(len(items),) on the device; numbers travel there through pinned memory, without waiting."""
        if not any(isinstance(item, Tensor) for item in items):
            return upload(torch.tensor(items, dtype=self._wide), self._device)
        first = items[0]
        alike = all(isinstance(x, Tensor) and (x.dtype, x.device) == (first.dtype, first.device) for x in items)
        if alike:
            return torch.stack([x.reshape(()) for x in items]).to(self._device, self._wide)
        tensors = [torch.as_tensor(item) for item in items]
        return torch.stack([x.reshape(()).to(self._device, self._wide, non_blocking=True) for x in tensors])

    def pairs(self, keys: Iterable[str]) -> tuple[list[float], dict[int, Tensor]]:
        """[sum, weight, sum, weight, ...] of the host's part in the order of the keys, and the device's part of those
        keys that have one, by place."""
        for key in list(self._kept):
            self._fold(key)
        host: list[float] = []
        device: dict[int, Tensor] = {}
        for place, key in enumerate(keys):
            host += self._host[key]
            if key in self._sums:
                device[place] = self._sums[key]
        return host, device


def means(sums: Mapping[str, Sequence[float]]) -> tuple[float | None, dict[str, float]]:
    """Of (sum, weight) by key: the loss, which is the sum over the backward calls of their means (None where there was
    no call); and the mean of each logged key, NaN where nothing counted."""
    ratios = {key: top / bottom if bottom else float("nan") for key, (top, bottom) in sums.items()}
    losses = [value for key, value in ratios.items() if key.startswith(LOSS)]
    values = {key: value for key, value in ratios.items() if not key.startswith(LOSS)}
    return (sum(losses) if losses else None), values


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _version(value: Any) -> int | None:
    return None if not isinstance(value, Tensor) or value.is_inference() else value._version


def checked(values: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """What `run.log` was given, as one dict of numbers and detached 0-dim tensors. Raises UsageError."""
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
            count = getattr(value, "loss_count", None)
            value = value.detach()
            if count is not None:
                value.loss_count = count  # type: ignore[attr-defined]  # as the loss of forward_backward has it
        elif not isinstance(value, numbers.Real):
            raise UsageError(f"run.log({key}={value!r}): a number or a 0-dim tensor is needed.")
        else:
            value = float(value)
        logged[key] = value
    return logged
