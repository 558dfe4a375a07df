"""The setup of a trial: the script, its strategy with the options for this machine, and the number of processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from paceline.config import StrategySpec
from paceline.errors import SettingError, suggest
from paceline.strategies import STRATEGIES


@dataclass(frozen=True)
class Script:
    """The script that every trial runs."""

    path: str  # the script's path, or a module's name
    args: Sequence[str]  # the arguments after the script on the command line
    module: bool  # whether `path` is the name of a module
    settings: Mapping[str, object]  # settings from the command line, the same for all trials


@dataclass(frozen=True)
class Length:
    """The length of a trial."""

    steps: int  # the number of steps
    warmup: int  # the number of steps at the start that are not timed
    seconds: float  # the time limit: a trial that takes longer is ended


class Start(NamedTuple):
    """The strategy, processes and precision that a trial starts with."""

    strategy: StrategySpec | None  # None: the script's
    processes: int  # the number of processes
    precision: str | None = None  # None: the script's


def replica_devices(device: str, nproc: int, count: Callable[[], int]) -> list[str]:
    """Choose devices for `nproc` replicas in one process.

    Returns the first `nproc` accelerators. If there are none, or `device` names the CPU, returns "cpu" for each
    replica.

    Args:
        device: the name that the user gave; "" if none was given.
        nproc: the number of replicas.
        count: counts the accelerators.
    """
    kind = device.partition(":")[0]
    accelerators = 0 if kind == "cpu" else count()
    if not accelerators:
        return ["cpu"] * nproc
    if not kind:
        import torch

        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else "cuda"
    return [f"{kind}:{i}" for i in range(nproc)]


def place_strategy(spec: StrategySpec, nproc: int, devices: Sequence[str]) -> tuple[StrategySpec, int, int]:
    """Place `nproc` replicas of a strategy on this machine.

    Returns (the strategy with its options for this machine, the number of processes, the number of servers among these
    processes). Servers are processes in addition to the replicas.
    """
    if spec.name == "single":
        return spec, 1, 0
    module, _, name = STRATEGIES.get(spec.name, spec.name).partition(":")
    try:
        options = inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, AttributeError):  # not installed, or missing: the trial reports the error
        return spec, nproc, 0
    if "devices" in options:
        given = {"devices": ",".join(devices), **spec.options}
        return StrategySpec(spec.name, given), 1, 0
    if "servers" in options:
        asked = str(spec.options.get("servers", options["servers"].default))
        servers = int(asked) if asked.isdecimal() else 0  # otherwise the trial reports the error
        return spec, nproc + servers, servers
    return spec, nproc, 0


def split_strategies(text: str, known: Collection[str]) -> list[str]:
    """The strategies with their options in a list with commas, which also separate the options of a strategy.

    Raises:
        SettingError: a name is not in `known`, or there is no name.
    """
    whole: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = part.partition(":")[0]
        if name not in known and whole and ":" in whole[-1] and ":" not in part:
            whole[-1] += f",{part}"
        elif name not in known:
            raise SettingError(f"--strategies: {name!r} is not known. {suggest(name, known)}")
        else:
            whole.append(part)
    if not whole:
        raise SettingError(f"--strategies {text!r} contains no name. {suggest('', known)}")
    return whole
