"""FullyShardedDataParallel and fully_shard: the ranks that share a model, the model's inputs, and its weights before
they are sharded. With fully_shard (FSDP2) also an optimizer's operations on the rank's shards, in its first steps.

An optimizer that works element by element may work on shards. But a matrix product, a decomposition or a norm of one
shard differs from that of the whole weight. Operations on DTensors handle this correctly: the dispatch mode below sees
them as operations on DTensors, not on the shards inside.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Generator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.doctor.recorders.shared_state import number_of
from paceline.launcher.import_hook import after_import
from paceline.observe.digests import sample
from paceline.observe.event_log import EventLog
from paceline.torch_private.core import TorchDispatchMode
from paceline.torch_private.observed import (
    COLLECTIVE_NAMESPACES,
    DECOMPOSITIONS,
    FSDP_BEFORE_FORWARD,
    FSDP_EXPORTS,
    FSDP_FUNCTIONS,
    FSDP_STATES,
    NORMS_OF_MANY,
    is_root,
)

_MAX_PARAMETERS = 400  # per call
_STEPS = 3  # inspected steps per optimizer
_MAX_EVENTS = 8  # per step
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_cholesky_ex",
             "linalg_inv_ex", "linalg_matrix_exp", *DECOMPOSITIONS)  # fmt: skip
_NORMS = ("linalg_vector_norm", "norm", "linalg_matrix_norm", NORMS_OF_MANY)
_NEEDED = {"product": 1, "norm": 2}  # record up to this many operations of a kind per shape
# The methods of FSDPModule that change how gradients are combined.
_DIVIDES = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor", "set_force_sum_reduction_for_comms")
_KNOWS_DTENSORS = "torch.optim"

Shapes = dict[tuple[int, ...], tuple[str, tuple[int, ...]]]  # a shard's shape -> the weight's name, its whole shape


class _FSDPRecorder:
    def __init__(self, log: EventLog) -> None:
        self.log = log
        self._number = 0
        self._shards: list[Any] = []  # (parameter, its name, a sample of this rank's shard when it was made)
        self._full: dict[str, list[float]] = {}  # name -> a sample of the weight before it was sharded

    def record_cut(self, optimizer: Any, *_: Any) -> None:
        """At the first step, record samples of the full weights, if their shards are still unchanged."""
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
        """Call it after the construction of a FullyShardedDataParallel."""
        for parameter in module.parameters():
            self.log.shared.models.sharded[parameter] = True
        self.log.record("fsdp", ranks=dist.get_process_group_ranks(module.process_group))

    def after_pre_forward(self, state: Any, module: Any, args: Any, options: Any) -> None:
        """After FSDPState._pre_forward, record the inputs of the outermost module."""
        if is_root(state) and torch.is_grad_enabled() and module.training:
            self.log.shared.models.record_inputs(-1, (args, options))


def _named(modules: Any) -> list[tuple[str, Any]]:
    """(name, parameter) for each parameter of one module or of several modules."""
    several = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    return [(f"{n}.{name}" if n else name, p) for n, m in enumerate(several) for name, p in m.named_parameters()]


def _full_samples(modules: Any) -> dict[str, list[float]]:
    """Samples of the parameters that are about to be sharded, if they have values."""
    plain = [(n, p) for n, p in _named(modules) if not hasattr(p, "to_local") and p.device.type != "meta"]
    return {name: sample(p) for name, p in plain[:_MAX_PARAMETERS] if p.layout is torch.strided and p.numel()}


def _shard_samples(modules: Any, whole: dict[str, list[float]]) -> dict[str, tuple[Any, list[float]]]:
    """name -> (parameter, sample of this rank's shard) for the parameters in `whole`. A rank may have no shard of a
    small parameter."""
    sharded = [(name, p) for name, p in _named(modules) if name in whole and hasattr(p, "to_local")]
    return {name: (p, sample(p.to_local())) for name, p in sharded if p.to_local().numel()}


# --- an optimizer's operations on shards


class _ShardMode(TorchDispatchMode):
    """A mode that records operations on plain matrices with a shard's shape, and whether the step communicates."""

    def __init__(self, log: EventLog, number: int, shapes: Shapes) -> None:
        super().__init__()
        self._log, self._number, self._shapes = log, number, shapes
        self._seen: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.exchanged = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.exchanged = self.exchanged or func.namespace in COLLECTIVE_NAMESPACES
        kind = "product" if name in _PRODUCTS else "norm" if name in _NORMS else ""
        if kind and self._seen.total() < _MAX_EVENTS:
            with self._log.overhead():
                self._look(kind, name, args)
        return func(*args, **(kwargs or {}))

    def _look(self, kind: str, name: str, args: Any) -> None:
        for tensor in (t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dim() < 2:
                continue
            shape = tuple(tensor.shape[-2:]) if kind == "product" else tuple(tensor.shape)
            found = next((one for one in (shape, shape[::-1]) if one in self._shapes), None)
            if found is not None:
                self._seen[kind, found] += 1
                if self._seen[kind, found] <= _NEEDED[kind]:
                    weight, whole = self._shapes[found]
                    shapes = {"shape": list(found), "whole": list(whole)}
                    self._log.record(
                        "of_shard", None, False, opt=self._number, kind=kind, op=name, weight=weight, **shapes
                    )
                return


class _ShardRecorder:
    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._steps: dict[int, int] = {}  # optimizer -> number of inspected steps
        self._mode: _ShardMode | None = None  # the mode of the current step

    def before_step(self, optimizer: Any, args: Any, options: Any) -> None:
        self._leave()  # exit the mode of an earlier step that failed
        number = number_of(optimizer)
        if number is None or not self._log.active or self._steps.get(number, 0) >= _STEPS:
            return
        if type(optimizer).__module__.startswith(_KNOWS_DTENSORS) or len(args) > 1 or options.get("closure"):
            return  # a closure runs forward and backward passes
        shapes: Shapes = {}
        with self._log.overhead():
            shapes = _shard_shapes(optimizer)
        if shapes:
            self._steps[number] = self._steps.get(number, 0) + 1
            self._mode = _ShardMode(self._log, number, shapes)
            self._mode.__enter__()

    def after_step(self, optimizer: Any, args: Any, options: Any) -> None:
        mode = self._leave()
        if mode is not None and self._log.active:
            kind, number = type(optimizer).__name__, number_of(optimizer)
            self._log.record("shards", opt=number, optimizer=kind, exchanged=mode.exchanged)

    def _leave(self) -> _ShardMode | None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        return mode


def _shard_shapes(optimizer: Any) -> Shapes:
    """The shapes of this rank's shards of the matrices that an optimizer trains. A shape is left out if a whole matrix
    also has it."""
    shards: Shapes = {}
    wholes: set[tuple[int, ...]] = set()
    for group in optimizer.param_groups:
        for place, p in enumerate(group["params"]):
            whole = tuple(p.shape)
            wholes |= {whole, whole[::-1]}
            if hasattr(p, "to_local") and p.dim() >= 2:
                own = tuple(p.to_local().shape)
                if own != whole and 0 not in own:
                    shards.setdefault(own, (f"parameter {place + 1}", whole))
    return {shape: about for shape, about in shards.items() if shape not in wholes}


def install(log: EventLog) -> None:
    if not dist.is_available():
        return
    recorder, patches, models = _FSDPRecorder(log), log.patches, log.shared.models
    shards = _ShardRecorder(log)
    register_optimizer_step_pre_hook(recorder.record_cut)
    register_optimizer_step_pre_hook(shards.before_step)
    register_optimizer_step_post_hook(shards.after_step)

    def composable(module: ModuleType) -> None:
        original = module.fully_shard
        patches.around(module, "fully_shard", recorder.around_fully_shard)
        for name in FSDP_EXPORTS:
            if getattr(sys.modules.get(name), "fully_shard", None) is original:
                patches.replace(sys.modules[name], "fully_shard", module.fully_shard)
        patches.before(module.FSDPModule, "set_requires_gradient_sync", models.before_gradient_sync)
        for name in _DIVIDES:
            if hasattr(module.FSDPModule, name):
                patches.before(module.FSDPModule, name, models.before_own_reduction)

    def state(module: ModuleType) -> None:
        if hasattr(module.FSDPState, FSDP_BEFORE_FORWARD):
            patches.after(module.FSDPState, FSDP_BEFORE_FORWARD, recorder.after_pre_forward)

    def wrapper(module: ModuleType) -> None:
        patches.after(module.FullyShardedDataParallel, "__init__", recorder.after_init)
        patches.before(module.FullyShardedDataParallel, "no_sync", models.before_no_sync)

    after_import(FSDP_STATES, state)
    after_import(FSDP_FUNCTIONS, composable)
    after_import("torch.distributed.fsdp.fully_sharded_data_parallel", wrapper)
