"""A check is a generator function. It builds its objects first, and then runs.

    @check("right", seconds=60)
    def sgd_is_sgd(place):
        model = build(place)
        yield "10 steps of SGD compared with a plain loop"     # everything is built; a dry run ends here
        apart = ...
        yield {"largest difference": apart}                    # figures, any number of times
        assert apart < 1e-6

A check that raises, or is killed, has failed; its figures so far are kept. A check that raises CheckFault cannot judge:
the plain PyTorch side of its comparison has failed, or does not repeat itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PARTS = ("right", "ranks", "costs", "steps", "soak", "several")
"""Each part is one command of at most 9 minutes. "several" needs two devices, the others one."""
TIMED = ("costs", "steps", "soak")
"""The checks of these parts never run at the same time."""

Steps = Iterator["str | dict[str, Any]"]


class CheckFault(Exception):
    """The check is at fault, not Paceline."""


@dataclass(frozen=True)
class Place:
    """The device and the folders of a check."""

    device: torch.device  # in a dry run "meta": tensors without memory
    folder: Path  # an empty folder of this process, removed afterwards
    shared: Path  # a folder shared by all ranks of the check

    @property
    def small(self) -> bool:
        """Whether to use small models and few steps, since nothing is measured here."""
        return self.device.type != "cuda"


@dataclass(frozen=True)
class Check:
    """A registered check."""

    name: str
    part: str  # one of PARTS
    seconds: float  # its deadline
    function: Callable[[Place], Steps]
    ranks: int  # 0: one process without a launcher; otherwise the number of processes for `paceline run`


CHECKS: dict[str, Check] = {}


def check(
    part: str, seconds: float, *, ranks: int = 0
) -> Callable[[Callable[[Place], Steps]], Callable[[Place], Steps]]:
    """Register a check under its function's name. Arguments: see Check."""

    def register(function: Callable[[Place], Steps]) -> Callable[[Place], Steps]:
        name = function.__name__
        assert name not in CHECKS
        assert part in PARTS
        CHECKS[name] = Check(name, part, seconds, function, ranks)
        return function

    return register
