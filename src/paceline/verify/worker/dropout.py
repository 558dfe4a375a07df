"""Dropout that drops nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from paceline.observe.patching import Patches

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


def dropout_off(patches: Patches) -> None:
    """Let the dropouts of torch.nn and torch.nn.functional return their input.

    They call torch's own functions with training=False. Modules look the functions up at each call.
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
    """Turn off the dropout of torch's recurrent layers, whose kernels draw by themselves."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
