"""What an optimizer computes of its process's shards of weights and gradients (FSDP2), in its first steps.

An optimizer that works element by element may work on shards. A product of matrices, a decomposition or a norm of a
shard alone is not that of the whole weight. DTensor's own operations on shards are whole ones: of these the mode below
sees the DTensors, and not the shards inside.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.doctor.recorders.shared_state import number_of
from paceline.observe.event_log import EventLog
from paceline.torch_private.core import TorchDispatchMode
from paceline.torch_private.observed import COLLECTIVE_NAMESPACES, DECOMPOSITIONS, NORMS_OF_MANY

_STEPS = 3  # of an optimizer, that are looked into
_MAX_EVENTS = 8  # of a step
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linalg_svd", "linalg_qr", "linalg_eigh", "linalg_cholesky_ex",
             "linalg_inv_ex", "linalg_matrix_exp", *DECOMPOSITIONS)  # fmt: skip
_NORMS = ("linalg_vector_norm", "norm", "linalg_matrix_norm", NORMS_OF_MANY)
_NEEDED = {"product": 1, "norm": 2}  # operations of a kind on one shape that are recorded
_KNOWS_DTENSORS = "torch.optim"

Shapes = dict[tuple[int, ...], tuple[str, tuple[int, ...]]]  # a shard's shape -> the weight's name, its whole shape


class _ShardMode(TorchDispatchMode):
    """While it is active: operations on plain matrices of a shard's shape, and that something was exchanged."""

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
        self._steps: dict[int, int] = {}  # optimizer -> steps that were looked into
        self._mode: _ShardMode | None = None  # of the step under way

    def before_step(self, optimizer: Any, args: Any, options: Any) -> None:
        self._leave()  # a step that failed
        number = number_of(optimizer)
        if number is None or not self._log.active or self._steps.get(number, 0) >= _STEPS:
            return
        if type(optimizer).__module__.startswith(_KNOWS_DTENSORS) or len(args) > 1 or options.get("closure"):
            return  # a closure computes forward and backward passes
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
    """Of the matrices that an optimizer trains and this process has a part of. No shape that is also a whole one's."""
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
    recorder = _ShardRecorder(log)
    register_optimizer_step_pre_hook(recorder.before_step)
    register_optimizer_step_post_hook(recorder.after_step)
