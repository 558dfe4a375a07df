"""What strategies say of a run that has one process, or one device."""

from __future__ import annotations

from paceline.config import StrategySpec

PROCESS, DEVICE = "process", "device"


def as_single(strategy: str, only: str = PROCESS) -> tuple[StrategySpec, str]:
    """The strategy `single`, in place of the named one, and the line about it. only: what the run has one of."""
    return StrategySpec("single"), line(strategy, "trains as 'single' does here", only)


def line(strategy: str, what: str, only: str = PROCESS) -> str:
    return f"strategy {strategy} {what}, since this run has one {only}."
