"""The kinds of losses: a mean over examples, a sum over counted things, a plain sum, or a tuple of these.

A plain sum over a global batch of `whole` examples equals `whole` times the mean, over the examples, of what each adds.
So the sum over a micro-batch times whole / (its examples) is a mean over the micro-batch's examples, and is treated as
such a mean from there on.
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
"""A backward call, for the observers of a run. A plain tuple, since one is made at every step:

(the number of the call in its micro-batch, from 0;
the loss, 0-dim and detached;
over how many things it is a mean or a sum, None: the request's examples;
the request of its yield;
whether the loss is a sum, and not a mean;
the version of the loss's tensor when it was computed;
the number of the term, of a closure that returns several)
"""


@dataclass(frozen=True)
class Total:
    """A loss that is not a mean over examples: `sum` (a scalar) over `count` things, such as tokens.

    The gradient is that of (sum of sums) / (sum of counts) over the whole global batch. count: a number or a 0-dim
    tensor, 0 where a micro-batch has none. Without it the loss is the plain sum over the global batch, divided by
    nothing, as of a criterion with reduction="sum".
    """

    sum: Tensor
    count: Weight | None = None


def terms_of(result: Any, examples: int = 1, whole: int = 1) -> list[Term]:
    """The terms of what a closure has returned. Raises UsageError for anything that is no loss.

    examples: how many the closure was given. whole: how many the global batch has.
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
    """Raises UsageError for what is no scalar loss of trained parameters."""
    if isinstance(loss, Total):
        raise UsageError(
            "paceline.Total is what a closure returns. In a loop write run.backward(total=the sum, count=its count)."
        )
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"a loss must be a scalar tensor (or paceline.Total, or a tuple of these), not {type(loss).__name__}."
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            "a loss does not depend on any parameter that is trained (it has no grad_fn): it was detached, computed "
            "under no_grad, or is a number for looking at, such as an accuracy. A tuple that a closure returns is a "
            "sum of losses: return the loss alone, and log the rest with run.log."
        )
    if loss.numel() != 1:
        raise UsageError(
            f"a loss must be a scalar, but has the shape {tuple(loss.shape)}. Take its mean over the examples; or give "
            "its sum and its count: paceline.Total(loss.sum(), loss.numel())."
        )


def _check_count(count: Any) -> None:
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise UsageError(f"count has the shape {tuple(count.shape)}: a number or a 0-dim tensor is needed.")
    elif not isinstance(count, (int, float)) or count < 0:
        raise UsageError(f"count={count!r}: a number from 0 on, or a 0-dim tensor, is needed.")


def local_loss(terms: Sequence[Sequence[Term]], examples: Sequence[int], apart: bool = False) -> Tensor:
    """(): this process's loss, detached: the sum over the terms of each term's mean over the pieces.

    The attribute `loss_count` of the tensor tells `run.mean` over how many things the loss is a mean, if not over
    examples. apart: keep the loss of each piece too (`parts_of`), so that the bits of a sum over processes do not
    depend on which process has which piece.
    """
    if apart and len(terms) > 1:
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
    """(a number, over how many things it is a mean; None: examples) of each piece whose loss `local_loss` has kept, or
    of the value itself."""
    parts: list[tuple[Any, Weight | None]] | None = getattr(value, "loss_parts", None)
    return [(value, getattr(value, "loss_count", None))] if parts is None else parts


def term_losses(
    loss: Tensor, terms: Sequence[Sequence[Term]], examples: Sequence[int], apart: bool
) -> list[tuple[int, Tensor, Weight | None]]:
    """(the number of a term, its loss on this process, over how many things that is a mean) for the terms of `loss`.

    loss: what `local_loss` has made of these terms. Terms over different things, such as boxes and examples, are
    combined over the processes one by one.
    """
    if len(terms[0]) == 1:
        return [(0, value, count) for value, count in parts_of(loss)]
    each = [local_loss([[piece[i]] for piece in terms], examples, apart) for i in range(len(terms[0]))]
    return [(i, value, count) for i, one in enumerate(each) for value, count in parts_of(one)]


def attach_count(loss: Tensor, examples: int) -> None:
    """Tell `run.mean` that this loss is a mean over so many examples, since the script has prefetched another batch."""
    if not hasattr(loss, "loss_count") and not hasattr(loss, "loss_parts"):
        loss.loss_count = examples  # type: ignore[attr-defined]
