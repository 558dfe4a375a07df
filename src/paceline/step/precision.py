"""Precision: the floating-point types of a model's computation.

fp32         no change.
bf16, fp16   matrix products and convolutions in 16 bits (torch.autocast); parameters and optimizer state are unchanged.
             fp16 has 5 exponent bits, so losses are scaled up, and gradients back down. The scale is halved when
             a gradient overflows (that step is skipped), and doubled after 2,000 steps without an overflow:
             Micikevicius et al. 2018, "Mixed Precision Training", section 3.2, with the constants of
             torch.amp.GradScaler.
bf16-params  parameters, gradients and optimizer state in bf16 too.

In the loop form a model's forward runs under autocast and converts its 16-bit outputs to fp32 (unless
fp32_outputs=False), so the loss is computed in fp32. A closure runs under autocast as a whole, including all methods of
the model that it calls. In a closure, and if the script itself calls the model under autocast, outputs keep their type,
so the same kernels run as with torch.autocast alone.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-params": torch.bfloat16}


class Precision:
    """The chosen precision on the chosen device."""

    def __init__(self, name: str, device: torch.device, *, fp32_outputs: bool = True) -> None:
        self.name, self._device, self._fp32_outputs = name, device, fp32_outputs
        self.dtype = DTYPES.get(name)  # autocast's dtype; None: fp32, without autocast
        self.scaler = LossScaler() if name == "fp16" else None

    def autocast(self) -> AbstractContextManager[Any]:
        """A context in which models compute in this precision."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, self.dtype)

    def convert(self, model: nn.Module) -> None:
        """Make the model compute in this precision, in place: its class becomes a subclass."""
        if self.dtype is None:
            return
        if self.name == "bf16-params":
            model.to(self.dtype)
        model.__class__ = _autocast_class(type(model), self._device.type, self.dtype, self._fp32_outputs)


class LossScaler:
    """The scale of fp16 losses. One scale for all optimizers, updated once per global batch."""

    GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000

    def __init__(self) -> None:
        self.scale = 2.0**16
        self._good = 0  # global batches in a row without an overflow
        self._stepped = self._overflowed = False  # whether this global batch had an update, or an overflow

    def record(self, overflowed: bool) -> None:
        """Record whether the gradients of an optimizer's update overflowed."""
        self._stepped = True
        self._overflowed |= overflowed

    def update(self) -> None:
        """Adapt the scale. Called once per global batch, after its updates."""
        if self._overflowed:
            self.scale, self._good = max(self.scale * self.BACKOFF, 2.0**-14), 0
        elif self._stepped:
            self._good += 1
            if self._good == self.GROWTH_INTERVAL:
                self.scale, self._good = min(self.scale * self.GROWTH, 2.0**30), 0
        self._stepped = self._overflowed = False

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self._good, "stepped": self._stepped, "overflowed": self._overflowed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._good = state["scale"], state["good"]
        self._stepped, self._overflowed = state["stepped"], state["overflowed"]


def _autocast_class(cls: type[nn.Module], device_type: str, dtype: torch.dtype, fp32_outputs: bool) -> type[nn.Module]:
    """A subclass whose forward runs under autocast.

    A subclass rather than a hook or an attribute, since `deepcopy` keeps the class (so an EMA copy computes with its
    own weights) and torch.compile can trace it.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        within = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, dtype):
            output = cls.forward(self, *args, **kwargs)
        return to_fp32(output) if fp32_outputs and not within else output

    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _blank, (cls,), _state_of(self)  # pickle the user's class, which can be imported

    own: dict[str, Any] = {"forward": forward, "__reduce_ex__": reduce}
    if not hasattr(cls, "__deepcopy__"):
        own["__deepcopy__"] = _deepcopy
    made = type(cls.__name__, (cls,), own)
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def _blank(cls: type[nn.Module]) -> nn.Module:
    return cls.__new__(cls)


def _state_of(model: nn.Module) -> Any:
    return model.__getstate__() if hasattr(model, "__getstate__") else model.__dict__


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    copied = _blank(type(self))
    memo[id(self)] = copied
    copied.__setstate__(copy.deepcopy(_state_of(self), memo))
    return copied


def to_fp32(output: Any) -> Any:
    """Convert the 16-bit tensors of a model's output to fp32, also within tuples, lists and dicts."""
    if isinstance(output, Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*map(to_fp32, output))
    if isinstance(output, (tuple, list)):
        return type(output)(map(to_fp32, output))
    if isinstance(output, dict):
        converted = {key: to_fp32(value) for key, value in output.items()}
        if type(output) is dict:
            return converted
        for key, value in converted.items():  # a subclass of dict, such as transformers' ModelOutput
            output[key] = value
    return output
