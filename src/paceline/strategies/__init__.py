"""Strategies by name. A factory, which is a class or a function, makes each; its keyword arguments are the options.

A strategy of the user's own is named `MODULE:CLASS` (docs/strategies/write.md). The processes import it, the launcher
does not. It needs none of the functions below.

Beside the factory a strategy's module has a function `check(size, *, option, ...)`, which the factory calls first. It
raises SettingError for what cannot work with so many processes (None: not known), before any process starts.

With `reproducible=V` the strategies `single` and `ddp` are replaced by one that is not in the table (reproducible.py).
A factory has an argument `sums` where the strategy can add in that order on several devices of one process.

A module may have a function `on_cpu(*, option, ...)`: how many processes, those of the last ranks, compute on the CPU
whatever the device of the run is, so that they need no accelerator.

Every strategy runs with one process and one device, since a script is to run on any number of them. A module may have a
function `alone(spec, device, *, option, ...)`, for a run of one process. It returns the strategy that runs there
(`single`, or the named one where its options keep a meaning), and a line that says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, get_type_hints

import torch

from paceline.comm.tree_sums import TreeSums
from paceline.config import StrategySpec
from paceline.data.batch_plan import Piece
from paceline.errors import SettingError, suggest
from paceline.strategies.base import Strategy, Term, Work
from paceline.world import World

__all__ = ["STRATEGIES", "Piece", "Strategy", "Term", "Work", "alone", "check", "default", "make", "on_cpu"]

Factory = Callable[..., Strategy]

STRATEGIES = {
    "single": "paceline.strategies.single:Single",
    "ddp": "paceline.strategies.replicated.ddp:DDP",
    "data_parallel": "paceline.strategies.replicated.data_parallel:DataParallel",
    "shared": "paceline.strategies.replicated.shared:Shared",
    "fsdp": "paceline.strategies.sharded.fsdp:fsdp",
    "deepspeed": "paceline.strategies.deepspeed.deepspeed:DeepSpeed",
    "mirrored": "paceline.strategies.replicated.mirrored:Mirrored",
    "central_storage": "paceline.strategies.replicated.central_storage:CentralStorage",
    "tensor": "paceline.strategies.tensor.tensor:TensorParallel",
    "fsdp+tensor": "paceline.strategies.sharded.fsdp_tensor:FSDPTensor",
    "pipeline": "paceline.strategies.pipeline.pipeline:Pipeline",
    "local_sgd": "paceline.strategies.periodic.local_sgd:LocalSGD",
    "diloco": "paceline.strategies.periodic.diloco:DiLoCo",
    "parameter_server": "paceline.strategies.servers.parameter_server:ParameterServer",
}

_ELSEWHERE = {  # what other tools call them
    **dict.fromkeys(("dp", "dataparallel"), "data_parallel"),
    **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "hsdp", "fsdp2", "fully_shard"), "fsdp"),
    **dict.fromkeys(("distributed", "horovod", "multi_worker_mirrored"), "ddp"),
    **dict.fromkeys(("tp", "model_parallel", "tensor_parallel", "megatron"), "tensor"),
    **dict.fromkeys(("pp", "pipeline_parallel", "gpipe"), "pipeline"),
    **dict.fromkeys(("ps", "parameter_servers"), "parameter_server"),
}
_REPRODUCIBLE = "paceline.strategies.replicated.reproducible:Reproducible"
_NO_OPTIONS = ("world", "device", "sums")  # arguments of factories
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
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
    _, factory = _find(spec)
    if reproducible is None:
        return factory(world, device, **_options(spec, factory))
    if _adds_in_order(factory):
        return factory(world, device, TreeSums(reproducible), **_options(spec, factory))
    return _load(_REPRODUCIBLE)[1](world, device, shards=reproducible)


def check(spec: StrategySpec | None, size: int | None, reproducible: int | None = None) -> int:
    """Checks what can be checked before any process starts. spec: None where it is not known.

    Returns how many of the processes need no accelerator (`on_cpu`). Raises SettingError, as `make` would, for an
    unknown name or option, a value that an option cannot have, or a number of processes (None: not known) that the
    strategy cannot work with. Of a strategy of the user's own nothing is checked: the launcher runs none of their code.
    """
    if spec is not None and is_own(spec.name):
        return 0
    if reproducible is not None:
        _check_reproducible(spec, size, reproducible)
    if spec is None:
        return 0
    module, factory = _find(spec)
    options = _all_options(spec, factory)
    if _adds_in_order(factory):
        options["shards"] = reproducible
    module.check(size, **_taken(module.check, options))
    return on_cpu(spec, size)


def alone(
    spec: StrategySpec, size: int, device: torch.device, reproducible: int | None = None
) -> tuple[StrategySpec, str]:
    """The strategy that runs in place of the named one, and a line about it ("": there is nothing to say). On several
    processes it is the named one. Raises SettingError as `check` does."""
    if size > 1:
        return spec, ""
    check(spec, size, reproducible)
    module, factory = _find(spec)
    replace: Callable[..., tuple[StrategySpec, str]] | None = getattr(module, "alone", None)
    return (spec, "") if replace is None else replace(spec, device, **_taken(replace, _all_options(spec, factory)))


def on_cpu(spec: StrategySpec | None, size: int | None) -> int:
    """How many processes, those of the last ranks, compute on the CPU whatever the device of the run is. size: how many
    processes there are (None: not known). One alone computes on the run's device."""
    if spec is None or size == 1 or is_own(spec.name):
        return 0
    module, factory = _find(spec)
    count: Callable[..., int] | None = getattr(module, "on_cpu", None)
    return 0 if count is None else count(**_taken(count, _all_options(spec, factory)))


