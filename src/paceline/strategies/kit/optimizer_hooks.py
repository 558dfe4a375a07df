"""Updates that are more than `optimizer.step()`: they run within the script's hooks, or on further replicas."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.torch_private.core import OPTIMIZER_HOOKS


def step_between_hooks(optimizer: torch.optim.Optimizer, update: Callable[..., None]) -> None:
    """Calls the script's hooks before the step, then `update`, which calls the optimizer's step without hooks, then the
    hooks after it. Hooks read and write the script's own parameters and gradients: those before the step must run
    before anything travels, those after it when all has arrived."""
    before, after = (getattr(optimizer, name) for name in OPTIMIZER_HOOKS[:2])
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in list(before.values()):
        changed = hook(optimizer, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    for name in OPTIMIZER_HOOKS[:2]:
        setattr(optimizer, name, OrderedDict())
    try:
        update(*args[1:], **kwargs)
    finally:
        for name, kept in zip(OPTIMIZER_HOOKS[:2], (before, after), strict=True):
            setattr(optimizer, name, kept)
    for hook in list(after.values()):
        hook(optimizer, args, kwargs)


def optimizer_like(
    optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, Tensor], device: torch.device
) -> torch.optim.Optimizer:
    """An optimizer of the same class, with the same state, for the copies of its parameters on another device. Without
    the script's hooks, and without groups (`follow_groups`). Raises ModelError where it cannot be copied."""
    memo: dict[int, Any] = {id(p): its for p, its in copies.items()}
    # Guards and schedulers have put `step` and `zero_grad` on it.
    left_out = {"state", "param_groups", "step", "zero_grad", *OPTIMIZER_HOOKS}
    try:
        own = copy.deepcopy({key: value for key, value in vars(optimizer).items() if key not in left_out}, memo)
    except Exception as error:
        raise ModelError(
            f"{type(optimizer).__name__} cannot be copied for {device}: copy.deepcopy of its attributes says "
            f"{type(error).__name__}: {error}. Use strategy='data_parallel', where one optimizer makes all updates."
        ) from error
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(made).update(
        own, state=defaultdict(dict), param_groups=[], **{name: OrderedDict() for name in OPTIMIZER_HOOKS}
    )
    for key, values in optimizer.state.items():
        here = key.device if isinstance(key, Tensor) else None
        made.state[copies.get(key, key)] = carried(values, here, device, memo)
    return made


def follow_groups(
    made: torch.optim.Optimizer, optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, Tensor], device: torch.device
) -> None:
    """Copies the groups: the learning rate, which schedulers change, all other options, and the parameters."""
    made.param_groups = [
        {
            **{
                key: value.to(device) if isinstance(value, Tensor) and value.device.type == device.type else value
                for key, value in group.items()
            },
            "params": [copies[p] for p in group["params"] if p in copies],  # a layer may have been taken out
        }
        for group in optimizer.param_groups
    ]


def carried(value: Any, here: torch.device | None, to: torch.device, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an optimizer's state, with tensors that are `here` on another device; a step counter that is kept on
    the CPU stays there. here: None for all tensors."""
    if isinstance(value, Tensor):
        return value.detach().to(to if here is None or value.device == here else value.device, copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: carried(item, here, to, memo) for key, item in value.items()})
        return copied
    if type(value) in (list, tuple):
        return type(value)(carried(item, here, to, memo) for item in value)
    return copy.deepcopy(value, memo)


class GeneratorStates:
    """The states of the generators that an update may draw from: torch's default one, and a device's."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.default_generator.get_state()
        self._device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore_on(self, device: torch.device) -> None:
        """Sets the default generator, and this device's, to these states."""
        torch.default_generator.set_state(self._host)
        if self._device is not None:
            torch.get_device_module(device).set_rng_state(self._device, device)
