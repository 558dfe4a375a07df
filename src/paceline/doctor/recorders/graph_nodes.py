"""What the nodes of a loss's autograd graph do: which are means, losses, single factors."""

from __future__ import annotations

from typing import Any

import torch

from paceline.torch_private.observed import saved

MEANS = {"MeanBackward0", "MeanBackward1"}
LOSSES = {"NllLossBackward0", "NllLoss2DBackward0", "NllLossNdBackward0", "MseLossBackward0", "SmoothL1LossBackward0",
           "L1LossBackward0", "HuberLossBackward0", "BinaryCrossEntropyBackward0",
           "BinaryCrossEntropyWithLogitsBackward0", "CrossEntropyLossBackward0", "KlDivBackward0",
           "SoftMarginLossBackward0", "MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}  # fmt: skip
TRANSPARENT = {"ToCopyBackward0", "CloneBackward0", "ViewBackward0", "SqueezeBackward0", "ReshapeAliasBackward0",
           "NegBackward0", "RsubBackward1"}  # fmt: skip
SCALED = {"DivBackward0", "DivBackward1", "MulBackward0", "MulBackward1"}


def children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def is_sum(node: Any) -> bool:
    """Is it the sum of elements, or of a loss with reduction="sum"?"""
    while node is not None and node.name() in TRANSPARENT:
        node = next(iter(children(node)), None)
    if node is None:
        return False
    return node.name() in ("SumBackward0", "SumBackward1") or (
        node.name() in LOSSES and saved(node, "reduction", 1) == 2
    )


def scalar_factor(node: Any) -> float | None:
    """The single number by which a node multiplies; None where there is no such number."""
    value = saved(node, "other")
    value = saved(node, "self") if value is None else value
    if value is None or (isinstance(value, torch.Tensor) and value.numel() != 1):
        return None
    number = float(value)
    if node.name().startswith("Div"):
        return 1 / number if number else None
    return number
