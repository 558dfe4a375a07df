"""A server's shard: whole parameters, and the user's optimizers for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.torch_private.core import OPTIMIZER_HOOKS, step_post_hooks, step_pre_hooks

Setting = list[dict[str, Any]]
"""Of each group of an optimizer, its options but for the parameters."""


class Shard:
    """parameters: those that this server owns, by name. They are updated in place, on the CPU."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.optimizers: list[Any] = []  # the user's, with this shard's parameters
        self._groups: list[list[int]] = []  # of each, which of the user's groups its own are
        self._names: list[list[str]] = []  # of each, its parameters

    def add(
        self, owned: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer], names: Mapping[Tensor, str]
    ) -> None:
        """owned: all that this server owns now. optimizers: all of the user's, those known already too. names: of all
        parameters. The memory of those that others own is let go."""
        self.parameters = dict(owned)
        self._groups, self._names = [], []
        for number, optimizer in enumerate(optimizers):
            if number == len(self.optimizers):
                self.optimizers.append(_like(optimizer, [p for p in names if names[p] in owned]))
            self._divide(self.optimizers[number], optimizer, names)
        for parameter, name in names.items():
            if name not in self.parameters:
                parameter.data = parameter.data.new_empty(0)

    def _divide(self, own: Any, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        """Groups with this shard's parameters only."""
        own.param_groups, numbers = [], []
        for number, group in enumerate(optimizer.param_groups):
            mine = [p for p in group["params"] if names[p] in self.parameters]
            if mine:
                own.param_groups.append({**group, "params": mine})
                numbers.append(number)
        self._groups.append(numbers)
        self._names.append([names[p] for group in own.param_groups for p in group["params"]])

    def of(self, number: int) -> list[tuple[str, Tensor]]:
        """The parameters of an optimizer, by name."""
        return [(name, self.parameters[name]) for name in self._names[number]]

    def update(self, number: int, setting: Setting, seed: int, gradients: Mapping[str, Tensor]) -> None:
        """One update. What it draws at random is of the given seed."""
        optimizer = self.optimizers[number]
        for own, of_user in zip(optimizer.param_groups, self._groups[number], strict=True):
            for key, value in setting[of_user].items():
                own[key] = tuple(value) if isinstance(own.get(key), tuple) else value
        torch.manual_seed(seed)
        for name, gradient in gradients.items():
            self.parameters[name].grad = gradient
        if gradients:
            optimizer.step()
        for name in gradients:
            self.parameters[name].grad = None

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.parameters[name].copy_(value)

    def state(self, number: int) -> tuple[dict[str, dict[str, Any]], list[tuple[str, Tensor]]]:
        """An optimizer's state: {parameter: {key: value}} of what is no tensor; the tensors by "parameter\\nkey"."""
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
        """Puts back what `state` gives, in place of what is there."""
        state = self.optimizers[number].state
        state.clear()
        for name, values in plain.items():
            state[self.parameters[name]] = dict(values)
        for whole, tensor in tensors.items():
            name, _, key = whole.partition("\n")
            parameter = self.parameters[name]
            if tensor.shape == parameter.shape and tensor.stride() != parameter.stride():
                tensor = torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)
            state[parameter][key] = tensor


def _like(optimizer: torch.optim.Optimizer, owned: Sequence[Tensor]) -> Any:
    """The same class and attributes. What the run has put on the user's own (guards, the counting of schedulers) stays
    behind. Raises UsageError where the script has put hooks on it."""
    if step_post_hooks(optimizer) or len(step_pre_hooks(optimizer)) > 1:  # one is the run's
        raise UsageError(
            f"strategy parameter_server: {type(optimizer).__name__} has hooks of the script's (register_step_pre_hook, "
            "register_step_post_hook), but its updates are made on the servers. Do after run.step what they do."
        )
    own = object.__new__(type(optimizer))
    own.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
    for hooks in OPTIMIZER_HOOKS[:2]:
        setattr(own, hooks, type(getattr(optimizer, hooks))())
    mine = set(owned)
    own.state = defaultdict(dict, {p: state for p, state in optimizer.state.items() if p in mine})
    return own
