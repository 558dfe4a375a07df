"""Attention between tokens that different processes hold.

If the group's size divides the number of heads, all-to-alls exchange tokens for heads (DeepSpeed-Ulysses):

    q, k, v   (batch, heads, tokens / size, width)  ->  (batch, heads / size, tokens, width)
    attention over all tokens, with the mask of the whole sequence
    output    (batch, heads / size, tokens, width)  ->  (batch, heads, tokens / size, width)

Otherwise keys and values are gathered, and each process computes its own queries.

Follows Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", section 3.2.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.strategies.sequence.sequence_exchange import exchange
from paceline.strategies.sequence.sequence_rules import Args, Kwargs, rule
from paceline.strategies.sequence.sequence_shard import Cut, SequenceShard, all_whole, whole

TOKENS, HEADS = -2, -3
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@rule("scaled_dot_product_attention")
def attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    given: Kwargs = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    q, k, v = (given.pop(name) for name in _NAMES[:3])
    if given.get("dropout_p"):
        raise ModelError(
            "strategy ulysses: scaled_dot_product_attention has dropout_p > 0. Its random numbers would depend on the "
            "number of devices. Set the attention's dropout to 0, or compute it as products, softmax and dropout "
            '(attn_implementation="eager" in Hugging Face).'
        )
    if not isinstance(q, SequenceShard) or q.place != TOKENS or q.cut.outer != 1:
        return NotImplemented
    mask = all_whole(given.pop("attn_mask", None))
    size, heads = q.cut.group.size, q.size(HEADS) if q.dim() == 4 else 0
    keys_split = all(isinstance(x, SequenceShard) and x.place == TOKENS and x.cut.outer == 1 for x in (k, v))
    if keys_split and heads and heads % size == 0 and k.cut == v.cut:
        return _over_heads(func, q, k, v, mask, given)
    return _over_rows(func, q, all_whole(k), all_whole(v), mask, given)


def _over_heads(func: Any, q: Any, k: Any, v: Any, mask: Tensor | None, given: Kwargs) -> SequenceShard:
    """Each process computes some heads for all tokens."""
    group, heads = q.cut.group, q.size(HEADS)
    if given.get("enable_gqa"):
        k, v = (SequenceShard(_shared(x.held, heads, group.size), x.token_dim, x.cut) for x in (k, v))
    if mask is not None and mask.dim() >= -HEADS and mask.size(HEADS) != 1:
        mask = mask.chunk(group.size, HEADS)[group.rank]
    result = func(*(to_heads(x.held, x.cut) for x in (q, k, v)), mask, **given)
    # The inverse exchange: from heads to the queries' tokens.
    own = exchange(
        result, group, result.dim() + TOKENS, q.cut.sizes, result.dim() + HEADS, [heads // group.size] * group.size
    )
    return SequenceShard(own, own.dim() + TOKENS, q.cut)


def to_heads(x: Tensor, cut: Cut) -> Tensor:
    """(.., heads, own tokens, width) -> (.., own heads, tokens, width)."""
    size = cut.group.size
    return exchange(x, cut.group, x.dim() + HEADS, [x.size(HEADS) // size] * size, x.dim() + TOKENS, cut.sizes)


def _shared(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat the heads of keys or values, if each process cannot get the same number of them.

    Query head i uses key head i // (heads / key heads), so that repeated heads stay beside each other.
    """
    own = x.size(HEADS)
    times = size // gcd(own, size)
    if heads % (own * times):
        times = heads // own
    return x if times == 1 else x.repeat_interleave(times, HEADS)


def _over_rows(func: Any, q: SequenceShard, k: Tensor, v: Tensor, mask: Tensor | None, given: Kwargs) -> SequenceShard:
    """Each process computes all heads for its own queries."""
    if given.get("is_causal"):
        given = {**given, "is_causal": False}
        rows = q.cut.first + torch.arange(q.cut.local, device=k.device)
        mask = rows[:, None] >= torch.arange(k.size(TOKENS), device=k.device)
    elif mask is not None and mask.dim() >= 2 and mask.size(TOKENS) != 1:
        mask = q.cut.part(mask, TOKENS)
    return SequenceShard(func(q.held, k, v, mask, **given), q.token_dim, q.cut)


__all__ = ["attention", "to_heads", "whole"]
