"""Refuses modules whose forward changes a buffer, where a process computes several shards of a reproducible run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from paceline.errors import ModelError
from paceline.torch_private.core import BatchNormBase, version_of


def refuse_changes(models: Sequence[nn.Module]) -> list[Any]:
    """Watches the forwards of these models from now on. Returns the handles of its hooks.

    Batch norm's buffers are alike on all shards, or set anew for each of them (train/normalisation.py).
    """
    handles: list[Any] = []
    for model in models:
        for name, module in model.named_modules():
            if next(module.buffers(recurse=False), None) is not None and not isinstance(module, BatchNormBase):
                watch = _Watch(name or type(module).__name__)
                handles.append(module.register_forward_pre_hook(watch.before))
                handles.append(module.register_forward_hook(watch.after))
    return handles


class _Watch:
    """What one shard leaves in a buffer the next one of the same process would find, and another process's would
    not."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: list[tuple[int, int]] = []

    def before(self, module: nn.Module, _: Any) -> None:
        self._seen = [(id(buffer), version_of(buffer)) for buffer in module.buffers(recurse=False)]

    def after(self, module: nn.Module, *_: Any) -> None:
        if module.training and self._seen != [(id(b), version_of(b)) for b in module.buffers(recurse=False)]:
            raise ModelError(
                f"reproducible: {self._name} ({type(module).__name__}) changes a buffer in its forward, which then "
                "depends on which shards a process computes. Use a layer without such state (GroupNorm or LayerNorm "
                "in place of running statistics), put it into evaluation mode, or leave reproducible out."
            )
