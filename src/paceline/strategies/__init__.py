"""Strategies by name. Options are arguments of the class; `make` reads them from text or takes them as they are."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, get_type_hints

import torch

from paceline.config import StrategySpec
from paceline.errors import SettingError, suggest
from paceline.strategies.base import Layout, Piece, Strategy, Term, Work
from paceline.world import World

__all__ = ["STRATEGIES", "Layout", "Piece", "Strategy", "Term", "Work", "make"]

STRATEGIES = {
    "single": "paceline.strategies.single:Single",
    "ddp": "paceline.strategies.ddp:DDP",
    "data_parallel": "paceline.strategies.data_parallel:DataParallel",
    "fsdp": "paceline.strategies.fsdp:FSDP",
    "mirrored": "paceline.strategies.mirrored:Mirrored",
    "central_storage": "paceline.strategies.central_storage:CentralStorage",
    "tensor": "paceline.strategies.tensor:TensorParallel",
    "pipeline": "paceline.strategies.pipeline:Pipeline",
    "local_sgd": "paceline.strategies.local_sgd:LocalSGD",
    "diloco": "paceline.strategies.diloco:DiLoCo",
    "parameter_server": "paceline.strategies.parameter_server:ParameterServer",
}


def make(spec: StrategySpec | None, world: World, device: torch.device) -> Strategy:
    """The strategy of a run: the named one, or `single` for one process and `ddp` for several.

    Raises SettingError for an unknown name, an unknown option, or a value that the option cannot have.
    """
    spec = spec or StrategySpec("single" if world.size == 1 else "ddp")
    if spec.name not in STRATEGIES:
        raise SettingError(f"strategy={spec.name!r} is not known. {suggest(spec.name, STRATEGIES)}")
    module, _, name = STRATEGIES[spec.name].partition(":")
    cls: type[Strategy] = getattr(import_module(module), name)
    return cls(world, device, **_options(spec, cls))


def _options(spec: StrategySpec, cls: type[Strategy]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name not in ("world", "device")]
    hints = get_type_hints(cls.__init__)
    options = {}
    for key, value in spec.options.items():
        if key not in known:
            listed = suggest(key, known) if known else "It takes none."
            raise SettingError(f"strategy {spec.name!r} has no option {key!r}. {listed}")
        options[key] = _read(spec.name, key, value, hints[key]) if isinstance(value, str) else value
    return options


def _read(strategy: str, key: str, text: str, kind: Any) -> Any:
    if kind is str:
        return text
    try:
        if kind is bool:
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        wanted = "true or false" if kind is bool else f"a {kind.__name__}"
        raise SettingError(f"strategy {strategy!r}: {key}={text!r}: {wanted} is needed.") from None
