"""Updates that do more than `optimizer.step()`: more work between the script's hooks, or updates of other replicas."""

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
    """Call the script's pre-step hooks, then `update`, then the post-step hooks.

    `update` calls the optimizer's step without hooks. Hooks read and write the script's parameters and gradients, so
    pre-step hooks must run before all communication, and post-step hooks after all communication.
    """
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
    """Make an optimizer of the same class and state, for copies of the parameters on another device.

    The new optimizer has no hooks of the script. It has no parameter groups until `follow_groups`. Raises ModelError if
    the optimizer cannot be copied.
    """
    memo: dict[int, Any] = {id(p): its for p, its in copies.items()}
    # Guards and schedulers have wrapped `step` and `zero_grad` on the instance.
    left_out = {"state", "param_groups", "step", "zero_grad", *OPTIMIZER_HOOKS}
    try:
        own = copy.deepcopy({key: value for key, value in vars(optimizer).items() if key not in left_out}, memo)
    except Exception as error:
        raise ModelError(
            f"{type(optimizer).__name__} cannot be copied to {device}: copy.deepcopy of its attributes raised "
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
    """Copy the parameter groups to `made`: all options (schedulers change the learning rate), and the parameters."""
    made.param_groups = [
        {
            **{
                key: value.to(device) if isinstance(value, Tensor) and value.device.type == device.type else value
                for key, value in group.items()
            },
            "params": [copies[p] for p in group["params"] if p in copies],  # a layer may have been removed
        }
        for group in optimizer.param_groups
    ]


def carried(value: Any, here: torch.device | None, to: torch.device, memo: dict[int, Any] | None = None) -> Any:
    """Copy an optimizer's state, and move its tensors from the device `here` to the device `to`.

    Tensors on other devices stay on them, such as a step counter on the CPU. here: None moves all tensors.
    """
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
    """The states of the generators that an update may draw from: torch's default generator and the device's generator.

    They are read when the object is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.default_generator.get_state()
        self._device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)

    def restore_on(self, device: torch.device) -> None:
        """Set torch's default generator and this device's generator to these states."""
        torch.default_generator.set_state(self._host)
        if self._device is not None:
            torch.get_device_module(device).set_rng_state(self._device, device)
