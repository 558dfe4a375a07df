"""The cases of a comparison: each strategy with each precision and global batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config import PRECISIONS, PRECISIONS_ELSEWHERE, StrategySpec, parse_strategy
from paceline.errors import SettingError, suggest
from paceline.strategies import STRATEGIES, alone
from paceline.trials.start import Script, place_strategy, split_strategies

BASELINE = "single"  # the losses of all other cases are compared with its losses
# Additional rows if all strategies are tried.
_MORE = {"parameter_server": ("parameter_server:mode=async",), "fsdp": ("fsdp:replicate=2",)}
_LEAST_REPLICAS = {"fsdp:replicate=2": 4, "fsdp+tensor": 4}  # minimum number of replicas
_FOR_A_TRIAL: dict[str, dict[str, object]] = {
    "diloco": {"every": 10},  # its default of 100 steps is longer than a trial, which would show no communication
}


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command line."""

    script: Script  # the script
    nproc: str | int  # replicas: a number, or gpu, cpu, auto
    strategies: str | None = None  # comma-separated names; None: all
    precision: str | None = None  # comma-separated names; None: the script's
    global_batch: str | None = None  # comma-separated numbers; None: the script's
    steps: int = 30  # steps of each trial
    rounds: int = 3  # number of times that each case is tried
    deadline: float = 300.0  # seconds; a longer trial is ended
    json_file: str | None = None  # the file for the document
    html_file: str | None = None  # the file for the page


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str  # the strategy as the user wrote it, and anything else that distinguishes the case
    spec: StrategySpec  # the strategy with the options of its trials
    processes: int  # the number of processes of a trial, including servers
    precision: str | None = None  # None: the script's
    global_batch: int | None = None  # None: the script's
    servers: int = 0  # processes that compute no shard
    alone: str = ""  # a note if the case has one process with one device; "" if it has several
    as_single: bool = False  # whether the case is equivalent to `single` because it has only one process and device


def read_strategies(text: str | None, nproc: int) -> list[StrategySpec]:
    """Read `--strategies`. `single` always comes first. None: all strategies that work with this number of replicas.

    Commas separate strategies, and also the options of one strategy. So a part that is not the name of a strategy
    belongs to the options of the previous strategy.

    Raises:
        SettingError: unknown name.
    """
    if text is None:
        names = sorted(STRATEGIES, key=lambda name: name != BASELINE)
        specs = [spec for name in names for spec in (name, *_MORE.get(name, ()))]
        return [parse_strategy(spec) for spec in specs if nproc >= _LEAST_REPLICAS.get(spec, 1)]
    return [parse_strategy(part) for part in dict.fromkeys([BASELINE, *split_strategies(text, STRATEGIES)])]


def read_precisions(text: str | None) -> list[str | None]:
    """Split text such as "fp32,bf16" into a list. Raises SettingError for an unknown precision."""
    if text is None:
        return [None]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names or [text]:
        if name not in PRECISIONS:
            raise SettingError(f"--precision: {name!r} is not known. {suggest(name, PRECISIONS, PRECISIONS_ELSEWHERE)}")
    return list(dict.fromkeys(names))


def read_batches(text: str | None) -> list[int | None]:
    """Parse text such as "64,128" into a list. Raises SettingError for anything that is not a number of examples."""
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or [text]:
        if not part.isdecimal() or int(part) < 1:
            raise SettingError(
                f"--global-batch {text}: {part!r} is not a number of examples. Give numbers, such as 64,128."
            )
    return list(dict.fromkeys(int(part) for part in parts))


def make_cases(
    specs: Sequence[StrategySpec],
    precisions: Sequence[str | None],
    batches: Sequence[int | None],
    nproc: int,
    devices: Sequence[str],
) -> list[Case]:
    """Every strategy with every precision and global batch. The cases of `single` come first.

    Args:
        devices: used by strategies with one process and several devices, unless their options name devices.
    """
    cases = []
    for spec, precision, batch in itertools.product(specs, precisions, batches):
        spec = StrategySpec(spec.name, {**_FOR_A_TRIAL.get(spec.name, {}), **spec.options})
        parts = [str(spec), precision if len(precisions) > 1 else None, str(batch) if len(batches) > 1 else None]
        placed, processes, servers = place_strategy(spec, nproc, devices)
        own, line = _alone(placed, processes, devices[0])
        same = own.name == BASELINE != placed.name
        cases.append(Case(" ".join(filter(None, parts)), placed, processes, precision, batch, servers, line, same))
    return cases


def _alone(spec: StrategySpec, processes: int, device: str) -> tuple[StrategySpec, str]:
    try:
        return alone(spec, processes, torch.device(device))
    except (SettingError, ImportError):  # the table will report why the case did not run
        return spec, ""


def baseline_case(case: Case, cases: Sequence[Case]) -> Case:
    """The reference for the losses of `case`: `single` with the first precision and the same global batch."""
    return next(c for c in cases if c.spec.name == BASELINE and c.global_batch == case.global_batch)
