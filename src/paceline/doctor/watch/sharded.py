"""FullyShardedDataParallel and fully_shard: which processes hold parts of one model, and what it is fed."""

from __future__ import annotations

import sys
import weakref
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.doctor.watch.imports import after_import
from paceline.doctor.watch.notebook import Notebook, put
from paceline.doctor.watch.replicas import sample
from paceline.torch_private.observed import FSDP_BEFORE_FORWARD, FSDP_EXPORTS, FSDP_FUNCTIONS, FSDP_STATES, is_root

_MOST = 400  # parameters of one call


class _Sharded:
    def __init__(self, book: Notebook) -> None:
        self.book = book
        self._number = 0
        self.cut: list[Any] = []  # (parameter, its name, this process's part of it as it was cut)
        self.whole: dict[str, list[float]] = {}  # name -> what was cut

    def first(self, optimizer: Any, *_: Any) -> None:
        """At the first step: of the weights that are still as they were cut, what they were before."""
        if not self.cut or not self.book.watching:
            return
        with self.book.aside():
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            alive = [(p, name, part) for reference, name, part in self.cut if (p := reference()) is not None]
            names = [name for p, name, part in alive if id(p) in mine and sample(p.to_local()) == part]
            self.book.note("cut", whole={name: self.whole[name] for name in names})
        self.cut, self.whole = [], {}

    def fully_shard(self, original: Any) -> Any:
        def fully_shard(*args: Any, **options: Any) -> Any:
            whole: dict[str, list[float]] = {}
            with self.book.aside():
                whole = _whole(args[0] if args else options.get("module"))
            result = original(*args, **options)
            with self.book.aside():
                self._number += 1
                parts = _parts(args[0] if args else options.get("module"), whole)
                for name, (p, part) in parts.items():
                    told = f"{name} of call {self._number}"
                    self.cut.append((weakref.ref(p), told, part))
                    self.whole[told] = whole[name]
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
            if is_root(state) and torch.is_grad_enabled() and module.training:
                self.book.models.inputs(-1, (args, options))
            return result

        return _pre_forward


def _named(modules: Any) -> list[tuple[str, Any]]:
    several = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    return [(f"{n}.{name}" if n else name, p) for n, m in enumerate(several) for name, p in m.named_parameters()]


def _whole(modules: Any) -> dict[str, list[float]]:
    """The parameters that are about to be cut, and have values."""
    plain = [(n, p) for n, p in _named(modules) if not hasattr(p, "to_local") and p.device.type != "meta"]
    return {name: sample(p) for name, p in plain[:_MOST] if p.layout is torch.strided and p.numel()}


def _parts(modules: Any, whole: dict[str, list[float]]) -> dict[str, tuple[Any, list[float]]]:
    """This process's parts of them; where they are too small for all, some have none."""
    cut = [(name, p) for name, p in _named(modules) if name in whole and hasattr(p, "to_local")]
    return {name: (p, sample(p.to_local())) for name, p in cut if p.to_local().numel()}


def watch(book: Notebook) -> None:
    if not dist.is_available():
        return
    sharded = _Sharded(book)
    register_optimizer_step_pre_hook(sharded.first)

    def composable(module: ModuleType) -> None:
        original = module.fully_shard
        put(module, "fully_shard", sharded.fully_shard)
        for name in FSDP_EXPORTS:
            if getattr(sys.modules.get(name), "fully_shard", None) is original:
                vars(sys.modules[name])["fully_shard"] = module.fully_shard
        put(module.FSDPModule, "set_requires_gradient_sync", book.models.switched)

    def state(module: ModuleType) -> None:
        if hasattr(module.FSDPState, FSDP_BEFORE_FORWARD):
            put(module.FSDPState, FSDP_BEFORE_FORWARD, sharded.fed)

    def wrapper(module: ModuleType) -> None:
        put(module.FullyShardedDataParallel, "__init__", sharded.wrapped)
        put(module.FullyShardedDataParallel, "no_sync", book.models.unsynced)

    after_import(FSDP_STATES, state)
    after_import(FSDP_FUNCTIONS, composable)
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", wrapper)
