"""Losses over tokens: each process computes its own tokens' losses, and the sums are added over the group.

A mean is divided by the number of tokens (or the sum of their weights) of the whole batch, so it is exact even if the
processes hold unequal numbers of tokens with labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.comm.replicas import differentiable_sum
from paceline.strategies.sequence.sequence_rules import Args, Kwargs, rule
from paceline.strategies.sequence.sequence_shard import SequenceShard

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


@rule("cross_entropy nll_loss")
def _token_loss(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """input: (tokens, classes) or (batch, classes, tokens); target: class indices."""
    given: Kwargs = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    scores, target = given.pop("input"), given.pop("target")
    old = given.pop("size_average", None), given.pop("reduce", None)
    classes_at = 1 if scores.dim() > 1 else 0
    if (
        not isinstance(scores, SequenceShard)
        or scores.token_dim == classes_at
        or target.is_floating_point()
        or target.dim() != scores.dim() - 1
        or old != (None, None)
    ):
        return NotImplemented
    dim, cut = scores.token_dim - (scores.token_dim > classes_at), scores.cut
    if isinstance(target, SequenceShard) and target.token_dim == dim and target.cut == cut:
        own = target.held
    elif not isinstance(target, SequenceShard) and target.size(dim) == cut.whole:
        own = cut.part(target, dim)
    else:
        return NotImplemented
    reduction = given.pop("reduction", "mean")
    if reduction == "none":
        return SequenceShard(func(scores.held, own, reduction="none", **given), dim, cut)
    total = differentiable_sum(func(scores.held, own, reduction="sum", **given), cut.group)
    if reduction == "sum":
        return total
    counted = _counted(own, given.get("weight"), given.get("ignore_index", -100), total.dtype)
    return total / cut.group.sum(counted)


def _counted(target: Tensor, weight: Tensor | None, ignored: int, dtype: torch.dtype) -> Tensor:
    """The number of targets that count, or the sum of their weights."""
    used = target != ignored
    if weight is None:
        return used.sum().to(dtype)
    return F.embedding(torch.where(used, target, 0), weight[:, None])[..., 0].mul(used).sum()


__all__: list[str] = []
