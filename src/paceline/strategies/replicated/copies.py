"""Copies of the user's models on further devices, and the changes in the models that copies follow (replica_set.py).

copy.deepcopy makes a copy; its memo has parameters and buffers that were made on the device directly. So tied
parameters and models that share layers stay so. A copy's parameters may share the memory of another copy on the same
device, or of the user's: it then has its own gradients and buffers, and no weights of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import ModelError
from paceline.torch_private.core import (
    MODULE_HOOKS,
    TENSOR_HOOKS,
    BatchNormBase,
    buffers_of,
    children_of,
    compile_module,
    compiled_call,
    parameters_of,
    version_of,
)


def copied(
    models: Sequence[nn.Module],
    parameters: Sequence[Tensor],
    device: torch.device,
    memory: Mapping[Tensor, Tensor] | None = None,
) -> tuple[dict[nn.Module, nn.Module], dict[Tensor, Tensor]]:
    """(user's module -> copy, user's parameter -> copy), on this device. memory: the user's parameter -> the parameter
    on this device whose memory the copy shares. Raises ModelError for a model that copy.deepcopy does not copy
    whole."""
    memo: dict[int, Any] = {}
    copies = {}
    for p in parameters:
        copies[p] = memo[id(p)] = _copied_parameter(p, device, None if memory is None else memory[p])
    for model in models:
        for buffer in model.buffers():
            if id(buffer) not in memo:
                memo[id(buffer)] = buffer.detach().to(device, copy=True)
    modules: dict[nn.Module, nn.Module] = {}
    for model in models:
        try:
            copy.deepcopy(model, memo)
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be copied to {device}: copy.deepcopy says {type(error).__name__}: "
                f"{error}. Let copy.deepcopy(model) work, or use strategy='ddp', which needs no copies."
            ) from error
        for name, module in model.named_modules():
            if compiled_call(module) is not None and id(module) in memo:  # which deepcopy leaves out
                compile_module(memo[id(module)])
            its = modules[module] = memo.get(id(module), module)
            whole = its is not module and children_of(its).keys() == children_of(module).keys()
            if not whole or any(
                parameters_of(its).get(key) is not (None if p is None else copies[p])
                for key, p in parameters_of(module).items()
            ):
                raise ModelError(
                    f"copy.deepcopy of {type(model).__name__} gives something that is built otherwise (in "
                    f"{name or 'the model itself'}): its replicas would not be the same model. Use strategy='ddp'."
                )
    return modules, copies


def _copied_parameter(own: Tensor, device: torch.device, memory: Tensor | None) -> Tensor:
    if type(own) is nn.Parameter:
        data = own.detach().to(device, copy=True) if memory is None else memory.detach()
        its: Tensor = nn.Parameter(data, requires_grad=own.requires_grad)
    else:
        its = copy.deepcopy(own)
        its.data = its.data.to(device) if memory is None else memory.data
    vars(its).update(vars(own))  # marks that optimizers look at
    follow_flags(own, its)
    return its


def follow_flags(own: Tensor, its: Tensor) -> None:
    if its.requires_grad != own.requires_grad:
        its.requires_grad_(own.requires_grad)
    for name in TENSOR_HOOKS:
        hooks = getattr(own, name)
        if hooks is not getattr(its, name):  # one dictionary for both: what is added to it later acts on both
            setattr(its, name, hooks)


_PLAIN = (bool, int, float, str, type(None))
"""Attributes of modules that are followed: `training`, a temperature, the p of a dropout."""


class Record:
    """A module of the user's as it was when it was copied, and its copies."""

    def __init__(self, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._module, self._copies, self._kind = module, copies, type(module)
        self._children, self._parameters = dict(children_of(module)), dict(parameters_of(module))
        self._buffer_names = list(buffers_of(module))
        self._hooks = [list(vars(module)[name]) for name in MODULE_HOOKS]
        self._numbers = self._numbers_now()
        self._buffers: list[tuple[Tensor | None, int]] = []
        self.note_buffers()

    def holds(self) -> bool:
        """Whether the module still has the same structure."""
        module, kept = self._module, vars(self._module)
        return (
            type(module) is self._kind
            and _same(children_of(module), self._children)
            and _same(parameters_of(module), self._parameters)
            and list(buffers_of(module)) == self._buffer_names
            and all(list(kept[name]) == keys for name, keys in zip(MODULE_HOOKS, self._hooks))
        )

    def _numbers_now(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self._module).items() if type(value) in _PLAIN}

    def send_numbers(self) -> None:
        now = self._numbers_now()
        if now != self._numbers:
            self._numbers = now
            for copied in self._copies:
                vars(copied).update(now)

    def _buffers_now(self) -> list[tuple[Tensor | None, int]]:
        return [(b, -1 if b is None else version_of(b)) for b in buffers_of(self._module).values()]

    def note_buffers(self) -> None:
        if self._buffer_names:
            self._buffers = self._buffers_now()

    def send_buffers(self, devices: Sequence[torch.device], waiting: list[tuple[Tensor, list[Tensor]]]) -> None:
        """Sends all buffers where the script has changed any of them: torch's batch norm writes to its statistics
        without a new version, but its count of batches shows it. Buffers that can be filled in place go to
        `waiting`."""
        if not self._buffer_names or all(
            b is c and i == j for (b, i), (c, j) in zip(self._buffers_now(), self._buffers, strict=True)
        ):
            return
        for name, own in buffers_of(self._module).items():
            theirs = [buffers_of(copied)[name] for copied in self._copies]
            filled = [its for its in theirs if own is not None and its is not None and _fits(its, own)]
            if own is not None and len(filled) == len(theirs):
                waiting.append((own.detach(), filled))
            else:
                for copied, device in zip(self._copies, devices, strict=True):
                    buffers_of(copied)[name] = None if own is None else own.detach().to(device, copy=True)
        self.note_buffers()

    def statistics(self, number: int | None = None) -> list[Tensor]:
        """A batch norm's running mean and variance, where torch's own forward computes them from one shard."""
        module = self._module if number is None else self._copies[number]
        own = (
            self._module.training
            and isinstance(module, BatchNormBase)
            and type(module).forward is BatchNormBase.forward
        )
        return [b for b in (module.running_mean, module.running_var) if b is not None] if own else []  # type: ignore[misc]

    def raise_counts(self) -> None:
        """Sets the counts of batches to the greatest: a replica with an empty shard has counted one less."""
        if self.statistics():
            counts: list[Any] = [module.num_batches_tracked for module in (self._module, *self._copies)]
            most = torch.stack([count.to(counts[0].device) for count in counts]).amax()
            for count in counts:
                count.copy_(most)


def _same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return len(now) == len(then) and all(key in now and now[key] is value for key, value in then.items())


def _fits(its: Tensor, own: Tensor) -> bool:
    """Whether a copy's buffer can be filled in place: a forward may have put another tensor there."""
    return its.shape == own.shape and its.dtype == own.dtype and not its.requires_grad and 0 not in its.stride()
