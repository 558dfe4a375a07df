"""The kinds of losses: a mean over examples, a sum over counted items, a plain sum, or a tuple of these.

A plain sum over a global batch of `whole` examples equals `whole` times the mean of the examples' losses. So the sum
over a micro-batch of n examples, times whole / n, is treated as a mean over the micro-batch's examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.scalars import scalar, wide_dtype
from paceline.data.batch_plan import Request
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight

LossRecord = tuple[int, Tensor, Weight | None, Request, bool, int, int]
"""A backward call, for the observers of a run. A plain tuple, since every step makes one:

(the number of the call in its micro-batch, from 0;
the loss, 0-dim and detached;
the number of items in the loss; None: the number of examples in the request;
the request of its yield;
whether the loss is a sum rather than a mean;
the version of the loss's tensor when it was computed;
the number of the term, if the closure returns several)
"""


@dataclass(frozen=True)
class Total:
    """A loss that is not a mean over examples: `sum` (a scalar) over `count` items, such as tokens.

    The gradient is that of (sum of sums) / (sum of counts) over the whole global batch. count: a number or a 0-dim
    tensor; 0 if a micro-batch has no items. Without a count the loss is the plain sum over the global batch, as with
    reduction="sum".
    """

    sum: Tensor
    count: Weight | None = None


def terms_of(result: Any, examples: int = 1, whole: int = 1) -> list[Term]:
    """The terms of a closure's result. Raises UsageError for anything that is not a loss.

    examples: the number of examples in the closure's batch. whole: the number of examples in the global batch.
    """
    if isinstance(result, Total):
        return [sum_term(result.sum, result.count, examples, whole)]
    if isinstance(result, (tuple, list)):
        return [term for item in result for term in terms_of(item, examples, whole)]
    return [mean_term(result, None)]


def mean_term(loss: Any, count: Weight | None) -> Term:
    check_loss(loss)
    if count is None:
        return Term(loss, None)
    _check_count(count)
    return Term(loss * count, count)


def sum_term(total: Any, count: Weight | None, examples: int, whole: int) -> Term:
    check_loss(total)
    if count is None:
        return Term(total * (whole / examples if examples else 0.0), None)
    _check_count(count)
    return Term(total, count)


def check_loss(loss: Any) -> None:
    """Raises UsageError unless this is a scalar loss that depends on trained parameters."""
    if isinstance(loss, Total):
        raise UsageError(
            "paceline.Total is only for the result of a closure. In a loop write run.backward(total=sum, count=count)."
        )
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"a loss must be a scalar tensor (or paceline.Total, or a tuple of these), not {type(loss).__name__}."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            "a loss does not depend on any trained parameter (it has no grad_fn): it was detached, computed under "
            "no_grad, or is only a metric, such as an accuracy. A tuple that a closure returns is a sum of losses: "
            "return the loss alone, and log the rest with run.log."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"a loss must be a scalar, but this loss has the shape {tuple(loss.shape)}. Take its mean over the "
            "examples, or give its sum and its count: paceline.Total(loss.sum(), loss.numel())."
        )


def _check_count(count: Any) -> None:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise UsageError(f"count has the shape {tuple(count.shape)}. Give a number or a 0-dim tensor.")
    elif not isinstance(count, (int, float)) or count < 0:
        raise UsageError(f"count={count!r}: give a number of at least 0, or a 0-dim tensor.")


def local_loss(terms: Sequence[Sequence[Term]], examples: Sequence[int], keep_pieces: bool = False) -> Tensor:
    """(): this process's loss, detached. It is the sum of the terms, each averaged over the pieces.

    If the loss is not a mean over examples, the tensor's attribute `loss_count` is its count, for `run.mean`.
    keep_pieces: also keep the loss of each piece (`parts_of`), so that the bits of a sum over processes do not depend
    on which process has which piece.
    """
    if keep_pieces and len(terms) > 1:
        loss = local_loss(terms, examples)
        each = [local_loss([its], [n]) for its, n in zip(terms, examples, strict=True)]
        loss.loss_parts = [  # type: ignore[attr-defined]
            (part, getattr(part, "loss_count", n)) for part, n in zip(each, examples, strict=True)
        ]
        return loss
    if len(terms) == 1 and len(terms[0]) == 1 and terms[0][0].count is None:
        return terms[0][0].value
    with torch.no_grad():
        parts: list[Tensor] = []
        for column in zip(*terms, strict=True):
            if column[0].count is None:
                weights: list[Any] = list(examples)
                values = [
                    term.value * n if n else term.value.new_zeros(()) for term, n in zip(column, weights, strict=True)
                ]
            else:
                weights = [term.count for term in column]
                values = [term.value for term in column]
            device = values[0].device
            wide = wide_dtype(device)
            if any(isinstance(w, Tensor) for w in weights):
                whole = torch.stack([scalar(w, wide, device) for w in weights]).sum()
            else:
                whole = scalar(sum(weights), wide, device)
            top = torch.stack([value.to(device).reshape(()) for value in values]).sum()
            parts.append(top / whole.to(top.dtype))
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if len(parts) == 1 and terms[0][0].count is not None:
            loss.loss_count = whole  # type: ignore[attr-defined]
        return loss


def parts_of(value: Any) -> list[tuple[Any, Weight | None]]:
    """(loss, count) of each piece, if `local_loss` kept the pieces; otherwise one pair, for `value` itself.

    A count of None is the number of examples.
    """
    parts: list[tuple[Any, Weight | None]] | None = getattr(value, "loss_parts", None)
    return [(value, getattr(value, "loss_count", None))] if parts is None else parts


def term_losses(
    loss: Tensor, terms: Sequence[Sequence[Term]], examples: Sequence[int], keep_pieces: bool
) -> list[tuple[int, Tensor, Weight | None]]:
    """(term number, the term's loss on this process, its count) for each term of `loss`.

    loss: the result of `local_loss` for these terms. Each term is combined over the processes separately, since terms
    may have different counts, such as boxes and examples.
    """
    if len(terms[0]) == 1:
        return [(0, value, count) for value, count in parts_of(loss)]
    each = [local_loss([[piece[i]] for piece in terms], examples, keep_pieces) for i in range(len(terms[0]))]
    return [(i, value, count) for i, one in enumerate(each) for value, count in parts_of(one)]


def attach_count(loss: Tensor, examples: int) -> None:
    """Attach the number of examples to a loss, for `run.mean`, if the script has already fetched another batch."""
    if not hasattr(loss, "loss_count") and not hasattr(loss, "loss_parts"):
        loss.loss_count = examples  # type: ignore[attr-defined]
