"""FullyShardedDataParallel and fully_shard: which processes hold parts of one model, and what it is fed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from paceline.doctor.watch.imports import after_import
from paceline.doctor.watch.notebook import Notebook, put

_EXPORTS = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")


class _Sharded:
    def __init__(self, book: Notebook) -> None:
        self.book = book

    def fully_shard(self, original: Any) -> Any:
        def fully_shard(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            with self.book.aside():
                mesh = options.get("mesh")
                self._note(
                    list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist(), "fully_shard"
                )
            return result

        return fully_shard

    def wrapped(self, original: Any) -> Any:
        def __init__(module: Any, /, *args: Any, **options: Any) -> None:
            original(module, *args, **options)
            with self.book.aside():
                for parameter in module.parameters():
                    self.book.models.sharded[parameter] = True
                self._note(dist.get_process_group_ranks(module.process_group), "FullyShardedDataParallel")

        return __init__

    def _note(self, ranks: list[int], by: str) -> None:
        self.book.note("fsdp", ranks=ranks, by=by)

    def fed(self, original: Any) -> Any:
        """FSDPState._pre_forward: the inputs of the outermost module."""

        def _pre_forward(state: Any, module: Any, args: Any, options: Any) -> Any:
            result = original(state, module, args, options)
            if getattr(state, "_is_root", False) and torch.is_grad_enabled() and module.training:
                self.book.models.inputs(-1, (args, options))
            return result

        return _pre_forward


def watch(book: Notebook) -> None:
    if not dist.is_available():
        return
    sharded = _Sharded(book)

    def composable(module: ModuleType) -> None:
        original = module.fully_shard
        put(module, "fully_shard", sharded.fully_shard)
        for name in _EXPORTS:
            if getattr(sys.modules.get(name), "fully_shard", None) is original:
                vars(sys.modules[name])["fully_shard"] = module.fully_shard
        put(module.FSDPModule, "set_requires_gradient_sync", book.models.unsynced)

    def state(module: ModuleType) -> None:
        if hasattr(module.FSDPState, "_pre_forward"):
            put(module.FSDPState, "_pre_forward", sharded.fed)

    def wrapper(module: ModuleType) -> None:
        put(module.FullyShardedDataParallel, "__init__", sharded.wrapped)
        put(module.FullyShardedDataParallel, "no_sync", book.models.unsynced)

    after_import("torch.distributed.fsdp._fully_shard._fsdp_state", state)
    after_import("torch.distributed.fsdp._fully_shard._fully_shard", composable)
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", wrapper)
