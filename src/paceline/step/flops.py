"""Counts FLOPs: of matrix products, convolutions and attention, by the formulas of torch.utils.flop_counter.

torch has no formula for fused attention on a CPU. It is added here; its backward counts as two forwards.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.torch_private.core import TorchDispatchMode, cpu_attention, cpu_attention_backward


def _attention_flops(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    """Products of queries with keys, and of weights with values. Shapes: (batch, heads, length, width)."""
    batch, heads, length, width = query
    return int(2 * batch * heads * length * key[2] * (width + value[-1]))


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    return 2 * _attention_flops(query, key, value)


def flop_counter() -> FlopCounterMode:
    """torch's counter, which also counts fused attention on a CPU."""
    own = {cpu_attention: _attention_flops, cpu_attention_backward: _attention_backward_flops}
    return FlopCounterMode(display=False, custom_mapping=own)


class LocalFlops(TorchDispatchMode):
    """Counts the FLOPs that this process computes. flops: so far. unknown: the operator whose formula has failed.

    torch's counter gives an operator of a DTensor its global shapes, on every process. This mode lets the DTensor run
    first, and counts the operators on its local parts.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.unknown: Any = None
        self._formulas = flop_counter().flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        formula = self._formulas.get(getattr(func, "overloadpacket", func))
        if formula is not None:
            try:
                self.flops += formula(*args, **(kwargs or {}), out_val=found)
            except Exception:  # no reason to end a training
                self.unknown = func
        return found
