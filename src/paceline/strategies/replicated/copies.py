"""Copies the user's models to further devices, and updates the copies when the models change (replica_set.py).

copy.deepcopy makes a copy, with a memo that already holds parameters and buffers on the device. So tied parameters stay
tied, and models that share layers still share them. A copy's parameters may share the memory of another copy on the
same device, or of the user's model. Such a copy has separate gradients and buffers, but no separate weights.
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
    compile_like,
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
    """Copy models to a device. Returns (user's module -> copy, user's parameter -> copy).

    memory: user's parameter -> parameter on this device that shares its memory with the copy; None: separate memory.
    Raises ModelError for a model that copy.deepcopy cannot copy completely.
    """
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
                f"{type(model).__name__} cannot be copied to {device}: copy.deepcopy raised {type(error).__name__}: "
                f"{error}. Make copy.deepcopy(model) work, or use strategy='ddp', which needs no copies."
            ) from error
        for name, module in model.named_modules():
            if compiled_call(module) is not None and id(module) in memo:  # deepcopy drops the compiled call
                compile_like(module, memo[id(module)])
            its = modules[module] = memo.get(id(module), module)
            whole = its is not module and children_of(its).keys() == children_of(module).keys()
            if not whole or any(
                parameters_of(its).get(key) is not (None if p is None else copies[p])
                for key, p in parameters_of(module).items()
            ):
                raise ModelError(
                    f"copy.deepcopy of {type(model).__name__} returns a model with a different structure (at "
                    f"{name or 'the model itself'}), so its replicas would be different models. Use strategy='ddp'."
                )
    return modules, copies


def _copied_parameter(own: Tensor, device: torch.device, memory: Tensor | None) -> Tensor:
    if type(own) is nn.Parameter:
        data = own.detach().to(device, copy=True) if memory is None else memory.detach()
        its: Tensor = nn.Parameter(data, requires_grad=own.requires_grad)
    else:
        its = copy.deepcopy(own)
        its.data = its.data.to(device) if memory is None else memory.data
    vars(its).update(vars(own))  # attributes that optimizers read
    follow_flags(own, its)
    return its


def follow_flags(own: Tensor, its: Tensor) -> None:
    if its.requires_grad != own.requires_grad:
        its.requires_grad_(own.requires_grad)
    for name in TENSOR_HOOKS:
        hooks = getattr(own, name)
        if hooks is not getattr(its, name):  # both share one dictionary, so a hook added later acts on both
            setattr(its, name, hooks)


_PLAIN = (bool, int, float, str, type(None))
"""Types of module attributes that are sent to copies, such as `training`, a temperature or a dropout's p."""


class Record:
    """The state of a user's module when it was copied, and its copies."""

    def __init__(self, module: nn.Module, copies: Sequence[nn.Module]) -> None:
        self._module, self._copies, self._kind = module, copies, type(module)
        self._children, self._parameters = dict(children_of(module)), dict(parameters_of(module))
        self._buffer_names = list(buffers_of(module))
        self._hooks = [list(vars(module)[name]) for name in MODULE_HOOKS]
        self._numbers = self._numbers_now()
        self._buffers: list[tuple[Tensor | None, int]] = []
        self.note_buffers()

    def holds(self) -> bool:
        """Whether the module still has the structure that was copied."""
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
        """Send all buffers to the copies if the version of any buffer has changed. (torch's batch norm writes to its
        statistics without a new version, but the version of its count of batches changes.) Buffers that can be filled
        in place are added to `waiting`."""
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
        """A batch norm's running mean and variance, if torch's forward computes them from one shard; otherwise [].
        number: of the copy; None: the user's module."""
        module = self._module if number is None else self._copies[number]
        own = (
            self._module.training
            and isinstance(module, BatchNormBase)
            and type(module).forward is BatchNormBase.forward
        )
        return [b for b in (module.running_mean, module.running_var) if b is not None] if own else []  # type: ignore[misc]

    def raise_counts(self) -> None:
        """Set all replicas' counts of batches to the maximum. A replica with an empty shard has counted one batch
        less."""
        if self.statistics():
            counts: list[Any] = [module.num_batches_tracked for module in (self._module, *self._copies)]
            most = torch.stack([count.to(counts[0].device) for count in counts]).amax()
            for count in counts:
                count.copy_(most)


def _same(now: Mapping[str, Any], then: Mapping[str, Any]) -> bool:
    return len(now) == len(then) and all(key in now and now[key] is value for key, value in then.items())


def _fits(its: Tensor, own: Tensor) -> bool:
    """Whether a copy's buffer can be filled in place. If not, a forward has replaced it by another tensor."""
    return its.shape == own.shape and its.dtype == own.dtype and not its.requires_grad and 0 not in its.stride()
