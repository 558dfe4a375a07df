"""Strategies by name. A factory (a class or a function) makes each strategy; its keyword arguments are the options.

A user's own strategy is named `MODULE:CLASS` (docs/strategies/write.md). The processes import it, the launcher does
not. It needs none of the functions below.

Next to its factory, a strategy's module has a function `check(size, *, option, ...)`. It raises SettingError for
options that cannot work with this number of processes (None: unknown). The launcher calls it before any process starts,
and the factory calls it first.

With `reproducible=V`, the class Reproducible (reproducible.py) replaces `single` and `ddp`. It is not in the table.
Some other strategies can add shards in the same fixed order, on several devices of one process. Their factories have an
argument `sums`.

A module may have a function `on_cpu(*, option, ...)`. It returns the number of processes that compute on the CPU even
if the run uses accelerators. These processes are the last ranks.

Every strategy runs with one process and one device, since a script must run on any number of both. A module may have a
function `alone(spec, device, *, option, ...)` for a run of one process. It returns the strategy to run (`single`, or
the named strategy if its options still have an effect), and a message.
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
from paceline.data.bundle import Piece
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
    "fsdp+ulysses": "paceline.strategies.sequence.fsdp_ulysses:FSDPUlysses",
    "ulysses": "paceline.strategies.sequence.ulysses:Ulysses",
    "pipeline": "paceline.strategies.pipeline.pipeline:Pipeline",
    "local_sgd": "paceline.strategies.periodic.local_sgd:LocalSGD",
    "diloco": "paceline.strategies.periodic.diloco:DiLoCo",
    "parameter_server": "paceline.strategies.servers.parameter_server:ParameterServer",
}

_ELSEWHERE = {  # name in another tool -> name here
    **dict.fromkeys(("dp", "dataparallel"), "data_parallel"),
    **dict.fromkeys(("zero", "zero1", "zero2", "zero3", "hsdp", "fsdp2", "fully_shard"), "fsdp"),
    **dict.fromkeys(("distributed", "horovod", "multi_worker_mirrored"), "ddp"),
    **dict.fromkeys(("tp", "model_parallel", "tensor_parallel", "megatron"), "tensor"),
    **dict.fromkeys(("sp", "sequence_parallel", "sequence", "cp", "context_parallel"), "ulysses"),
    **dict.fromkeys(("pp", "pipeline_parallel", "gpipe"), "pipeline"),
    **dict.fromkeys(("ps", "parameter_servers"), "parameter_server"),
}
_REPRODUCIBLE = "paceline.strategies.replicated.reproducible:Reproducible"
_NO_OPTIONS = ("world", "device", "sums")  # arguments of factories that are not options
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


def default(size: int) -> StrategySpec:
    """The default strategy for this number of processes."""
    return StrategySpec("single" if size == 1 else "ddp")


def make(spec: StrategySpec | None, world: World, device: torch.device, reproducible: int | None = None) -> Strategy:
    """Make the strategy of a run. Without a spec this is `single` for one process and `ddp` for several processes.

    reproducible: the number of shards V of `reproducible=V`.

    Raises SettingError for an unknown name, an unknown option, or an invalid value.
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
    """Check everything that can be checked before any process starts. spec: None if unknown.

    Returns the number of processes that need no accelerator (`on_cpu`). Raises SettingError, as `make` would, for an
    unknown name or option, for an invalid value, and if the strategy cannot work with `size` processes (None: unknown).
    A user's own strategy is not checked: the launcher does not run the user's code.
    """
    if spec is not None and is_user_strategy(spec.name):
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
    """The strategy to run if the user names `spec`, and a message ("" for none).

    On several processes the strategy is always `spec`. Raises SettingError as `check` does.
    """
    if size > 1:
        return spec, ""
    check(spec, size, reproducible)
    module, factory = _find(spec)
    replace: Callable[..., tuple[StrategySpec, str]] | None = getattr(module, "alone", None)
    return (spec, "") if replace is None else replace(spec, device, **_taken(replace, _all_options(spec, factory)))


def on_cpu(spec: StrategySpec | None, size: int | None) -> int:
    """The number of processes that compute on the CPU even if the run uses accelerators. They are the last ranks.

    A single process computes on the run's device. size: the number of processes (None: unknown).
    """
    if spec is None or size == 1 or is_user_strategy(spec.name):
        return 0
    module, factory = _find(spec)
    count: Callable[..., int] | None = getattr(module, "on_cpu", None)
    return 0 if count is None else count(**_taken(count, _all_options(spec, factory)))


def _all_options(spec: StrategySpec, factory: Factory) -> dict[str, Any]:
    """The options of a strategy, including the default values."""
    defaults = {key: p.default for key, p in inspect.signature(factory).parameters.items() if key not in _NO_OPTIONS}
    return {**defaults, **_options(spec, factory)}


def _taken(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that a function accepts."""
    return {key: value for key, value in options.items() if key in inspect.signature(function).parameters}


def is_user_strategy(name: str) -> bool:
    """Whether this names a user's own class, `MODULE:CLASS`."""
    return ":" in name


def _find(spec: StrategySpec) -> tuple[ModuleType, Factory]:
    if is_user_strategy(spec.name):
        try:
            return _load(spec.name)
        except (ModuleNotFoundError, AttributeError) as error:
            raise SettingError(
                f"strategy={spec.name!r}: {error}. Use MODULE:CLASS, with a module that the script can import too."
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
        return f"strategy={name!r}: write {fits!r}, with the outer dimension first."
    return (
        f"strategy={name!r}: {' and '.join(parts)} cannot be combined. Supported: {' or '.join(products)} (as in "
        f"{products[0]}:size=2), and replicas of fsdp's shards (fsdp:replicate=2). Use {' or '.join(parts)} alone."
    )


def _load(place: str) -> tuple[ModuleType, Factory]:
    path, _, name = place.partition(":")
    module = import_module(path)
    return module, getattr(module, name)


def _check_reproducible(spec: StrategySpec | None, size: int | None, shards: int) -> None:
    if spec is not None:
        _, factory = _find(spec)  # first, so that a misspelt name is reported first
        if _adds_in_order(factory):  # the strategy's own `check` gets V
            return
        if spec.name not in ("single", "ddp") or spec.options:
            raise SettingError(
                f"reproducible={shards} with strategy={str(spec)!r}: only 'data_parallel', 'mirrored', 'ddp' (without "
                "options) and 'single' (without options) add shards in a fixed order. Set strategy='ddp', or drop "
                "reproducible."
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
    if kind not in _WANTED:  # text or another object, which the strategy checks itself
        return value
    try:
        if isinstance(value, str):
            return _BOOLEANS[value.lower()] if kind is bool else kind(value)
        if isinstance(value, bool) == (kind is bool) and isinstance(value, (int, kind)):
            return value
    except (KeyError, ValueError):
        pass
    raise SettingError(f"strategy {strategy!r}: {key}={value!r}: use {_WANTED[kind]}.")
