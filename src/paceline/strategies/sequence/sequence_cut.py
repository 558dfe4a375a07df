"""Where a model's inputs are split along the sequence.

- Token ids (integers with at least 2 dimensions, the last one the tokens), where an nn.Embedding of a prepared model
  reads them.
- Floating-point inputs of a prepared model with 3 dimensions: (batch, tokens, width).

A choice that does not fit the model costs time, but cannot be wrong: sequence_shard.py computes all other operations on
the whole tensor. Without gradients (evaluation), the outputs of a prepared model are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.group import Group
from paceline.errors import ModelError
from paceline.strategies.kit.outputs import mapped
from paceline.strategies.sequence import sequence_attention, sequence_loss, sequence_rules
from paceline.strategies.sequence.sequence_shard import SequenceShard, all_whole, even_cut, whole
from paceline.torch_private.core import BatchNormBase, compiled_call

RULE_MODULES = sequence_rules, sequence_attention, sequence_loss  # importing them registers the rules


class SequenceCuts:
    """The hooks on prepared models. strategy: its name in messages."""

    def __init__(self, group: Group, strategy: str) -> None:
        self._group, self._strategy = group, strategy
        self._known: set[nn.Module] = set()
        self._hooks: list[Any] = []
        self._any = False  # whether a tensor has been split

    def add(self, models: Sequence[nn.Module]) -> None:
        """Watch the models that are new. Raises ModelError for a module that cannot work."""
        for model in models:
            if model not in self._known:
                self._known.add(model)
                self._hooks.append(model.register_forward_pre_hook(self._on_inputs, with_kwargs=True))
                self._hooks.append(model.register_forward_hook(_on_outputs))
            for name, module in model.named_modules():
                if compiled_call(module) is not None or type(module).__name__ == "OptimizedModule":
                    raise ModelError(
                        f"strategy {self._strategy}: {name or 'the model'} is compiled by torch.compile, which "
                        "bypasses the split of sequences. Remove torch.compile (or compile=True), or use "
                        "strategy='ddp'."
                    )
                if module in self._known:
                    continue
                self._known.add(module)
                if isinstance(module, nn.Embedding):
                    self._hooks.append(module.register_forward_pre_hook(self._on_ids))
                elif isinstance(module, BatchNormBase):  # Paceline's batch norm is an autograd.Function
                    self._hooks.append(module.register_forward_pre_hook(_gathered))

    def check(self) -> None:
        """Raises ModelError if nothing has been split."""
        if not self._any:
            raise ModelError(
                f"strategy {self._strategy}: no input of the model could be split along the sequence. It splits token "
                "ids of the shape (batch, tokens) where an nn.Embedding reads them, and inputs of the shape (batch, "
                f"tokens, width), if they have at least {self._group.size} tokens. Use strategy='ddp' or 'fsdp'."
            )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _on_ids(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = args
        return (self._split(ids, -1) if _is_plain(ids) and ids.dim() >= 2 else ids, *rest)

    def _on_inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        def split(value: Any) -> Any:
            fits = _is_plain(value) and value.dim() == 3 and value.is_floating_point()
            return self._split(value, 1) if fits else value

        return tuple(split(value) for value in args), {key: split(value) for key, value in kwargs.items()}

    def _split(self, tensor: Tensor, dim: int) -> Tensor:
        dim %= tensor.dim()
        if tensor.size(dim) < self._group.size:
            return tensor
        self._any = True
        cut = even_cut(self._group, tensor.size(dim))
        return SequenceShard(cut.part(tensor, dim), dim, cut)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, SequenceShard)


def _on_outputs(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Gather outputs if they need no gradient: scripts save, print and average them."""
    return outputs if torch.is_grad_enabled() else mapped(outputs, SequenceShard, whole)


def _gathered(module: nn.Module, args: tuple[Any, ...]) -> Any:
    return all_whole(args)
