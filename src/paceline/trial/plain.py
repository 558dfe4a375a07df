"""What `paceline verify` changes in a run, and sees of it, through torch's own functions: dropout, graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Patches:
    """Functions in the place of others, until `undo`."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def undo(self) -> None:
        while self._before:
            owner, name, function = self._before.pop()
            setattr(owner, name, function)


def dropout_off(patches: Patches) -> None:
    """torch.nn's and torch.nn.functional's dropouts return what they are given, by calling torch's own with
    training=False; modules look the functions up at each call."""
    for name in _DROPOUTS:
        patches.put(F, name, _never(getattr(F, name)))
    attention = F.scaled_dot_product_attention

    def without(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **k: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **k)

    patches.put(F, "scaled_dot_product_attention", without)


def _never(function: Any) -> Any:
    def dropout(input: Tensor, *args: Any, **options: Any) -> Any:
        options = {key: value for key, value in options.items() if key not in ("training", "p")}
        return function(input, 0.5, False, *args[2:], **options)

    return dropout


def recurrent_dropout_off(model: nn.Module) -> None:
    """Of torch's recurrent layers, whose kernels draw by themselves."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0


def strangers(roots: Iterable[Tensor], known: Collection[Tensor]) -> list[Tensor]:
    """Of the tensors that the backward of these losses gives gradients to, those that are not known."""
    nodes = [node for root in roots if (node := root.grad_fn) is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and variable not in known:
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found


def nudge(models: Sequence[dict[str, Any]], parameters: Collection[str], seed: int) -> None:
    """Moves each weight in 32 bits or more to one of its two neighbours among floating-point numbers."""
    draw = torch.Generator().manual_seed(seed)
    for number, state in enumerate(models):
        for name, value in state.items():
            if (f"{number}/{name}" if number else name) in parameters and value.dtype in (torch.float32, torch.float64):
                up = torch.rand(value.shape, generator=draw, dtype=value.dtype) < 0.5
                state[name] = torch.nextafter(value, torch.where(up, torch.inf, -torch.inf).to(value.dtype))


class Scaled:
    """A run's precision, with losses times 0.75 in the backward: that moves the place at which numbers are rounded.

    whether: asked each time, since a hook on a gradient need not be linear.
    """

    def __init__(self, precision: Any, whether: Callable[[], bool]) -> None:
        self._precision, self._whether = precision, whether

    @property
    def loss_scale(self) -> float:
        scale: float = self._precision.loss_scale
        return scale * 0.75 if self._whether() else scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._precision, name)


def digest(*tensors: Tensor) -> str:
    """Of their bits."""
    made = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors:
        made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()[:16]
