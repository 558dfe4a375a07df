"""Refuses modules whose forward changes a buffer, where a process computes several shards of a reproducible run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.torch_private.core import BatchNormBase, version_of


def refuse_changes(models: Sequence[nn.Module]) -> list[Any]:
    """Puts hooks around the forwards of these models' modules. Returns the handles.

    Batch norm's buffers are alike on all shards, or set anew for each of them (norm/normalisation.py).
    """
    handles: list[Any] = []
    for model in models:
        for name, module in model.named_modules():
            if next(module.buffers(recurse=False), None) is not None and not isinstance(module, BatchNormBase):
                guard = _Guard(name or type(module).__name__)
                handles.append(module.register_forward_pre_hook(guard.before))
                handles.append(module.register_forward_hook(guard.after))
    return handles


class _Guard:
    """Of one module. What a shard leaves in a buffer the next shard of the same process would find; a shard of another
    process would not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: list[tuple[int, int]] = []  # identity and version of each buffer

    def before(self, module: nn.Module, _: Any) -> None:
        self._before = [(id(buffer), version_of(buffer)) for buffer in module.buffers(recurse=False)]

    def after(self, module: nn.Module, *_: Any) -> None:
        if module.training and self._before != [(id(b), version_of(b)) for b in module.buffers(recurse=False)]:
            raise ModelError(
                f"reproducible: {self._name} ({type(module).__name__}) changes a buffer in its forward, which then "
                "depends on which shards a process computes. Use a layer without such state (GroupNorm or LayerNorm "
                "in place of running statistics), put it into evaluation mode, or leave reproducible out."
            )
