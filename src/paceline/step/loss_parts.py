"""Is a loss a sum of parts, each from a forward of its own? The step asks where several training loaders share a loop.

The mean over a loader's batch is weighted by the batch's share of its global batch. A sum of two means, one of each
loader, needs two weights. The graph does not show from which batch a part was computed, since batches need no
gradient. It does show whether parts have a forward in common:

1. From the root down, through nodes that combine scalars (sums, products, stacks). The terms are where these end: a
   term is a scalar that is computed from a larger tensor, as a criterion's result is.
2. Terms that have a node in common are of one forward, such as two criteria on one output. Copies and views of a
   parameter do not count: autocast shares them between forwards.
3. A term of parameters alone, such as weight decay, belongs to no batch and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from paceline.torch_private.core import output_shape, saved_factor_shape

_COPIES = frozenset(["ToCopy", "T", "Transpose", "Permute", "View", "Alias", "Clone"])
"""Nodes that pass a tensor on in another dtype or form."""

_SUMS = frozenset(["Add", "Cat", "Mean", "Stack", "Sub", "Sum", "Unsqueeze"])
_OF_PARAMETERS = _COPIES | _SUMS | frozenset(["Abs", "Div", "LinalgVectorNorm", "Mm", "Mul", "Neg", "Pow", "Sqrt"])
"""Nodes of regularisers. All tensors that enter the result are edges of the node."""


def separate_parts(losses: Iterable[Tensor]) -> int:
    """Of how many parts the sum of these scalars consists, no two of which share a forward."""
    terms = _terms([loss.grad_fn for loss in losses if loss.grad_fn is not None])
    first: dict[Any, int] = {}  # node -> the first term that reaches it
    part = list(range(len(terms)))  # term -> another term of its part, or itself
    data = [False] * len(terms)  # whether more than parameters enters the term

    def part_of(term: int) -> int:
        while part[term] != term:
            term = part[term]
        return term

    for number, term in enumerate(terms):
        stack = [term]
        while stack:
            node = stack.pop()
            if node in first:
                part[part_of(number)] = part_of(first[node])
                continue
            if not _copies_parameter(node):
                first[node] = number
            data[number] = data[number] or not _of_its_edges(node)
            stack += [child for child, _ in _edges(node) if not _is_leaf(child)]
    return len({part_of(number) for number in range(len(terms)) if data[number]})


def _terms(roots: list[Any]) -> list[Any]:
    """The nodes of the scalars that these roots combine."""
    seen, stack, terms = set(roots), list(roots), []
    while stack:
        node = stack.pop()
        if all(output_shape(child, place) == () or _combines_scalars(child) for child, place in _edges(node)):
            new = dict.fromkeys(child for child, _ in _edges(node) if child not in seen and not _is_leaf(child))
            seen.update(new)
            stack += new
        else:
            terms.append(node)
    return terms


def _combines_scalars(root: Any) -> bool:
    """Whether a larger tensor is made of scalars alone, as by torch.stack."""
    seen, stack, found = {root}, [root], False
    while stack:
        for child, place in _edges(stack.pop()):
            if output_shape(child, place) == ():
                found = True
            elif _is_leaf(child):
                return False
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    return found


def _edges(node: Any) -> Iterator[tuple[Any, int]]:
    return ((child, place) for child, place in node.next_functions if child is not None)


def _is_leaf(node: Any) -> bool:
    """Whether the node adds to a parameter's `.grad`."""
    return not node.next_functions


def _operation(node: Any) -> str:
    """Such as "Mul" of MulBackward0."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _copies_parameter(node: Any) -> bool:
    while _operation(node) in _COPIES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        if node is None or _is_leaf(node):
            return node is not None
    return False


def _of_its_edges(node: Any) -> bool:
    """Whether all tensors that enter the node's result have edges, so that no batch is among them."""
    if _operation(node) not in _OF_PARAMETERS:
        return False
    return all(child is not None for child, _ in node.next_functions) or saved_factor_shape(node) == ()
