"""Strategies by name. Options are arguments of the class, read from text or taken as they are.

Beside its class a strategy's module has a function `check(size, *, option, ...)`, which raises SettingError for what
cannot work with so many processes (None: not known), before there are any. The class begins with it.

With `reproducible=V` the strategies `single` and `ddp` become one that is not in the table (reproducible.py). One that
can add in that order on several devices of one process has an argument `sums`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any, get_type_hints

import torch

from paceline.comm.tree_sums import TreeSums
from paceline.config import StrategySpec
from paceline.errors import SettingError, suggest
from paceline.strategies.base import Piece, Strategy, Term, Work
from paceline.world import World

__all__ = ["STRATEGIES", "Piece", "Strategy", "Term", "Work", "check", "default", "make"]

STRATEGIES = {
    "single": "paceline.strategies.single:Single",
    "ddp": "paceline.strategies.ddp:DDP",
    "data_parallel": "paceline.strategies.data_parallel:DataParallel",
    "fsdp": "paceline.strategies.fsdp:FSDP",
    "deepspeed": "paceline.strategies.deepspeed:DeepSpeed",
    "mirrored": "paceline.strategies.mirrored:Mirrored",
    "central_storage": "paceline.strategies.central_storage:CentralStorage",
    "tensor": "paceline.strategies.tensor:TensorParallel",
    "fsdp+tensor": "paceline.strategies.fsdp_tensor:FSDPTensor",
    "pipeline": "paceline.strategies.pipeline:Pipeline",
    "local_sgd": "paceline.strategies.local_sgd:LocalSGD",
    "diloco": "paceline.strategies.diloco:DiLoCo",
    "parameter_server": "paceline.strategies.parameter_server:ParameterServer",
}

_REPRODUCIBLE = "paceline.strategies.reproducible:Reproducible"
_PLACE = ("world", "device", "sums")  # of the classes' arguments those that are no options
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def default(size: int) -> StrategySpec:
    """What a run of so many processes gets that names none."""
    return StrategySpec("single" if size == 1 else "ddp")


def make(spec: StrategySpec | None, world: World, device: torch.device, reproducible: int | None = None) -> Strategy:
    """The strategy of a run: the named one, or `single` for one process and `ddp` for several.

    reproducible: the settings' V.

    Raises SettingError for an unknown name, an unknown option, or a value that the option cannot have.
    """
    if reproducible is not None:
        _check_reproducible(spec, world.size, reproducible)
    spec = spec or default(world.size)
    _, cls = _find(spec)
    if reproducible is None:
        return cls(world, device, **_options(spec, cls))
    if _adds_in_order(cls):
        of_devices: Any = cls
        spread: Strategy = of_devices(world, device, TreeSums(reproducible), **_options(spec, cls))
        return spread
    module, _ = _load(_REPRODUCIBLE)
    found: Strategy = module.Reproducible(world, device, shards=reproducible)
    return found


def check(spec: StrategySpec | None, size: int | None, reproducible: int | None = None) -> None:
    """Raises SettingError, as `make` would, for what can be seen before any process starts: an unknown name or option,
    a value that it cannot have, a number of processes (None: not known) that it cannot work with. spec: None where it
    is not known."""
    if reproducible is not None:
        _check_reproducible(spec, size, reproducible)
    if spec is None:
        return
    module, cls = _find(spec)
    defaults = {key: p.default for key, p in inspect.signature(cls).parameters.items() if key not in _PLACE}
    taken = inspect.signature(module.check).parameters
    options = {**defaults, **_options(spec, cls)}
    if _adds_in_order(cls):
        options["shards"] = reproducible
    module.check(size, **{key: value for key, value in options.items() if key in taken})


def _find(spec: StrategySpec) -> tuple[ModuleType, type[Strategy]]:
    if spec.name not in STRATEGIES:
        raise SettingError(_unknown(spec.name))
    return _load(STRATEGIES[spec.name])


def _unknown(name: str) -> str:
    parts = [part.strip() for part in name.split("+")]
    wrong = next((part for part in parts if part not in STRATEGIES), None)
    if len(parts) == 1 or wrong is not None:
        return f"strategy={name!r} is not known. {suggest(wrong or name, STRATEGIES)}"
    products = [known for known in STRATEGIES if "+" in known]
    fits = next((known for known in products if sorted(known.split("+")) == sorted(parts)), None)
    if fits is not None:
        return f"strategy={name!r}: say {fits!r}, with the outer dimension first."
    return (
        f"strategy={name!r}: {' and '.join(parts)} cannot be combined. What can be is {' or '.join(products)} (as in "
        f"{products[0]}:size=2), and replicas of fsdp's slices (fsdp:replicate=2). Take one of {' or '.join(parts)}."
    )


def _load(place: str) -> tuple[ModuleType, type[Strategy]]:
    path, _, name = place.partition(":")
    module = import_module(path)
    return module, getattr(module, name)


def _check_reproducible(spec: StrategySpec | None, size: int | None, shards: int) -> None:
    if spec is not None:
        _, cls = _find(spec)  # a misspelt name is told first
        if _adds_in_order(cls):  # and looks at V itself
            return
        if spec.name not in ("single", "ddp") or spec.options:
            raise SettingError(
                f"reproducible={shards} with strategy={str(spec)!r}: only 'ddp', 'data_parallel' and 'mirrored', and "
                "'single' in one process, compute shards one after the other and add them in one order; 'ddp' and "
                "'single' do so without options. Set strategy='ddp', or leave reproducible out."
            )
        if spec.name == "single":
            check(spec, size)
    module, _ = _load(_REPRODUCIBLE)
    module.check(size, shards=shards)


def _adds_in_order(cls: type[Strategy]) -> bool:
    return "sums" in inspect.signature(cls).parameters


def _options(spec: StrategySpec, cls: type[Strategy]) -> dict[str, Any]:
    parameters = inspect.signature(cls).parameters
    known = [name for name in parameters if name not in _PLACE]
    hints = get_type_hints(cls.__init__)
    options = {}
    for key, value in spec.options.items():
        if key not in known:
            raise SettingError(f"strategy {spec.name!r} has no option {key!r}. {suggest(key, known)}")
        options[key] = _read(spec.name, key, value, hints[key])
    return options


def _read(strategy: str, key: str, value: Any, kind: Any) -> Any:
    if kind not in _WANTED:  # a name, or what stands for one; the strategy itself looks at it
        return value
    try:
        if isinstance(value, str):
            return _TRUTH[value.lower()] if kind is bool else kind(value)
        if isinstance(value, bool) == (kind is bool) and isinstance(value, (int, kind)):
            return value
    except (KeyError, ValueError):
        pass
    raise SettingError(f"strategy {strategy!r}: {key}={value!r}: {_WANTED[kind]} is needed.")
