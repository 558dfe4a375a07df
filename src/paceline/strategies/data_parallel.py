"""data_parallel: one process, several devices, parameter-server style. (Thin: weights are copied for every batch.)

Phase 1, scatter: weights and buffers of the first device, where the user's own model lives, are copied to the others.
Phase 2, forward: each replica computes its own shard and its own loss, in a thread of its own. The first device
  carries no outputs of the others, which is what nn.DataParallel lacks.
Phase 3, backward: each replica's, in its thread.
Phase 4, gather: the replicas' gradients are added to the first device's.
Phase 5, step: the update, on the first device.

Between devices, a step: weights out and gradients in, 2 (n - 1) times their bytes, all through the first device.
Memory: parameters and gradients once per device, optimizer state once.
Follows torch.nn.DataParallel, with the loss on the replicas (as PyTorch-Encoding's DataParallelCriterion has it).

Replicas on CPUs share one random generator, and so take turns (comm/replicas.py): `devices=cpu,cpu` computes the same
as two devices do, without being faster. With batch_norm="shard" the running statistics are the first replica's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.threads import ThreadTeam
from paceline.errors import ModelError, SettingError, UsageError
from paceline.strategies.base import Layout, Piece, Strategy, Term, Weight, Work, as_gradient
from paceline.strategies.placement import move
from paceline.strategies.replicated import load_replicated, replicated_state
from paceline.world import World


class DataParallel(Strategy):
    """devices: such as "cuda:0,cuda:1" or "cpu,cpu"; all accelerators of this machine if not given."""

    closure_only = True

    def __init__(self, world: World, device: torch.device, *, devices: str = "") -> None:
        if world.size != 1:
            raise SettingError(
                f"strategy data_parallel runs in one process, but there are {world.size}. Start one, or use "
                "strategy='ddp'."
            )
        self.devices = _devices(devices)
        self.layout = Layout(shards=len(self.devices), mine=tuple(range(len(self.devices))))
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self._copies: list[list[nn.Module]] = []  # for each further replica: its models
        self._found: list[_Counterparts] = []  # and its counterparts to the user's modules and parameters
        self._team = ThreadTeam(len(self.devices), take_turns=self.devices[0].type == "cpu")

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.models, self.optimizers = list(models), list(optimizers)
        for model in models:
            model.to(self.devices[0])
        self._copies = []
        for device in self.devices[1:]:
            memo: dict[int, Any] = {}  # one for all models: what they share stays shared
            self._copies.append([copy.deepcopy(model, memo).to(device) for model in models])

    def forward_backward(self, work: Work) -> list[list[Term]]:
        self._scatter()
        trees = [work.model, *(_swap(work.model, found) for found in self._found)]
        terms = self._team.run(
            [
                partial(_forward, work, tree, piece, device)
                for tree, piece, device in zip(trees, work.pieces, self.devices, strict=True)
            ]
        )
        inputs = [work.inputs, *(_swap(work.inputs, found) for found in self._found)]
        for weights, retain_graph in work.passes(terms):
            self._team.run(
                [
                    partial(_backward, of_one, row, chosen, retain_graph)
                    for of_one, row, chosen in zip(terms, weights, inputs, strict=True)
                ]
            )
            self._gather()
        return [[Term(term.value.detach(), term.count) for term in of_one] for of_one in terms]

    @torch.no_grad()
    def _scatter(self) -> None:
        """Whatever of a model may have changed: weights, buffers, numbers. Where it is no longer built as its copies
        are, they are made anew."""
        found = [_counterparts(self.models, copies) for copies in self._copies]
        if None in found:
            self.setup(self.models, self.optimizers)
            found = [_counterparts(self.models, copies) for copies in self._copies]
        self._found = [one for one in found if one is not None]
        if len(self._found) < len(found):
            names = ", ".join(type(model).__name__ for model in self.models)
            raise ModelError(
                f"strategy data_parallel: copy.deepcopy of {names} gives something that is built otherwise. Use "
                "strategy='ddp'."
            )
        for device, counterparts in zip(self.devices[1:], self._found, strict=True):
            for own, its in counterparts.parameters.items():
                its.copy_(own)
                its.requires_grad_(own.requires_grad)
            for module, copied in counterparts.modules.items():
                vars(copied).update((key, value) for key, value in vars(module).items() if type(value) in _PLAIN)
                for name, buffer in module._buffers.items():
                    copied._buffers[name] = _refilled(copied._buffers[name], buffer, device)

    @torch.no_grad()
    def _gather(self) -> None:
        for counterparts in self._found:
            for own, its in counterparts.parameters.items():
                grad, its.grad = its.grad, None
                if grad is None:
                    continue
                if own.grad is None:
                    own.grad = grad.to(own.device)
                else:
                    own.grad += grad.to(own.device)

    def backward(
        self,
        roots: Sequence[Tensor],
        weights: Sequence[Weight],
        *,
        final: bool,
        call: int,
        inputs: Sequence[Tensor] | None = None,
        retain_graph: bool = False,
    ) -> None:
        raise UsageError("strategy data_parallel needs the closure form: run.forward_backward(loss_fn, model, batch).")

    def state_dict(self) -> dict[str, Any]:
        return replicated_state(self.models, self.optimizers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state)

    def close(self) -> None:
        self._team.close()
        self._copies, self._found = [], []


def _devices(text: str) -> list[torch.device]:
    if text:
        names = text.replace("+", ",").split(",")
    else:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        names = [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())] if kind is not None else []
    try:
        devices = [torch.device(name.strip()) for name in names]
    except RuntimeError as error:
        raise SettingError(f"strategy data_parallel: devices={text!r}: {str(error).splitlines()[0]}") from None
    if len(devices) < 2:
        found = f"devices={text!r} names {len(devices)}" if text else f"this machine has {len(devices)} accelerator(s)"
        raise SettingError(
            f"strategy data_parallel needs at least two devices, but {found}. Name them (devices=cuda:0,cuda:1, or "
            "cpu,cpu to try it without), or use strategy='single'."
        )
    if devices[0].type != "cpu" and len(set(devices)) < len(devices):
        raise SettingError(
            f"strategy data_parallel: devices={text!r} names a device twice: its replicas would wait for each other "
            "for ever in batch norm. Name each once."
        )
    if len({device.type for device in devices}) > 1:
        raise SettingError(f"strategy data_parallel: devices={text!r} are of several types. Name devices of one type.")
    return devices


_PLAIN = (bool, int, float, str)
"""Attributes of modules that are copied with the weights: `training`, a temperature, the p of a dropout."""


@dataclass(frozen=True)
class _Counterparts:
    """The user's modules and parameters -> those of one replica."""

    modules: dict[nn.Module, nn.Module]
    parameters: dict[nn.Parameter, nn.Parameter]


