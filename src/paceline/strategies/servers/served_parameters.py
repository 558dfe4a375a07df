"""The state of one server: whole parameters of the model, and the user's optimizers for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.torch_private.core import OPTIMIZER_HOOKS, step_post_hooks, step_pre_hooks

Setting = list[dict[str, Any]]
"""For each group of an optimizer: its options, without the parameters."""


class ServedParameters:
    """The parameters of one server. They are updated in place, on the CPU."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.optimizers: list[Any] = []  # like the user's optimizers, with this server's parameters only
        # For each optimizer: the index of the user's parameter group that each local group came from.
        self._groups: list[list[int]] = []
        self._names: list[list[str]] = []  # for each optimizer: the names of its parameters

    def add(
        self, owned: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """Set the parameters that this server owns, and free the memory of all others.

        owned: all parameters that this server owns now. optimizers: all optimizers of the user, including those of
        earlier calls. names: the names of all parameters.
        """
        self.by_name = dict(owned)
        self._groups, self._names = [], []
        for number, optimizer in enumerate(optimizers):
            if number == len(self.optimizers):
                self.optimizers.append(_optimizer_like(optimizer, [p for p in names if names[p] in owned]))
            self._set_groups(self.optimizers[number], optimizer, names)
        for parameter, name in names.items():
            if name not in self.by_name:
                parameter.data = parameter.data.new_empty(0)

    def _set_groups(self, own: Any, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Give the optimizer `own` the user's groups, with this server's parameters only."""
        own.param_groups, numbers = [], []
        for number, group in enumerate(optimizer.param_groups):
            mine = [p for p in group["params"] if names[p] in self.by_name]
            if mine:
                own.param_groups.append({**group, "params": mine})
                numbers.append(number)
        self._groups.append(numbers)
        self._names.append([names[p] for group in own.param_groups for p in group["params"]])

    def of(self, number: int) -> list[tuple[str, Tensor]]:
        """(name, parameter) for each parameter of an optimizer."""
        return [(name, self.by_name[name]) for name in self._names[number]]

    def update(self, number: int, setting: Setting, seed: int, gradients: Mapping[str, Tensor]) -> None:
        """Make one update. seed: for the update's random draws."""
        optimizer = self.optimizers[number]
        for own, of_user in zip(optimizer.param_groups, self._groups[number], strict=True):
            for key, value in _on_cpu(setting[of_user]).items():
                own[key] = tuple(value) if isinstance(own.get(key), tuple) else value
        torch.manual_seed(seed)
        for name, gradient in gradients.items():
            self.by_name[name].grad = gradient
        if gradients:
            optimizer.step()
        for name in gradients:
            self.by_name[name].grad = None

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.by_name[name].copy_(value)

    def state(self, number: int) -> tuple[dict[str, dict[str, Any]], list[tuple[str, Tensor]]]:
        """An optimizer's state: {parameter: {key: value}} for plain values; tensors by "parameter\\nkey"."""
        plain: dict[str, dict[str, Any]] = {}
        tensors: list[tuple[str, Tensor]] = []
        for name, parameter in self.of(number):
            if parameter not in self.optimizers[number].state:
                continue
            plain[name] = {}
            for key, value in self.optimizers[number].state[parameter].items():
                if isinstance(value, Tensor):
                    tensors.append((f"{name}\n{key}", value))
                else:
                    plain[name][key] = value
        return plain, tensors

    def set_state(self, number: int, plain: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Replace an optimizer's state by values that `state` returned."""
        state = self.optimizers[number].state
        state.clear()
        for name, values in plain.items():
            state[self.by_name[name]] = dict(values)
        for whole, tensor in tensors.items():
            name, _, key = whole.partition("\n")
            parameter = self.by_name[name]
            if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
                tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            state[parameter][key] = tensor


def _on_cpu(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group for an update on the CPU. `capturable` is switched off: it needs an accelerator, and does
    not change results."""
    return {key: False if key == "capturable" else value for key, value in options.items()}


def _optimizer_like(optimizer: torch.optim.Optimizer, owned: Sequence[Tensor]) -> Any:
    """An optimizer of the same class with the same attributes, without the methods that the run has replaced on the
    user's optimizer (guards, step counts for schedulers). Raises UsageError if the script has added hooks."""
    if step_post_hooks(optimizer) or len(step_pre_hooks(optimizer)) > 1:  # one hook belongs to the run
        raise UsageError(
            f"strategy parameter_server: {type(optimizer).__name__} has hooks of the script (register_step_pre_hook, "
            "register_step_post_hook), but the servers make its updates. Do their work after run.step instead."
        )
    own = object.__new__(type(optimizer))
    own.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
    for hooks in OPTIMIZER_HOOKS[:2]:
        setattr(own, hooks, type(getattr(optimizer, hooks))())
    mine = set(owned)
    own.state = defaultdict(dict, {p: state for p, state in optimizer.state.items() if p in mine})
    return own
