"""How a trial is started: the script, its strategy with the options that this machine needs, and the processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

from paceline.config import StrategySpec
from paceline.strategies import STRATEGIES


@dataclass(frozen=True)
class Script:
    """The script that every trial runs."""

    path: str  # the script's path, or a module's name
    args: Sequence[str]  # what follows the script on the command line
    module: bool  # whether `path` is the name of a module
    settings: Mapping[str, object]  # settings from the command line, the same for all trials


@dataclass(frozen=True)
class Length:
    """How long a trial is."""

    steps: int  # steps of a trial
    warmup: int  # the first of these steps, which are not timed
    seconds: float  # a trial that takes longer is ended


class Start(NamedTuple):
    """With what a trial is started."""

    strategy: StrategySpec | None  # None: the script's own
    processes: int  # how many processes are started
    precision: str | None = None  # None: the script's own


def replica_devices(device: str, nproc: int, count: Callable[[], int]) -> list[str]:
    """Devices for `nproc` replicas in one process.

    The first accelerators; or the CPU, once for each replica, where there is no accelerator or `device` names the CPU.

    Args:
        device: the name that the user gave; "" where none was given.
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

    Returns (the strategy with the options that it needs here, the number of processes, how many of these are servers).
    Servers are processes beside the replicas.
    """
    if spec.name == "single":
        return spec, 1, 0
    module, _, name = STRATEGIES.get(spec.name, spec.name).partition(":")
    try:
        options = inspect.signature(getattr(import_module(module), name)).parameters
    except (ImportError, AttributeError):  # not installed, or not there: the trial's error says so
        return spec, nproc, 0
    if "devices" in options:
        given = {"devices": ",".join(devices), **spec.options}
        return StrategySpec(spec.name, given), 1, 0
    if "servers" in options:
        asked = str(spec.options.get("servers", options["servers"].default))
        servers = int(asked) if asked.isdecimal() else 0  # else the trial's error says so
        return spec, nproc + servers, servers
    return spec, nproc, 0
