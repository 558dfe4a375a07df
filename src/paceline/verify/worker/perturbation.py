"""Changes to a run for the comparison: dropout off, and weights moved by their last bit to measure rounding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.observe.patching import Patches

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def dropout_off(patches: Patches) -> None:
    """Make the dropouts of torch.nn and torch.nn.functional return their input.

    The replacements call torch's functions with training=False. The modules look these functions up at each call.
    """
    for name in _DROPOUTS:
        patches.replace(F, name, _without_dropout(getattr(F, name)))
    attention = F.scaled_dot_product_attention

    def attention_without_dropout(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **k: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **k)

    patches.replace(F, "scaled_dot_product_attention", attention_without_dropout)


def _without_dropout(function: Any) -> Any:
    def dropout(input: Tensor, *args: Any, **options: Any) -> Any:
        options = {key: value for key, value in options.items() if key not in ("training", "p")}
        return function(input, 0.5, False, *args[2:], **options)

    return dropout


def recurrent_dropout_off(model: nn.Module) -> None:
    """Turn off the dropout of torch's recurrent layers, which draw inside their kernels."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def nudge_weights(models: Sequence[dict[str, Any]], parameters: Collection[str], seed: int) -> None:
    """Move each weight of 32 bits or more to one of its two neighbouring floating-point numbers."""
    draw = torch.Generator().manual_seed(seed)
    for number, state in enumerate(models):
        for name, value in state.items():
            if (f"{number}/{name}" if number else name) in parameters and value.dtype in (torch.float32, torch.float64):
                up = torch.rand(value.shape, generator=draw, dtype=value.dtype) < 0.5
                state[name] = torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))
