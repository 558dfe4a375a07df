"""Refuses modules that change a buffer in their forward, if a process computes several shards of a reproducible run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.torch_private.core import BatchNormBase, version_of


def refuse_changes(models: Sequence[nn.Module]) -> list[Any]:
    """Add hooks that raise ModelError if a module of these models changes a buffer in its forward. Returns the handles.

    Batch norm is exempt: its buffers are the same on all shards, or are set for each shard (norm/normalisation.py).
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
    """The hooks of one module. A changed buffer would affect the next shard of the same process, but no shard of
    another process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: list[tuple[int, int]] = []  # id and version of each buffer before the forward

    def before(self, module: nn.Module, _: Any) -> None:
        self._before = [(id(buffer), version_of(buffer)) for buffer in module.buffers(recurse=False)]

    def after(self, module: nn.Module, *_: Any) -> None:
        if module.training and self._before != [(id(b), version_of(b)) for b in module.buffers(recurse=False)]:
            raise ModelError(
                f"reproducible: {self._name} ({type(module).__name__}) changes a buffer in its forward, so the buffer "
                "depends on which shards a process computes. Use a layer without such state (GroupNorm or LayerNorm "
                "instead of running statistics), put it into evaluation mode, or drop reproducible."
            )
