"""What a loss is, by its autograd graph: is it a mean, and what was it divided by?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from paceline.doctor.recorders.graph_nodes import LOSSES as _LOSSES
from paceline.doctor.recorders.graph_nodes import MEANS as _MEANS
from paceline.doctor.recorders.graph_nodes import SCALED as _SCALED
from paceline.doctor.recorders.graph_nodes import TRANSPARENT as _TRANSPARENT
from paceline.doctor.recorders.graph_nodes import children as _children
from paceline.doctor.recorders.graph_nodes import is_sum as _is_sum
from paceline.doctor.recorders.graph_nodes import scalar_factor as _factor
from paceline.torch_private.observed import saved

_MIN_DIVISOR = 1.9  # a factor above 1 / this is a weight, and not a division by the number of micro-batches


def loss_kind(root: torch.Tensor) -> str:
    """ "mean": a mean, or a sum of means (of weighted ones, where one has more than half of its weight). "divided": a
    mean times 1/2 or less. "other": neither can be said."""
    return _kind(root.grad_fn, 12)


def _kind(node: Any, depth: int) -> str:
    for _ in range(depth):
        if node is None:
            return "other"
        name, children = node.name(), _children(node)
        if name in _MEANS:
            return "divided" if any(_divides(child) for child in children) else "mean"
        if name in _LOSSES and saved(node, "reduction", 1) == 1:
            return "mean"
        if name in _SCALED:
            factor = _factor(node)
            if factor is None and name.startswith("Div"):
                return "divided"
            if factor is not None and any(
                math.isclose(factor * count, 1.0, rel_tol=1e-6) for count in _counts(children)
            ):
                return "mean"
            if factor is not None and 0 < abs(factor) <= 1 / _MIN_DIVISOR:
                return "divided"
        elif name in ("AddBackward0", "SubBackward0"):
            kinds = {_kind(child, depth - 1) for child in children}
            return "other" if "other" in kinds else "mean" if "mean" in kinds else "divided"
        elif name not in _TRANSPARENT:
            return "other"
        node = next(iter(children), None)
    return "other"


def loss_divisor(root: torch.Tensor) -> list[float] | None:
    """[what the sum in a loss is divided by to make a mean of it, by what that mean is multiplied].

    The first is the number of targets that are not ignored, the weights of their classes, or what the script divides a
    sum by. Of several losses that are added, the first that has such a number counts. None: there is none.
    """
    return _divisor(root.grad_fn, 12)


def _divisor(node: Any, depth: int) -> list[float] | None:
    factor = 1.0
    for _ in range(depth):
        if node is None:
            return None
        name, children = node.name(), _children(node)
        if name in _LOSSES:
            total = saved(node, "total_weight")
            return [float(total), factor] if total is not None and saved(node, "reduction", 1) == 1 else None
        if name in _SCALED:
            by = _factor(node)
            if not by:
                return None
            if name.startswith("Div") and _is_sum(next(iter(children), None)):
                return [1 / by, factor]
            factor *= by
        elif name in ("AddBackward0", "SubBackward0"):
            parts = (_divisor(child, depth - 1) for child in children)
            found = next((part for part in parts if part is not None), None)
            return None if found is None else [found[0], factor * found[1]]
        elif name not in _TRANSPARENT:
            return None
        node = next(iter(children), None)
    return None


def _divides(node: Any) -> bool:
    """Does a node multiply by 1/2 or less?"""
    factor = _factor(node) if node.name() in _SCALED else None
    return factor is not None and 0 < abs(factor) <= 1 / _MIN_DIVISOR


def _counts(nodes: list[Any]) -> tuple[int, ...]:
    """How many elements, or examples, a node has summed: a division by one of these makes a mean of the sum."""
    node = next(iter(nodes), None)
    while node is not None and node.name() in _TRANSPARENT:
        node = next(iter(_children(node)), None)
    if node is None:
        return ()
    if node.name() == "SumBackward0":
        shape = tuple(saved(node, "self_sym_sizes", ()))
        return (math.prod(shape), shape[0]) if shape else ()
    target = saved(node, "target")
    if node.name() in _LOSSES and saved(node, "reduction", 1) == 2 and target is not None and target.dim():
        return (target.numel(), target.shape[0])
    return ()


def mean_sizes(root: torch.Tensor) -> list[list[float]]:
    """For each term of a loss that is a mean of elements: [their number, by what that mean is multiplied]. A mean of
    targets, some of which may be ignored, is not among them: `loss_divisor` has it. Of a mean of means (over the
    elements of a row, then over rows) the outer one counts."""
    return list(_means(root.grad_fn, 1.0, 12))


def _means(node: Any, factor: float, depth: int) -> Iterator[list[float]]:
    for left in range(depth, 0, -1):
        if node is None:
            return
        name, children = node.name(), _children(node)
        if name in _MEANS:
            size = _mean_size(node)
            if size:
                yield [size, factor]
            return
        if name in _LOSSES:
            rows = saved(node, "self")
            if saved(node, "total_weight") is None and saved(node, "reduction", 1) == 1 and rows is not None:
                yield [rows.numel(), factor]
            return
        if name in ("AddBackward0", "SubBackward0"):
            for child in children:
                yield from _means(child, factor, left - 1)
            return
        if name in _SCALED:
            by = _factor(node)
            if not by:
                return
            factor *= by
        elif name not in _TRANSPARENT:
            return
        node = next(iter(children), None)


def _mean_size(node: Any) -> int:
    """How many elements a mean of one number has averaged; 0: not known."""
    shape = tuple(saved(node, "self_sym_sizes", ()))
    dims = [dim - (dim > len(shape)) * 2**64 for dim in saved(node, "dim", ())]  # torch keeps -1 as an unsigned number
    return math.prod(shape[dim] for dim in dims or range(len(shape))) if shape else 0
