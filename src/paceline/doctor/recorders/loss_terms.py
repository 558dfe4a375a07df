"""The terms that a loss adds up, by its autograd graph: what each is divided by, and what weighs it.

Terms come in the order in which the script adds them. A term is a dict of

    count     what its sum is divided by to make a mean of it; None: nothing
    own       the number of this rank's targets; None: not known
    factor    the number that the mean is multiplied by
    outer     the numbers by which the whole sum of terms is multiplied
    inner     the numbers by which this term alone is; divided: those of them that divide it, as divisors
    kind      "mean", "sum", "weighed" or "other"
    weights   [checksum, sum, number] of the vector that weighs means over this rank's rows; or None

"weighed" is sum_e f_e * mean_rows(p_e), with f constant and not negative: the load balancing of a mixture of experts,
where f are the fractions of the tokens that each expert gets.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from paceline.doctor.recorders.graph_nodes import LOSSES, MEANS, SCALED, TRANSPARENT, children, scalar_factor
from paceline.doctor.recorders.tensor_digests import digest
from paceline.torch_private.observed import DDP_NODE, saved

_MAX_DEPTH, _MAX_TERMS = 40, 8
_MAX_WEIGHTS = 4096  # elements of a vector of weights
_SIGN = 1 << 63  # a negative number is saved as one without a sign
_SUMS = ("SumBackward0", "MeanBackward0")
_OF_ROWS = ("SumBackward1", "MeanBackward1")
_PRODUCTS = ("MmBackward0", "AddmmBackward0")
_PER_ROW = ("SoftmaxBackward0", "LogSoftmaxBackward0", "SigmoidBackward0", "IndexBackward0", "ExpBackward0")
_PICKS = ("IndexBackward0", "MaskedSelectBackward0")
_SHAPES = (*TRANSPARENT, "UnsqueezeBackward0", "ExpandBackward0", "TransposeBackward0", "PermuteBackward0",
           "TBackward0", "UnsafeViewBackward0")  # fmt: skip
_ELEMENTWISE = ("PowBackward0", "SubBackward0", "AddBackward0", "AbsBackward0", "NegBackward0", *LOSSES)

Term = dict[str, Any]
Factor = tuple[bool, float]  # is it a division? what is multiplied by


def loss_terms(root: torch.Tensor) -> list[Term]:
    """The terms of a loss; [] where it has only one that says nothing."""
    found: list[Term] = []
    _walk(root.grad_fn, [], None, found, _MAX_DEPTH)
    return found if len(found) > 1 or any(t["count"] or t["weights"] for t in found) else []


def _walk(node: Any, factors: list[Factor], outer: list[Factor] | None, found: list[Term], depth: int) -> None:
    """Add the terms below a node. factors: the numbers on the way to it, below the first sum; outer: those above it."""
    for _ in range(depth):
        if node is None or len(found) >= _MAX_TERMS:
            return
        name, below = node.name(), children(node)
        if name in ("AddBackward0", "SubBackward0") and len(below) > 1:
            if outer is None:
                factors, outer = [], factors
            for child in below:
                _walk(child, list(factors), outer, found, depth - 1)
            return
        if name in SCALED and (by := scalar_factor(node)) is not None:
            factors.append((name.startswith("Div"), by))
        elif name in LOSSES:
            found.append(_loss(node, factors, outer))
            return
        elif name in _SUMS and (parts := _stacked(below)):
            factors += [(True, 1 / len(parts))] if name in MEANS else []
            for part in parts:
                _walk(part, list(factors), outer, found, depth - 1)
            return
        elif name in _SUMS or name == "DotBackward0" or (name in _OF_ROWS and _is_vector(node)):
            found.append(_sum(node, factors, outer))
            return
        elif name not in TRANSPARENT and not name.startswith(DDP_NODE):
            break
        node = next(iter(below), None)
    found.append(_term("other", factors, outer))


def _stacked(below: list[Any]) -> list[Any]:
    """Of a total of stacked numbers, such as a loss of each layer: their nodes."""
    return children(below[0]) if len(below) == 1 and below[0].name() == "StackBackward0" else []


def _is_vector(node: Any) -> bool:
    """Does a sum over a dimension have just one?"""
    return len(saved(node, "self_sym_sizes", ())) == 1


def _loss(node: Any, factors: list[Factor], outer: list[Factor] | None) -> Term:
    """The term of a loss function."""
    reduction = saved(node, "reduction", 1)
    if reduction == 2:
        return _term("sum", factors, outer, _divisor(factors), _targets(node))
    total, given = saved(node, "total_weight"), saved(node, "self")
    count = None if total is None or reduction != 1 else float(total)
    if count is None and given is not None and _picks(node):
        count = float(given.numel())
    return _term("mean" if reduction == 1 else "other", factors, outer, count, count)


def _sum(node: Any, factors: list[Factor], outer: list[Factor] | None) -> Term:
    """The term of a sum or mean of all elements, or of a dot product."""
    weights = _weights(node if node.name() == "DotBackward0" else next(iter(children(node)), None))
    if weights is not None:
        return _term("weighed", factors, outer, weights=weights)
    if node.name() in MEANS:
        count = (float(saved(node, "self_sym_numel", 0)) or None) if _picks(node) else None
        return _term("mean", factors, outer, count, count)
    return _term("other" if node.name() == "DotBackward0" else "sum", factors, outer, _divisor(factors))


def _divisor(factors: list[Factor]) -> float | None:
    """Take out of the factors what the sum below them is divided by: the division that is nearest to it."""
    place = max((n for n, (divides, by) in enumerate(factors) if divides and by), default=None)
    return None if place is None else 1 / factors.pop(place)[1]


def _term(
    kind: str, factors: list[Factor], outer: list[Factor] | None, count: float | None = None, own: float | None = None,
    weights: list[float] | None = None,
) -> Term:  # fmt: skip
    inner, common = ([by for _, by in part] for part in (factors, outer or []))
    divided = [1 / by for divides, by in factors if divides and by]
    return {
        "kind": kind,
        "count": count,
        "own": own,
        "factor": math.prod((*inner, *common)),
        "inner": inner,
        "divided": divided,
        "outer": common,
        "weights": weights,
    }


def _targets(node: Any) -> float | None:
    """How many targets a loss with reduction="sum" counts; None where they cannot be counted."""
    target, ignored = saved(node, "target"), saved(node, "ignore_index")
    if target is None or ignored is None or saved(node, "weight") is not None:
        return None
    ignored = ignored - 2 * _SIGN if ignored >= _SIGN else ignored
    return float((target != ignored).sum())


def _picks(node: Any) -> bool:
    """Is it a mean over elements that a mask has picked, whose number differs from batch to batch?"""
    for _ in range(6):
        node = next(iter(children(node)), None)
        if node is None or node.name() in _PICKS:
            return node is not None
        if node.name() not in (*_ELEMENTWISE, *TRANSPARENT, *SCALED):
            return False
    return False


def _weights(node: Any) -> list[float] | None:
    """Of a product of a constant vector with means over this rank's rows: [checksum, sum, number of elements]."""
    while node is not None and (node.name() in TRANSPARENT or (node.name() in SCALED and scalar_factor(node))):
        node = next(iter(children(node)), None)
    if node is None or node.name() not in ("MulBackward0", "DotBackward0"):
        return None
    given = [saved(node, name) for name in ("self", "other", "tensor")]
    constants = [one for one in given if isinstance(one, torch.Tensor)]
    below = children(node)
    if len(constants) != 1 or len(below) != 1 or constants[0].requires_grad:
        return None
    vector = constants[0].detach()
    if not 2 <= vector.numel() <= _MAX_WEIGHTS or not vector.is_floating_point() or bool((vector < 0).any()):
        return None
    found = _is_of_rows(below[0], vector.numel(), _MAX_DEPTH)
    return [digest(vector), float(vector.sum()), vector.numel()] if found else None


