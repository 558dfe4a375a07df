"""What a loss may be: a mean over examples, a sum over counted things, a plain sum, or several of these.

A plain sum over the global batch of `whole` examples is `whole` times the mean over them of what an example adds to it.
So a micro-batch's sum times whole / (its examples) is a mean over its examples, and is treated as one from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight
from paceline.strategies.batch_plan import Request

Seen = tuple[int, Tensor, Weight | None, Request, bool, int, int]
"""A backward call, for who watches the run (a plain tuple: it is made at every step): its number in the micro-batch;
the loss, 0-dim and detached, a mean over so many things (None: over the request's examples), or, where the bool is set,
a sum over them; the version of the tensor then; which of the terms of a closure's loss it is."""


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
    """What a closure returned for so many of the `whole` examples of a global batch, as terms. Raises UsageError for
    anything that is no loss."""
    if isinstance(result, Total):
        return [sum_term(result.sum, result.count, examples, whole)]
    if isinstance(result, (tuple, list)):
        return [term for item in result for term in terms_of(item, examples, whole)]
    return [mean_term(result, None)]


def mean_term(loss: Any, count: Weight | None) -> Term:
    _check(loss)
    if count is None:
        return Term(loss, None)
    _check_count(count)
    return Term(loss * count, count)


def sum_term(total: Any, count: Weight | None, examples: int, whole: int) -> Term:
    _check(total)
    if count is None:
        return Term(total * (whole / examples if examples else 0.0), None)
    _check_count(count)
    return Term(total, count)


def _check(loss: Any) -> None:
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
    """This process's loss, detached: the sum over terms of a mean over its pieces.

    `loss_count` on the tensor says what it is a mean over, where that is not examples, for `run.mean`. apart: several
    pieces' own losses are kept too (`parts_of`), for sums whose bits do not depend on which process has which.
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
            whole = torch.stack(
                [torch.as_tensor(w, device=device, dtype=torch.float64).reshape(()) for w in weights]
            ).sum()
            top = torch.stack([value.to(device).reshape(()) for value in values]).sum()
            parts.append(top / whole.to(top.dtype))
        loss = parts[0] if len(parts) == 1 else torch.stack(parts).sum()
        if len(parts) == 1 and terms[0][0].count is not None:
            loss.loss_count = whole  # type: ignore[attr-defined]
        return loss


def parts_of(value: Any) -> list[tuple[Any, Weight | None]]:
    """A number, and what it is a mean over (None: over examples); of a loss that knows its parts, these."""
    parts: list[tuple[Any, Weight | None]] | None = getattr(value, "loss_parts", None)
    return [(value, getattr(value, "loss_count", None))] if parts is None else parts


def losses_of(
    loss: Tensor, terms: Sequence[Sequence[Term]], examples: Sequence[int], apart: bool
) -> list[tuple[int, Tensor, Weight | None]]:
    """(number of the term, its loss on this process, what that is a mean over) of what `local_loss` has made `loss` of.
    Terms over different things, such as boxes and examples, can be put together over processes only one by one."""
    if len(terms[0]) == 1:
        return [(0, value, count) for value, count in parts_of(loss)]
    each = [local_loss([[piece[i]] for piece in terms], examples, apart) for i in range(len(terms[0]))]
    return [(i, value, count) for i, one in enumerate(each) for value, count in parts_of(one)]


def tell_count(loss: Tensor, examples: int) -> None:
    """For run.mean: it is a mean over so many examples, and not over those of the batch that was fetched since."""
    if not hasattr(loss, "loss_count") and not hasattr(loss, "loss_parts"):
        loss.loss_count = examples  # type: ignore[attr-defined]