def _counterparts(models: Sequence[nn.Module], copies: Sequence[nn.Module]) -> _Counterparts | None:
    """Paired by name. None where a model is no longer built as its copy is."""
    found = _Counterparts({}, {})
    for model, copied in zip(models, copies, strict=True):
        own, its = dict(model.named_modules()), dict(copied.named_modules())
        if own.keys() != its.keys():
            return None
        for name, module in own.items():
            other = found.modules[module] = its[name]
            if (
                type(module) is not type(other)
                or module._parameters.keys() != other._parameters.keys()
                or module._buffers.keys() != other._buffers.keys()
            ):
                return None
            for key, p in module._parameters.items():
                q = other._parameters[key]
                if p is None or q is None:
                    if p is not q:
                        return None
                elif p.shape != q.shape or p.dtype != q.dtype or found.parameters.setdefault(p, q) is not q:
                    return None
    return found


def _refilled(its: Tensor | None, own: Tensor | None, device: torch.device) -> Tensor | None:
    """A replica's buffer with the user's values: in place, unless a forward has put another tensor there."""
    if own is None:
        return None
    if its is None or its.shape != own.shape or its.dtype != own.dtype or its.requires_grad or 0 in its.stride():
        return own.detach().to(device, copy=True)
    return its.copy_(own)


def _swap(tree: Any, found: _Counterparts) -> Any:
    """The user's model (or tuple, list, dict of models, or list of parameters) with this replica's in their places."""
    if isinstance(tree, (tuple, list)):
        return type(tree)(_swap(item, found) for item in tree)
    if isinstance(tree, dict):
        return {key: _swap(value, found) for key, value in tree.items()}
    if isinstance(tree, nn.Parameter):
        return found.parameters.get(tree, tree)
    return found.modules.get(tree, tree) if isinstance(tree, nn.Module) else tree


def _forward(work: Work, model: Any, piece: Piece, device: torch.device) -> list[Term]:
    return work.compute(model, replace(piece, batch=move(piece.batch, device)), device)


def _backward(
    terms: Sequence[Term], weights: Sequence[Weight | None], inputs: Sequence[Tensor] | None, retain_graph: bool
) -> None:
    pairs = [(term.value, weight) for term, weight in zip(terms, weights, strict=True) if weight is not None]
    torch.autograd.backward(
        [value for value, _ in pairs],
        [as_gradient(weight, value) for value, weight in pairs],
        inputs=inputs,
        retain_graph=retain_graph,
    )
