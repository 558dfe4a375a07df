"""FSDP wrapping: the layers that fsdp shards one by one, and all ways in which user code can call a sharded model.

FSDP2 gathers the parameters of a module when its forward is called. Scripts also call other methods of a model, or one
of its layers (`model.features(x)`, `model.head(x)`). Such a call is treated as the forward of the module that has the
parameters, unless it comes from within that forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from paceline.errors import ModelError, SettingError, UsageError
from paceline.strategies.kit.pickling import refuse_deepcopy
from paceline.torch_private import fully_shard
from paceline.torch_private.core import BatchNormBase, parameters_of


@dataclass(frozen=True)
class Sharding:
    """How models are sharded. All fields except `keep` are options of fsdp."""

    wrap: str  # the layers that are gathered one by one
    min_params: int  # layers with fewer parameters join the layer around them
    checkpointing: bool  # whether layers are recomputed in the backward
    find_unused: bool  # whether the parameters that a loss uses may differ between steps
    mixed: torch.dtype | None = None  # the dtype in which stages 2 and 3 gather parameters and compute
    offload: bool = False  # stages 2 and 3: whether shards are on the CPU
    keep: bool = False  # whether parameters stay gathered between forward and backward: stage 2

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return layers_of(model, self.wrap, self.min_params)


_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def layers_of(model: nn.Module, wrap: str, min_params: int) -> list[nn.Module]:
    """The layers that are gathered separately, inner ones first.

    wrap="auto": the entries of nn.Sequential, nn.ModuleList and nn.ModuleDict. Lists within lists are flattened; the
    inside of an entry is not searched. "none": no layer. Otherwise: names of classes, joined by "+". Layers with fewer
    than min_params parameters join the layer around them.
    """
    if wrap == "none":
        return []
    if wrap == "auto":
        found = list(_entries(model, isinstance(model, _LISTS)))
    else:
        names = set(wrap.split("+"))
        found = [m for m in model.modules() if type(m).__name__ in names and m is not model][::-1]
        missing = names - {type(m).__name__ for m in model.modules()}
        if missing:
            classes = sorted({type(m).__name__ for m in model.modules()})
            raise SettingError(
                f"strategy fsdp: wrap={wrap!r}: {type(model).__name__} has no module of the class "
                f"{', '.join(sorted(missing))}. It has {', '.join(classes)}."
            )
    unique = list({id(m): m for m in found}.values())
    return _untied(model, [m for m in unique if sum(p.numel() for p in m.parameters()) >= max(min_params, 1)])


def _untied(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Drop layers that share a parameter with other layers, or with modules outside of layers. A shared parameter is
    gathered by the module that contains all its users."""
    within = {layer: set(layer.modules()) for layer in [*layers, model]}
    users: dict[Tensor, set[nn.Module]] = {}
    for layer, modules in within.items():
        inner = set().union(*(within[other] for other in layers if other is not layer and other in modules))
        for module in modules - inner:
            for p in parameters_of(module).values():
                if p is not None and p.dim():
                    users.setdefault(p, set()).add(layer)
    sharing = set().union(*(used for used in users.values() if len(used) > 1))
    untied = [layer for layer in layers if layer not in sharing]
    return untied if len(untied) == len(layers) else _untied(model, untied)


def _entries(module: nn.Module, listed: bool) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, _LISTS):
            yield from _entries(child, True)
        elif listed:
            yield child
        else:
            yield from _entries(child, False)


def recompute(layers: Sequence[nn.Module]) -> None:
    """Activation checkpointing: run these layers' forward again in the backward. Raises ModelError if that would change
    results."""
    if not layers:
        raise ModelError(
            "strategy fsdp: checkpointing=true found no layer to recompute. Name the classes of layers "
            "(wrap=MyBlock+MyOther), or lower min_params."
        )
    for layer in layers:
        for name, module in layer.named_modules():
            if isinstance(module, BatchNormBase) and module.track_running_stats:
                raise ModelError(
                    f"strategy fsdp: checkpointing=true runs {type(layer).__name__} twice, so its batch norm {name!r} "
                    "would count each batch twice in its running statistics. Drop checkpointing, or use a "
                    "normalisation per example (GroupNorm)."
                )
        fully_shard.checkpoint(layer)


def gather_on_any_call(model: nn.Module) -> None:
    """Gather parameters whenever user code calls a module of a sharded model, or a public method of the model or of its
    layers. `save_pretrained` gathers none, since only one rank may call it; without a state_dict it raises UsageError.
    Call this once per model."""
    _wrap_calls(model, None, _Saving())


class _Saving:
    """Whether a model's save_pretrained is running. While it runs, other methods gather nothing."""

    active = False


def _wrap_calls(module: nn.Module, state: Any, saving: _Saving) -> None:
    if isinstance(module, FSDPModule):
        state = fully_shard.state_of(module)
        refuse_deepcopy(module, ModelError(_NO_COPY))
        for name in _public_methods(type(module)):
            method = getattr(module, name)
            wrapped = _writing(method, saving) if name == _WRITES else _as_forward(module, state, method, saving)
            setattr(module, name, wrapped)
    elif type(module).forward is not nn.Module.forward and any(True for _ in module.parameters()):
        module.forward = _as_forward(module, state, module.forward, saving)
    for child in module.children():
        _wrap_calls(child, state, saving)


def _as_forward(module: nn.Module, state: Any, method: Callable[..., Any], saving: _Saving) -> Callable[..., Any]:
    @functools.wraps(method)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        if saving.active or fully_shard.phase(state) != "IDLE":  # not IDLE: in a forward or recomputation
            return method(*args, **kwargs)
        return fully_shard.as_forward(state, module, method, args, kwargs)

    return gathering


_WRITES = "save_pretrained"  # of Hugging Face's models, PEFT's and others with the same interface


def _writing(method: Callable[..., Any], saving: _Saving) -> Callable[..., Any]:
    @functools.wraps(method)
    def writing(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None:
            raise UsageError(
                "strategy fsdp: save_pretrained has no whole weights: in stages 2 and 3 this process holds shards. "
                "Call run.export(path) on all processes, and then on rank 0 model.save_pretrained(folder, "
                "state_dict=safetensors.torch.load_file(path)). Or use strategy='fsdp:stage=1', where parameters are "
                "whole."
            )
        saving.active = True
        try:
            return method(*args, **kwargs)
        finally:
            saving.active = False

    return writing


_NO_COPY = (
    "strategy fsdp: a model with sharded parameters (stages 2 and 3) cannot be copied with copy.deepcopy. For an "
    "average of the weights use ema = run.ema(model, decay) instead of the copy; otherwise use "
    "strategy='fsdp:stage=1', where parameters are whole."
)


def _public_methods(cls: type) -> set[str]:
    """Methods that a script's classes define, except those of every nn.Module."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("torch.") or base is object:
            continue
        names |= {
            name
            for name, value in vars(base).items()
            if callable(value) and not isinstance(value, type) and not name.startswith("_")
        }
    return {name for name in names if not hasattr(nn.Module, name)}
