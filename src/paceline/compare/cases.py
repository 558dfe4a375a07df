"""What is compared: strategies, and for each of them precisions and global batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.config import PRECISIONS, PRECISIONS_ELSEWHERE, StrategySpec, parse_strategy
from paceline.errors import SettingError, suggest
from paceline.strategies import STRATEGIES, alone
from paceline.trials.start import Script, place_strategy

BASELINE = "single"  # the losses of all others are compared with its losses
# Further rows where all strategies are tried.
_MORE = {"parameter_server": ("parameter_server:mode=async",), "fsdp": ("fsdp:replicate=2",)}
_LEAST_REPLICAS = {"fsdp:replicate=2": 4, "fsdp+tensor": 4}  # compositions that fewer processes cannot be
_FOR_A_TRIAL: dict[str, dict[str, object]] = {
    "diloco": {"every": 10},  # its own 100 steps are longer than a trial, which would see nothing travel
}


@dataclass(frozen=True)
class CompareOptions:
    """What the command line asks for."""

    script: Script  # the script
    nproc: str | int  # replicas: a number, or gpu, cpu, auto
    strategies: str | None = None  # names with commas between them; None: all
    precision: str | None = None  # names with commas between them; None: the script's own
    global_batch: str | None = None  # numbers with commas between them; None: the script's own
    steps: int = 30  # steps of each trial
    rounds: int = 3  # how often each case is tried
    deadline: float = 300.0  # seconds; a longer trial is ended
    json_file: str | None = None  # write the document there
    html_file: str | None = None  # write the page there


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str  # the strategy as it was asked for, and what else differs between the cases
    spec: StrategySpec  # the strategy with the options that it is run with
    processes: int  # how many it runs in, servers among them
    precision: str | None = None  # None: the script's own
    global_batch: int | None = None  # None: the script's own
    servers: int = 0  # processes that compute no shard
    alone: str = ""  # what is said of it where it has one process and one device; "": it has several
    as_single: bool = False  # whether it is then `single` by another name


def read_strategies(text: str | None, nproc: int) -> list[StrategySpec]:
    """Read `--strategies`. `single` always comes first. None: all strategies that so many replicas can be.

    Commas separate strategies, and also the options of one strategy. A part that is no strategy's name therefore
    belongs to the options before it.

    Raises:
        SettingError: a name that is not known.
    """
    if text is None:
        names = sorted(STRATEGIES, key=lambda name: name != BASELINE)
        specs = [spec for name in names for spec in (name, *_MORE.get(name, ()))]
        return [parse_strategy(spec) for spec in specs if nproc >= _LEAST_REPLICAS.get(spec, 1)]
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
    """ "fp32,bf16" as a list. Raises SettingError for a precision that is not known."""
    if text is None:
        return [None]
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names or [text]:
        if name not in PRECISIONS:
            raise SettingError(f"--precision: {name!r} is not known. {suggest(name, PRECISIONS, PRECISIONS_ELSEWHERE)}")
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


def make_cases(
    specs: Sequence[StrategySpec],
    precisions: Sequence[str | None],
    batches: Sequence[int | None],
    nproc: int,
    devices: Sequence[str],
) -> list[Case]:
    """Every strategy with every precision and global batch. The cases of `single` come first.

    Args:
        devices: for a strategy of one process and several devices that is not told its devices.
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
    except (SettingError, ImportError):  # the row says why it did not run
        return spec, ""


def baseline_case(case: Case, cases: Sequence[Case]) -> Case:
    """The case whose losses are compared with those of `case`: `single`, its first precision, the same batch."""
    return next(c for c in cases if c.spec.name == BASELINE and c.global_batch == case.global_batch)
