"""Weighted sums of logged numbers, losses and metrics, which never wait for a device.

A number is added on the host at once. A tensor on an accelerator is deferred: it is added on that device later, with
many others. So adding a tensor starts no kernel and waits for nothing. If a deferred tensor is changed in place, the
mean would be wrong, so the tensor's version is compared.

The bits of a sum do not depend on the order of its addends or on the number of processes. Each addend is split into a
multiple of 2^-19 and a rest, which is rounded to a multiple of 2^-58. In float64, the sum of the multiples is exact up
to 2^34, and the sum of the rests is exact for up to 2^15 addends (the extraction of Rump, Ogita, Oishi 2008, "Accurate
floating-point summation", with two fixed units).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.scalars import readable, upload, wide_dtype
from paceline.errors import UsageError
from paceline.strategies.base import Weight
from paceline.torch_private.core import version_of

FOLD_AT = 256  # number of deferred tensors to add together
_UNIT, _FINE = 1.5 * 2.0**33, 1.5 * 2.0**-6  # (x + unit) - unit rounds x to 2^-19, or to 2^-58


class _Deferred(NamedTuple):
    """An addend to be added later."""

    value: Tensor  # (), a mean, or a sum if `summed`
    weight: Weight  # number of items
    summed: bool
    version: int | None  # of the tensor when it was computed; None for an inference tensor, which cannot change


class WeightedSum:
    """The sum of value x weight, the sum of the weights, and the sum of the rests.

    The sums are float64 if the device supports it. A mean over nothing (NaN or inf, with weight 0) is left out.

    Args:
        changed: the error message for a tensor that was changed in place. "": such a tensor is left out.
    """

    __slots__ = ("_changed", "_deferred", "_device", "device", "host")

    def __init__(self, device: torch.device, changed: str = "") -> None:
        self._device, self._changed = device, changed
        self.host = [0.0, 0.0, 0.0]  # the three sums over numbers
        self.device: Tensor | None = None  # (3,), the three sums over folded tensors
        self._deferred: list[_Deferred] = []

    def add(self, value: Any, weight: Weight, *, summed: bool = False, version: int | None = None) -> None:
        """Add a number or 0-dim tensor: a mean over `weight` items, or their sum if `summed`.

        Args:
            version: the tensor's version when it was computed; None: its current version.

        Raises:
            UsageError: the tensor has been changed in place since that version.
        """
        if isinstance(weight, Tensor) and readable(weight):
            weight = float(weight)
        if isinstance(value, Tensor):
            now = None if value.is_inference() else version_of(value)
            version = now if version is None else version
            if isinstance(weight, Tensor) or not readable(value):
                self._defer(_Deferred(value, weight, summed, version))
                return
            if now != version:
                self._refuse()
                return
            value = float(value)
        elif isinstance(weight, Tensor):
            self._defer(_Deferred(torch.tensor(value, dtype=torch.float64), weight, summed, 0))
            return
        if weight:
            self._add(value if summed else value * weight)
            self.host[1] += weight
        elif summed and value - value == 0:
            self._add(value)

    def _add(self, value: float) -> None:
        high = (value + _UNIT) - _UNIT
        rest = value - high
        self.host[0] += high
        if rest == rest:  # NaN if the value is inf
            self.host[2] += (rest + _FINE) - _FINE

    def clear(self) -> None:
        self.host, self.device, self._deferred = [0.0, 0.0, 0.0], None, []

    def _defer(self, kept: _Deferred) -> None:
        self._deferred.append(kept)
        if len(self._deferred) >= FOLD_AT:
            self.fold()

    def _refuse(self) -> None:
        if self._changed:
            raise UsageError(self._changed)

    @torch.no_grad()
    def fold(self) -> None:
        """Add the deferred tensors to `device`."""
        kept, self._deferred = self._deferred, []
        same = [item for item in kept if item.value.is_inference() or version_of(item.value) == item.version]
        if len(same) < len(kept):
            self._refuse()
        if not same:
            return
        values = self._column([item.value for item in same])
        weights = self._column([item.weight for item in same])
        summed = self._column([float(item.summed) for item in same]) > 0
        counts = (weights > 0) | (summed & values.isfinite())
        parts = torch.where(counts, torch.where(summed, values, values * weights), 0.0)
        rest = torch.zeros_like(parts)
        if parts.dtype == torch.float64:
            high = (parts + _UNIT) - _UNIT
            rest = torch.where(high.isfinite(), ((parts - high) + _FINE) - _FINE, 0.0)
            parts = high
        triple = torch.stack([parts.sum(), weights.sum(), rest.sum()])
        self.device = triple if self.device is None else self.device + triple

    def _column(self, items: Sequence[Any]) -> Tensor:
        """Return a tensor (len(items),) on the device. Numbers are copied in one transfer, which is not waited for."""
        wide = wide_dtype(self._device)
        if not any(isinstance(item, Tensor) for item in items):
            return upload(torch.tensor(items, dtype=wide), self._device)
        first = items[0]
        alike = all(isinstance(x, Tensor) and (x.dtype, x.device) == (first.dtype, first.device) for x in items)
        if alike:
            return torch.stack([x.detach().reshape(()) for x in items]).to(self._device, wide)
        on_device = [isinstance(item, Tensor) and not readable(item) for item in items]
        numbers = [0.0 if there else float(item) for item, there in zip(items, on_device, strict=True)]
        column = upload(torch.tensor(numbers, dtype=wide), self._device).unbind()
        mixed = zip(items, on_device, column, strict=True)
        return torch.stack([x.detach().reshape(()).to(self._device, wide) if there else n for x, there, n in mixed])
