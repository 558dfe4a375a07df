"""Messages of strategies for a run with one process or one device."""

from __future__ import annotations

from paceline.config import StrategySpec

PROCESS, DEVICE = "process", "device"


def as_single(strategy: str, only: str = PROCESS) -> tuple[StrategySpec, str]:
    """Replace the named strategy by `single`. Returns (`single`, a message).

    only: PROCESS if the run has one process, DEVICE if it has one device.
    """
    return StrategySpec("single"), line(strategy, "trains like 'single'", only)


def line(strategy: str, what: str, only: str = PROCESS) -> str:
    return f"strategy {strategy} {what}, since this run has one {only}."
