"""What is compared: strategies, and for each of them precisions and global batches."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from paceline.config import PRECISIONS, StrategySpec, parse_strategy
from paceline.errors import SettingError, suggest
from paceline.strategies import STRATEGIES

BASELINE = "single"  # what the losses are compared with
_MORE = {"parameter_server": ("parameter_server:mode=async",)}  # further rows where all strategies are tried
_FOR_A_TRIAL: dict[str, dict[str, object]] = {
    "diloco": {"every": 10},  # its own 100 steps are longer than a trial, which would see nothing travel
}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    name: what it is called, the strategy as it was asked for and what else differs. spec: the strategy with the options
    that it is run with. processes: how many it runs in, servers among them. precision, global_batch: None where the
    script's own stand. servers: processes that compute no shard.
    """

    name: str
    spec: StrategySpec
    processes: int
    precision: str | None = None
    global_batch: int | None = None
    servers: int = 0


def read_strategies(text: str | None) -> list[StrategySpec]:
    """The strategies that `--strategies` names, `single` always first; None: all of them.

    Commas stand between strategies as well as between the options of one, so that a part which is no strategy's name
    belongs to the options before it. Raises SettingError for a name that is not known.
    """
    if text is None:
        names = sorted(STRATEGIES, key=lambda name: name != BASELINE)
        return [parse_strategy(spec) for name in names for spec in (name, *_MORE.get(name, ()))]
    whole: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name = part.partition(":")[0]
        if name not in STRATEGIES and whole and ":" in whole[-1] and ":" not in part:
            whole[-1] += f",{part}"
        elif name not in STRATEGIES:
            raise SettingError(f"--strategies: {name!r} is not known. {suggest(name, STRATEGIES)}")
        else:
            whole.append(part)
    if not whole:
        raise SettingError(f"--strategies {text!r} names none. {suggest('', STRATEGIES)}")
    return [parse_strategy(part) for part in dict.fromkeys([BASELINE, *whole])]


def read_precisions(text: str | None) -> list[str | None]:
    """ "fp32,bf16" as a list. Raises SettingError for one that is not known."""
    if text is None:
        return [None]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names or [text]:
        if name not in PRECISIONS:
            raise SettingError(f"--precision: {name!r} is not known. {suggest(name, PRECISIONS)}")
    return list(dict.fromkeys(names))


def read_batches(text: str | None) -> list[int | None]:
    """ "64,128" as a list. Raises SettingError for what is no number of examples."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or [text]:
        if not part.isdecimal() or int(part) < 1:
            raise SettingError(f"--global-batch {text}: {part!r} is no number of examples. Give some, such as 64,128.")
    return list(dict.fromkeys(int(part) for part in parts))


def devices(device: str, nproc: int, count: Callable[[], int]) -> list[str]:
    """So many for a strategy of one process: the first accelerators, or the CPU again and again where there is none, or
    where it is what `device` ("": not given) names. count: of the accelerators."""
    kind = device.partition(":")[0]
    accelerators = 0 if kind == "cpu" else count()
    if not accelerators:
        return ["cpu"] * nproc
    if not kind:
        import torch

        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else "cuda"
    return [f"{kind}:{i}" for i in range(nproc)]


def make_cases(
    specs: Sequence[StrategySpec],
    precisions: Sequence[str | None],
    batches: Sequence[int | None],
    nproc: int,
    devices: Sequence[str],
) -> list[Case]:
    """Every strategy with every precision and batch; those of `single` come first.

    devices: what a strategy of one process and several devices is given, if it is not told otherwise.
    """
    cases = []
    for spec, precision, batch in itertools.product(specs, precisions, batches):
        spec = StrategySpec(spec.name, {**_FOR_A_TRIAL.get(spec.name, {}), **spec.options})
        parts = [str(spec), precision if len(precisions) > 1 else None, str(batch) if len(batches) > 1 else None]
        placed, processes, servers = laid_out(spec, nproc, devices)
        cases.append(Case(" ".join(filter(None, parts)), placed, processes, precision, batch, servers))
    return cases


def laid_out(spec: StrategySpec, nproc: int, devices: Sequence[str]) -> tuple[StrategySpec, int, int]:
    """(the strategy with the options that it needs on this machine, how many processes it runs in, how many of
    these are servers): `nproc` replicas, wherever they are; servers come on top."""
    if spec.name == BASELINE:
        return spec, 1, 0
    module, _, name = STRATEGIES[spec.name].partition(":")
    try:
        options = inspect.signature(getattr(import_module(module), name)).parameters
    except ImportError:  # it needs what is not installed: the trial's error says so
        return spec, nproc, 0
    if "devices" in options:
        given = {"devices": ",".join(devices), **spec.options}
        return StrategySpec(spec.name, given), 1, 0
    if "servers" in options:
        asked = str(spec.options.get("servers", options["servers"].default))
        servers = int(asked) if asked.isdecimal() else 0  # else the trial's error says so
        return spec, nproc + servers, servers
    return spec, nproc, 0


def reference(case: Case, cases: Sequence[Case]) -> Case:
    """The case whose losses this one's are compared with: `single`, its first precision, the same batch."""
    return next(c for c in cases if c.spec.name == BASELINE and c.global_batch == case.global_batch)
