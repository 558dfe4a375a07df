"""What a check is: a generator function, which first builds what it needs and then runs.

    @check("right", seconds=60)
    def sgd_is_sgd(place):
        model = build(place)
        yield "10 steps of SGD beside a plain loop"     # all is built; a dry run ends here
        apart = ...
        yield {"largest difference": apart}             # figures, as often as there are some
        assert apart < 1e-6

A check that raises, or that is ended, has failed; the figures that it gave before are kept. One that raises CheckFault
says that it cannot judge: plain PyTorch, with which it compares, has failed or does not repeat itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PARTS = ("right", "ranks", "costs", "steps", "soak", "several")
"""Each is one command's work, of at most 9 minutes. "several" needs two devices, the others one."""
TIMED = ("costs", "steps", "soak")
"""Those whose checks never run side by side."""

Steps = Iterator["str | dict[str, Any]"]


class CheckFault(Exception):
    """The check is at fault, and not what it checks."""


@dataclass(frozen=True)
class Place:
    """Where a check runs."""

    device: torch.device  # in a dry run "meta": tensors without memory
    folder: Path  # an empty one of this process, which is removed afterwards
    shared: Path  # one of all ranks of the check

    @property
    def small(self) -> bool:
        """Whether models and numbers of steps are cut down, since nothing is measured here."""
        return self.device.type != "cuda"


@dataclass(frozen=True)
class Check:
    """A registered check."""

    name: str
    part: str  # one of PARTS
    seconds: float  # its deadline
    function: Callable[[Place], Steps]
    ranks: int  # 0: in a process without a launcher; else so many processes that `paceline run` starts


CHECKS: dict[str, Check] = {}


def check(
    part: str, seconds: float, *, ranks: int = 0
) -> Callable[[Callable[[Place], Steps]], Callable[[Place], Steps]]:
    """Registers a check under its function's name. The arguments are those of Check."""

    def register(function: Callable[[Place], Steps]) -> Callable[[Place], Steps]:
        name = function.__name__
        assert name not in CHECKS
        assert part in PARTS
        CHECKS[name] = Check(name, part, seconds, function, ranks)
        return function

    return register
