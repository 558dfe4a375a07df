"""FullyShardedDataParallel and fully_shard: the processes that share one model, its inputs, its weights before
sharding."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Generator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.launcher.import_hook import after_import
from paceline.observe.digests import sample
from paceline.observe.event_log import EventLog
from paceline.torch_private.observed import FSDP_BEFORE_FORWARD, FSDP_EXPORTS, FSDP_FUNCTIONS, FSDP_STATES, is_root

_MAX_PARAMETERS = 400  # of one call


class _FSDPRecorder:
    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._number = 0
        self._shards: list[Any] = []  # (parameter, its name, a sample of this process's shard as it was cut)
        self._full: dict[str, list[float]] = {}  # name -> a sample of the weight before it was cut

    def record_cut(self, optimizer: Any, *_: Any) -> None:
        """At the first step: samples of the full weights whose shards are still as they were cut."""
        if not self._shards or not self.log.active:
            return
        with self.log.overhead():
            mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
            alive = [(p, name, part) for reference, name, part in self._shards if (p := reference()) is not None]
            names = [name for p, name, part in alive if id(p) in mine and sample(p.to_local()) == part]
            self.log.record("cut", whole={name: self._full[name] for name in names})
        self._shards, self._full = [], {}

    def around_fully_shard(self, *args: Any, **options: Any) -> Generator[None, Any, None]:
        modules = args[0] if args else options.get("module")
        whole = _full_samples(modules)
        yield
        self._number += 1
        for name, (p, part) in _shard_samples(modules, whole).items():
            label = f"{name} of call {self._number}"
            self._shards.append((weakref.ref(p), label, part))
            self._full[label] = whole[name]
        mesh = options.get("mesh")
        ranks = list(range(dist.get_world_size())) if mesh is None else mesh.mesh.flatten().tolist()
        self.log.record("fsdp", ranks=ranks)

    def after_init(self, module: Any, /, *_: Any, **__: Any) -> None:
        """A FullyShardedDataParallel has been constructed."""
        for parameter in module.parameters():
            self.log.shared.models.sharded[parameter] = True
        self.log.record("fsdp", ranks=dist.get_process_group_ranks(module.process_group))

    def after_pre_forward(self, state: Any, module: Any, args: Any, options: Any) -> None:
        """FSDPState._pre_forward: record the inputs of the outermost module."""
        if is_root(state) and torch.is_grad_enabled() and module.training:
            self.log.shared.models.record_inputs(-1, (args, options))


def _named(modules: Any) -> list[tuple[str, Any]]:
    """(name, parameter) of one module, or of several."""
    several = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    return [(f"{n}.{name}" if n else name, p) for n, m in enumerate(several) for name, p in m.named_parameters()]


def _full_samples(modules: Any) -> dict[str, list[float]]:
    """Samples of the parameters that are about to be cut, where they have values."""
    plain = [(n, p) for n, p in _named(modules) if not hasattr(p, "to_local") and p.device.type != "meta"]
    return {name: sample(p) for name, p in plain[:_MAX_PARAMETERS] if p.layout is torch.strided and p.numel()}


def _shard_samples(modules: Any, whole: dict[str, list[float]]) -> dict[str, tuple[Any, list[float]]]:
    """This process's shards of those parameters, with samples. It may have none of a small one."""
    cut = [(name, p) for name, p in _named(modules) if name in whole and hasattr(p, "to_local")]
    return {name: (p, sample(p.to_local())) for name, p in cut if p.to_local().numel()}


def install(log: EventLog) -> None:
    if not dist.is_available():
        return
    recorder, patches, models = _FSDPRecorder(log), log.patches, log.shared.models
    register_optimizer_step_pre_hook(recorder.record_cut)

    def composable(module: ModuleType) -> None:
        original = module.fully_shard
        patches.around(module, "fully_shard", recorder.around_fully_shard)
        for name in FSDP_EXPORTS:
            if getattr(sys.modules.get(name), "fully_shard", None) is original:
                patches.replace(sys.modules[name], "fully_shard", module.fully_shard)
        patches.before(module.FSDPModule, "set_requires_gradient_sync", models.before_gradient_sync)

    def state(module: ModuleType) -> None:
        if hasattr(module.FSDPState, FSDP_BEFORE_FORWARD):
            patches.after(module.FSDPState, FSDP_BEFORE_FORWARD, recorder.after_pre_forward)

    def wrapper(module: ModuleType) -> None:
        patches.after(module.FullyShardedDataParallel, "__init__", recorder.after_init)
        patches.before(module.FullyShardedDataParallel, "no_sync", models.before_no_sync)

    after_import(FSDP_STATES, state)
    after_import(FSDP_FUNCTIONS, composable)
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", wrapper)