def _is_of_rows(node: Any, columns: int, depth: int) -> bool:
    """Is it a sum or mean over the rows of a matrix, or a sum of several such, times numbers?"""
    for _ in range(depth):
        if node is None:
            return False
        name, below = node.name(), children(node)
        if name in _OF_ROWS:
            dims, shape = saved(node, "dim", ()), saved(node, "self_sym_sizes", ())
            first = any(d in (0, 2 * _SIGN - len(shape)) for d in dims)
            return first and _is_of_layer(next(iter(below), None), columns)
        if name == "AddBackward0":
            return any(_is_of_rows(child, columns, depth - 1) for child in below)
        if name not in _SHAPES and not (name in SCALED and scalar_factor(node) is not None):
            return False
        node = next(iter(below), None)
    return False


def _is_of_layer(node: Any, columns: int) -> bool:
    """Are these the outputs of a linear layer with so many of them, perhaps normalised? Then a row is one of all the
    rank's examples or tokens. (A sum over the first dimension of others may be one over time.)"""
    for _ in range(_MAX_DEPTH):
        if node is None:
            return False
        name = node.name()
        if name in _PRODUCTS:
            return tuple(saved(node, "mat2_sym_sizes", ()))[-1:] == (columns,)
        if name not in (*_PER_ROW, *_SHAPES, *SCALED):
            return False
        node = next(iter(children(node)), None)
    return False
