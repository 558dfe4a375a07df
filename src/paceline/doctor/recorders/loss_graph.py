"""Analyse a loss by its autograd graph: is it a mean, what divides it, and which terms does it add up?

The terms are in the order of the script's additions. A term is a dict of

    count     the divisor that turns its sum into a mean; None: there is none
    own       the number of this rank's targets; None: unknown
    factor    the number that multiplies the mean
    outer     the numbers that multiply the whole sum of terms
    inner     the numbers that multiply this term only; divided: the divisors among them
    kind      "mean", "sum", "weighed" or "other"
    weights   [checksum, sum, number of elements] of the vector that weights means over this rank's rows; or None

"weighed" is sum_e f_e * mean_rows(p_e), with f constant and not negative. This is the load-balancing loss of a mixture
of experts: f_e is the fraction of the tokens that expert e gets.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.observe.digests import SOME, digest
from paceline.torch_private.observed import DDP_NODE, saved

MEANS = {"MeanBackward0", "MeanBackward1"}
LOSSES = {"NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0", "MseLossBackward0", "SmoothL1LossBackward0",
          "L1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0",
          "BinaryCrossEntropyWithLogitsBackward0", "CrossEntropyLossBackward0", "KlDivBackward0",
          "SoftMarginLossBackward0", "MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}  # fmt: skip
TRANSPARENT = {"ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0",
               "NegBackward0", "RsubBackward1"}  # fmt: skip
SCALED = {"DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1"}
ADDED = ("AddBackward0", "SubBackward0")
_MIN_DIVISOR = 1.9  # a factor above 1 / this is a weight, not a division by the number of micro-batches
_DEPTH = 12  # maximum nodes between a loss and its mean
_MAX_DEPTH, _MAX_TERMS = 40, 8
_MAX_WEIGHTS = 4096  # elements of a vector of weights
_SIGN = 1 << 63  # torch saves a negative number as an unsigned one
_SUMS = ("SumBackward0", "MeanBackward0")
_OF_ROWS = ("SumBackward1", "MeanBackward1")
_PRODUCTS = ("MmBackward0", "AddmmBackward0")
_OF_TWO = (*_PRODUCTS, "BmmBackward0", "BaddbmmBackward0", "MulBackward0", "SubBackward0")
_MAX_NODES = 200
_PER_ROW = ("SoftmaxBackward0", "LogSoftmaxBackward0", "SigmoidBackward0", "IndexBackward0", "ExpBackward0")
_PICKS = ("IndexBackward0", "MaskedSelectBackward0")
_SHAPES = (*TRANSPARENT, "UnsqueezeBackward0", "ExpandBackward0", "TransposeBackward0", "PermuteBackward0",
           "TBackward0", "UnsafeViewBackward0")  # fmt: skip
_ELEMENTWISE = ("PowBackward0", "SubBackward0", "AddBackward0", "AbsBackward0", "NegBackward0", *LOSSES)

Term = dict[str, Any]
Factor = tuple[bool, float, Any]  # (is it a division?, the multiplier, the node)
Step = tuple[Any, str, list[Any]]  # (a node, its name, the nodes below it)


# --- the nodes


def _below(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _down(node: Any, depth: int = _MAX_DEPTH) -> Iterator[Step]:
    """A node and the nodes below it, following the first child."""
    for _ in range(depth):
        if node is None:
            return
        below = _below(node)
        yield node, node.name(), below
        node = next(iter(below), None)


def _opaque(node: Any) -> Any:
    """The first node that changes the values, from this node down; None if there is none."""
    return next((one for one, name, _ in _down(node) if name not in TRANSPARENT), None)


def _reduction(node: Any) -> str:
    """The reduction of a loss function: "none", "mean" or "sum"."""
    return ("none", "mean", "sum")[saved(node, "reduction", 1)]


def _factor(node: Any) -> float | None:
    """The single number that a node multiplies by; None if there is no such number."""
    value = saved(node, "other")
    value = saved(node, "self") if value is None else value
    if node.name() not in SCALED or value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    number = float(value)
    return number if not node.name().startswith("Div") else 1 / number if number else None


def _divides(node: Any) -> bool:
    """Does a node multiply by 1/2 or less?"""
    factor = _factor(node)
    return factor is not None and 0 < abs(factor) <= 1 / _MIN_DIVISOR


def _is_sum(node: Any) -> bool:
    """Is a node a sum of elements, or a loss with reduction="sum"?"""
    node = _opaque(node)
    name = "" if node is None else node.name()
    return name in ("SumBackward0", "SumBackward1") or (name in LOSSES and _reduction(node) == "sum")


# --- the loss as a whole


def loss_kind(root: torch.Tensor) -> str:
    """Classify a loss. "mean": a mean, or a sum of means with a weight above 1/2 on at least one of them. "divided": a
    mean times 1/2 or less, or a sum of such means. "other": anything else."""
    return _kind(root.grad_fn, _DEPTH)


def _kind(node: Any, depth: int) -> str:
    for one, name, below in _down(node, depth):
        if name in MEANS:
            return "divided" if any(map(_divides, below)) else "mean"
        if name in LOSSES and _reduction(one) == "mean":
            return "mean"
        if name in ADDED:
            kinds = {_kind(child, depth - 1) for child in below}
            return next((kind for kind in ("other", "mean") if kind in kinds), "divided")
        if name in SCALED:
            factor = _factor(one)
            if factor is not None and any(math.isclose(factor * n, 1.0, rel_tol=1e-6) for n in _counts(below)):
                return "mean"
            if _divides(one) or (factor is None and name.startswith("Div")):
                return "divided"
        elif name not in TRANSPARENT:
            return "other"
    return "other"


def _counts(nodes: list[Any]) -> tuple[int, ...]:
    """The number of elements and the number of examples that a node sums. Dividing the sum by either gives a mean."""
    node = _opaque(next(iter(nodes), None))
    name = "" if node is None else node.name()
    if name == "SumBackward0":
        shape = tuple(saved(node, "self_sym_sizes", ()))
        return (math.prod(shape), shape[0]) if shape else ()
    target = saved(node, "target")
    if name in LOSSES and _reduction(node) == "sum" and target is not None and target.dim():
        return (target.numel(), target.shape[0])
    return ()


def loss_divisor(root: torch.Tensor) -> list[float] | None:
    """[divisor that turns the sum in a loss into a mean, factor that multiplies the mean]; None if there is none.

    The divisor is the number of targets that are not ignored, the total weight of their classes, or the divisor that
    the script applies to a sum. If several losses are added, the first one with a divisor counts.
    """
    found = _divisor(root.grad_fn, _DEPTH)
    return None if found is None else found[:2]


def _divisor(node: Any, depth: int) -> list[Any] | None:
    """[divisor, factor, the node that divides]."""
    factor = 1.0
    for one, name, below in _down(node, depth):
        if name in LOSSES:
            total = saved(one, "total_weight")
            return [float(total), factor, one] if total is not None and _reduction(one) == "mean" else None
        if name in ADDED:
            parts = (_divisor(child, depth - 1) for child in below)
            found = next((part for part in parts if part is not None), None)
            return None if found is None else [found[0], factor * found[1], found[2]]
        by = _factor(one)
        if by and name.startswith("Div") and _is_sum(next(iter(below), None)):
            return [1 / by, factor, one]
        if not by and name not in TRANSPARENT:
            return None
        factor *= by or 1.0
    return None


def mean_sizes(root: torch.Tensor) -> list[list[float]]:
    """[number of elements, factor that multiplies the mean] for each term of a loss that is a mean of elements.

    A mean over targets that may be ignored is left out: `loss_divisor` covers it. For a mean of means (over the
    elements of a row, then over rows), the outer mean counts.
    """
    return [found[:2] for found in _means(root.grad_fn, 1.0, _DEPTH)]


def _means(node: Any, factor: float, depth: int) -> Iterator[list[Any]]:
    """[size, factor, node] of each mean."""
    for left, (one, name, below) in enumerate(_down(node, depth)):
        if name in MEANS or name in LOSSES:
            size = _mean_size(one) if name in MEANS else _loss_size(one)
            yield from [[size, factor, one]] if size else []
            return
        if name in ADDED:
            for child in below:
                yield from _means(child, factor, depth - left - 1)
            return
        by = _factor(one)
        if not by and name not in TRANSPARENT:
            return
        factor *= by or 1.0


def _mean_size(node: Any) -> int:
    """The number of elements that a mean node averages; 0 if unknown."""
    shape = tuple(saved(node, "self_sym_sizes", ()))
    dims = [dim - (dim > len(shape)) * 2 * _SIGN for dim in saved(node, "dim", ())]
    return math.prod(shape[dim] for dim in dims or range(len(shape))) if shape else 0


def _loss_size(node: Any) -> int:
    """The number of elements that a loss function averages, if it ignores none; 0 for other losses."""
    rows = saved(node, "self")
    plain = saved(node, "total_weight") is None and _reduction(node) == "mean"
    return rows.numel() if plain and rows is not None else 0


# --- its constants


def gathered_constants(root: torch.Tensor, gathered: list[tuple[torch.Tensor, int, int, list[Any]]]) -> list[Any]:
    """The line of a gather whose result takes part in a product of the loss without a gradient; [] if there is none.

    gathered: (this rank's tensor, its place, the number of ranks, line) of each gather of a tensor with a gradient.
    """
    for constant in _constants(root.grad_fn):
        for own, place, size, at in gathered:
            alike = constant.dtype is own.dtype and constant.device == own.device
            if alike and constant.numel() == size * own.numel():
                # a view or transposition of the result has the same storage
                whole = torch.empty(0, dtype=own.dtype, device=constant.device).set_(constant.untyped_storage())
                if whole.numel() == constant.numel() and torch.equal(whole.chunk(size)[place], own.reshape(-1)):
                    return at
    return []


def _constants(node: Any) -> Iterator[torch.Tensor]:
    """Factors of the products in a graph that have no gradient, those nearest to the loss first.

    Not of the whole graph: to read what a node has saved computes a checkpointed block again.
    """
    seen, waiting = {node}, deque([node])
    while waiting and len(seen) < _MAX_NODES:
        node = waiting.popleft()
        if node is None:
            continue
        if node.name() in _OF_TWO:
            given = (saved(node, name) for name in ("self", "other", "mat1", "mat2"))
            yield from (t for t in given if type(t) is torch.Tensor and not t.requires_grad and t.numel() > 1)
        fresh = [child for child in _below(node) if child not in seen]
        seen.update(fresh)
        waiting += fresh


# --- its terms


def loss_terms(root: torch.Tensor) -> list[Term]:
    """The terms of a loss; [] if there is only one term, without a count or weights."""
    return [{key: value for key, value in term.items() if key != "node"} for term in _terms(root)]


def _terms(root: torch.Tensor) -> list[Term]:
    """The terms, each with its "node": it divides by the count, if there is one."""
    found: list[Term] = []
    _walk(root.grad_fn, [], None, found, _MAX_DEPTH)
    return found if len(found) > 1 or any(t["count"] or t["weights"] for t in found) else []


def loss_lines(root: torch.Tensor, line_of: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """The script's lines of what divides a loss ("count"), and of each of its "means" and "terms".

    line_of: the line that made a node, or [].
    """
    found = _divisor(root.grad_fn, _DEPTH)
    return {
        "count": line_of(found[2]) if found is not None else [],
        "means": [line_of(node) for _, _, node in _means(root.grad_fn, 1.0, _DEPTH)],
        "terms": [line_of(term["node"]) for term in _terms(root)],
    }


def _walk(node: Any, factors: list[Factor], outer: list[Factor] | None, found: list[Term], depth: int) -> None:
    """Append the terms below a node to `found`. outer: the multipliers of the whole sum; None above the first addition.
    factors: the multipliers of this node only."""
    last = None
    for one, name, below in _down(node, depth):
        last, by = next(iter(below), None), _factor(one)
        parts = _stacked(below) if name in _SUMS else []
        if len(found) >= _MAX_TERMS:
            return
        if name in ADDED and len(below) > 1:
            outer, factors, parts = (factors, [], below) if outer is None else (outer, factors, below)
        elif parts and name in MEANS:
            factors = [*factors, (True, 1 / len(parts), one)]
        if parts:
            for part in parts:
                _walk(part, list(factors), outer, found, depth - 1)
            return
        if name in LOSSES:
            found.append(_loss(one, factors, outer))
            return
        if name in _SUMS or name == "DotBackward0" or (name in _OF_ROWS and _is_vector(one)):
            found.append(_sum(one, factors, outer))
            return
        if by is not None:
            factors.append((name.startswith("Div"), by, one))
        elif name not in TRANSPARENT and not name.startswith(DDP_NODE):
            found.append(_term(one, "other", factors, outer))
            return
    if node is not None and last is not None:  # the graph is deeper than the limit
        found.append(_term(node, "other", factors, outer))


def _stacked(below: list[Any]) -> list[Any]:
    """The nodes of numbers that are stacked and then summed or averaged, such as one loss per layer."""
    return _below(below[0]) if len(below) == 1 and below[0].name() == "StackBackward0" else []


def _is_vector(node: Any) -> bool:
    """Does a sum over a dimension have a one-dimensional input?"""
    return len(saved(node, "self_sym_sizes", ())) == 1


def _loss(node: Any, factors: list[Factor], outer: list[Factor] | None) -> Term:
    """The term for a loss function."""
    reduction = _reduction(node)
    if reduction == "sum":
        divisor, divides = _nearest_divisor(factors)
        return _term(divides or node, "sum", factors, outer, divisor, _targets(node))
    total, given = saved(node, "total_weight"), saved(node, "self")
    count = None if total is None or reduction != "mean" else float(total)
    if count is None and given is not None and _picks(node):
        count = float(given.numel())
    return _term(node, "mean" if reduction == "mean" else "other", factors, outer, count, count)


def _sum(node: Any, factors: list[Factor], outer: list[Factor] | None) -> Term:
    """The term for a sum or mean of all elements, or for a dot product."""
    weights = _weights(node if node.name() == "DotBackward0" else next(iter(_below(node)), None))
    if weights is not None:
        return _term(node, "weighed", factors, outer, weights=weights)
    if node.name() in MEANS:
        count = (float(saved(node, "self_sym_numel", 0)) or None) if _picks(node) else None
        return _term(node, "mean", factors, outer, count, count)
    divisor, divides = _nearest_divisor(factors)
    return _term(divides or node, "other" if node.name() == "DotBackward0" else "sum", factors, outer, divisor)


def _nearest_divisor(factors: list[Factor]) -> tuple[float | None, Any]:
    """Remove the division nearest to the sum from the factors. Returns (its divisor, its node), or (None, None)."""
    place = max((n for n, (divides, by, _) in enumerate(factors) if divides and by), default=None)
    if place is None:
        return None, None
    _, by, node = factors.pop(place)
    return 1 / by, node


def _term(
    node: Any,
    kind: str,
    factors: list[Factor],
    outer: list[Factor] | None,
    count: float | None = None,
    own: float | None = None,
    weights: list[Any] | None = None,
) -> Term:
    inner, common = ([by for _, by, _ in part] for part in (factors, outer or []))
    return {
        "node": node,
        "kind": kind,
        "count": count,
        "own": own,
        "factor": math.prod((*inner, *common)),
        "inner": inner,
        "divided": [1 / by for divides, by, _ in factors if divides and by],
        "outer": common,
        "weights": weights,
    }


def _targets(node: Any) -> float | None:
    """The number of targets of a loss with reduction="sum"; None if it cannot be counted."""
    target, ignored = saved(node, "target"), saved(node, "ignore_index")
    if target is None or ignored is None or saved(node, "weight") is not None:
        return None
    ignored = ignored - 2 * _SIGN if ignored >= _SIGN else ignored
    return float((target != ignored).sum())


def _picks(node: Any) -> bool:
    """Is a node a mean over elements that a mask selects, so that their number differs between batches?"""
    steps = list(_down(node, 7))[1:]
    names = [name for _, name, _ in steps]
    picked = next((n for n, name in enumerate(names) if name in _PICKS), None)
    return picked is not None and all(name in (*_ELEMENTWISE, *TRANSPARENT, *SCALED) for name in names[:picked])


def _weights(node: Any) -> list[Any] | None:
    """[checksum, sum, number of elements] of a constant vector that multiplies means over this rank's rows; or None."""
    found = next((s for s in _down(node) if s[1] not in TRANSPARENT and not _factor(s[0])), None)
    if found is None or found[1] not in ("MulBackward0", "DotBackward0"):
        return None
    product, _, below = found
    given = [saved(product, name) for name in ("self", "other", "tensor")]
    constants = [one for one in given if isinstance(one, torch.Tensor)]
    if len(constants) != 1 or len(below) != 1 or constants[0].requires_grad:
        return None
    vector = constants[0].detach()
    if not 2 <= vector.numel() <= _MAX_WEIGHTS or not vector.is_floating_point() or bool((vector < 0).any()):
        return None
    of_rows = _is_of_rows(below[0], vector.numel(), _MAX_DEPTH)
    return [digest(vector, most=SOME), float(vector.sum()), vector.numel()] if of_rows else None


def _is_of_rows(node: Any, columns: int, depth: int) -> bool:
    """Is a node a sum or mean over the rows of a matrix, or an addition of such sums, perhaps times numbers?"""
    for one, name, below in _down(node, depth):
        if name in _OF_ROWS:
            dims, shape = saved(one, "dim", ()), saved(one, "self_sym_sizes", ())
            first = any(d in (0, 2 * _SIGN - len(shape)) for d in dims)
            return first and _is_of_layer(next(iter(below), None), columns)
        if name == "AddBackward0":
            return any(_is_of_rows(child, columns, depth - 1) for child in below)
        if name not in _SHAPES and _factor(one) is None:
            return False
    return False


def _is_of_layer(node: Any, columns: int) -> bool:
    """Is a node the output of a linear layer with this many columns, perhaps normalised? Then a row is one of the
    rank's examples or tokens. (In other matrices the first dimension may be time.)"""
    layer = next((s for s in _down(node) if s[1] not in (*_PER_ROW, *_SHAPES, *SCALED)), None)
    sizes = saved(layer[0], "mat2_sym_sizes", ()) if layer is not None and layer[1] in _PRODUCTS else ()
    return tuple(sizes)[-1:] == (columns,)
