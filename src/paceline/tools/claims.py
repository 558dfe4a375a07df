"""Sentences of an answer of `paceline verify`, each bound to the runs that show it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.tools.sides import Side

_WHO = {
    "A": "the run in question",
    "A0": "the same, with dropout off",
    "B": "one process, the same shards in turn",
    "B0": "the same, with dropout off",
    "B1": "one process, the same shards at once",
    "B2": "one process, the same shards, once more",
    "C": "one process, whole batches",
    "C2": "the same, in reverse order and rounded elsewhere",
    "C3": "the same in order, and rounded elsewhere",
    "C4": "one process, whole batches, once more",
    "D": "the run in question, each process told that it is alone",
    "D0": "the same, with dropout off",
    "L": "the run in question, its lines watched",
    "LC": "one process, whole batches, its lines watched",
    "LD": "each process told that it is alone, its lines watched",
    "P": "the run in question, with one shard's loss alone",
    "T": "the run in question, each shard on another rank",
}


def what(run: str) -> str:
    """What a run is, in words."""
    return _WHO.get("P" if run.startswith("P") else run, "once more")


@dataclass(frozen=True)
class Claim:
    """runs: those whose records show it. without: runs that could not be made, of which it says so. Both empty: a
    sentence about no run at all, such as why the script failed to start."""

    text: str
    runs: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def check(self, made: Collection[str]) -> None:
        """Raises AssertionError where it speaks of a run that was not made, or calls one missing that was."""
        absent = [run for run in self.runs if run not in made]
        there = [run for run in self.without if run in made]
        assert not absent, f"{self.text!r} speaks of {absent}, of which there are no records"
        assert not there, f"{self.text!r} calls {there} missing, of which there are records"


def shown(text: str, *sides: Side) -> Claim:
    """A sentence that is read from the records of these runs."""
    return Claim(text, names(sides))


def missing(text: str, *runs: str) -> Claim:
    """A sentence that says that these runs could not be made."""
    return Claim(text, without=runs)


def names(sides: Iterable[Side]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(side.name for side in sides))