def _all_options(spec: StrategySpec, factory: Factory) -> dict[str, Any]:
    """The options of a strategy, those that are not given by their defaults."""
    defaults = {key: p.default for key, p in inspect.signature(factory).parameters.items() if key not in _NO_OPTIONS}
    return {**defaults, **_options(spec, factory)}


def _taken(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that a function has arguments for."""
    return {key: value for key, value in options.items() if key in inspect.signature(function).parameters}


def is_own(name: str) -> bool:
    """Whether this names a class of the user's own, `MODULE:CLASS`."""
    return ":" in name


def _find(spec: StrategySpec) -> tuple[ModuleType, Factory]:
    if is_own(spec.name):
        try:
            return _load(spec.name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise SettingError(
                f"strategy={spec.name!r}: {error}. MODULE:CLASS is needed, of a module that the script can import too."
            ) from error
    if spec.name not in STRATEGIES:
        raise SettingError(_unknown(spec.name))
    return _load(STRATEGIES[spec.name])


def _unknown(name: str) -> str:
    parts = [part.strip() for part in name.split("+")]
    wrong = next((part for part in parts if part not in STRATEGIES), None)
    if len(parts) == 1 or wrong is not None:
        return f"strategy={name!r} is not known. {suggest(wrong or name, STRATEGIES, _ELSEWHERE)}"
    products = [known for known in STRATEGIES if "+" in known]
    fits = next((known for known in products if sorted(known.split("+")) == sorted(parts)), None)
    if fits is not None:
        return f"strategy={name!r}: say {fits!r}, with the outer dimension first."
    return (
        f"strategy={name!r}: {' and '.join(parts)} cannot be combined. What can be is {' or '.join(products)} (as in "
        f"{products[0]}:size=2), and replicas of fsdp's slices (fsdp:replicate=2). Take one of {' or '.join(parts)}."
    )


def _load(place: str) -> tuple[ModuleType, Factory]:
    path, _, name = place.partition(":")
    module = import_module(path)
    return module, getattr(module, name)


def _check_reproducible(spec: StrategySpec | None, size: int | None, shards: int) -> None:
    if spec is not None:
        _, factory = _find(spec)  # a misspelt name is told first
        if _adds_in_order(factory):  # its own check is told of V
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


def _adds_in_order(factory: Factory) -> bool:
    return "sums" in inspect.signature(factory).parameters


def _options(spec: StrategySpec, factory: Factory) -> dict[str, Any]:
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in _NO_OPTIONS]
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
    options = {}
    for key, value in spec.options.items():
        if key not in known:
            raise SettingError(f"strategy {spec.name!r} has no option {key!r}. {suggest(key, known)}")
        options[key] = _read(spec.name, key, value, hints[key])
    return options


def _read(strategy: str, key: str, value: Any, kind: Any) -> Any:
    if kind not in _WANTED:  # text or another object, which the strategy itself checks
        return value
    try:
        if isinstance(value, str):
            return _BOOLEANS[value.lower()] if kind is bool else kind(value)
        if isinstance(value, bool) == (kind is bool) and isinstance(value, (int, kind)):
            return value
    except (KeyError, ValueError):
        pass
    raise SettingError(f"strategy {strategy!r}: {key}={value!r}: {_WANTED[kind]} is needed.")
