"""Detect a loss that is a sum of parts from separate forwards. Used if several training loaders share a loop.

The mean over a loader's batch is weighted by the batch's share of its global batch. A sum of two means, one per loader,
needs two weights. The graph does not show which batch a part was computed from, since batches need no gradient. It does
show whether parts share a forward:

1. Start at the root, and descend through nodes that combine scalars (sums, products, stacks). This ends at the terms: a
   term is a scalar that is computed from a larger tensor, such as the result of a criterion.
2. Terms that share a node belong to one forward, such as two criteria on one output. Copies and views of a parameter do
   not count: autocast shares them between forwards.
3. A term that is computed from parameters alone, such as weight decay, belongs to no batch and is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from paceline.torch_private.core import output_shape, saved_factor_shape

_COPIES = frozenset(["ToCopy", "T", "Transpose", "Permute", "View", "Alias", "Clone"])
"""Nodes that return their input in another dtype or form."""

_SUMS = frozenset(["Add", "Cat", "Mean", "Stack", "Sub", "Sum", "Unsqueeze"])
_OF_PARAMETERS = _COPIES | _SUMS | frozenset(["Abs", "Div", "LinalgVectorNorm", "Mm", "Mul", "Neg", "Pow", "Sqrt"])
"""Nodes of regularisers. Such a node has no inputs besides those of its edges."""


def separate_parts(losses: Iterable[Tensor]) -> int:
    """The number of parts from separate forwards in the sum of these scalars."""
    terms = _terms([loss.grad_fn for loss in losses if loss.grad_fn is not None])
    first: dict[Any, int] = {}  # node -> the first term that reaches it
    part = list(range(len(terms)))  # term -> another term of its part, or itself
    data = [False] * len(terms)  # whether the term is computed from more than parameters

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
    """The nodes of the terms that these roots combine."""
    seen, stack, terms = set(roots), list(roots), []
    while stack:
        node = stack.pop()
        if all(output_shape(child, output) == () or _combines_scalars(child) for child, output in _edges(node)):
            new = dict.fromkeys(child for child, _ in _edges(node) if child not in seen and not _is_leaf(child))
            seen.update(new)
            stack += new
        else:
            terms.append(node)
    return terms


def _combines_scalars(root: Any) -> bool:
    """Whether a larger tensor is computed from scalars only, as by torch.stack."""
    seen, stack, found = {root}, [root], False
    while stack:
        for child, output in _edges(stack.pop()):
            if output_shape(child, output) == ():
                found = True
            elif _is_leaf(child):
                return False
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    return found


def _edges(node: Any) -> Iterator[tuple[Any, int]]:
    return ((child, output) for child, output in node.next_functions if child is not None)


def _is_leaf(node: Any) -> bool:
    """Whether the node adds to a parameter's `.grad`."""
    return not node.next_functions


def _operation(node: Any) -> str:
    """The name of the node's operation, such as "Mul" for MulBackward0."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward")


def _copies_parameter(node: Any) -> bool:
    while _operation(node) in _COPIES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
        if node is None or _is_leaf(node):
            return node is not None
    return False


def _of_its_edges(node: Any) -> bool:
    """Whether all inputs of the node have edges. A batch as input has none."""
    if _operation(node) not in _OF_PARAMETERS:
        return False
    return all(child is not None for child, _ in node.next_functions) or saved_factor_shape(node) == ()
