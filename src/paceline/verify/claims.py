"""Sentences of an answer of `paceline verify`, each bound to the runs that show it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paceline.verify.run_record import RunRecord


@dataclass(frozen=True)
class Claim:
    """A sentence, bound to the runs that it speaks of.

    A sentence that is bound to no run speaks of none: why the script failed to start, for example.
    """

    text: str  # the sentence
    runs: tuple[str, ...] = ()  # the runs whose records show it
    without: tuple[str, ...] = ()  # runs that could not be made, as the sentence says

    def check(self, made: Collection[str]) -> None:
        """Raises AssertionError where the sentence speaks of a run that was not made, or calls a run missing that was
        made."""
        absent = [run for run in self.runs if run not in made]
        there = [run for run in self.without if run in made]
        assert not absent, f"{self.text!r} speaks of {absent}, of which there are no records"
        assert not there, f"{self.text!r} calls {there} missing, of which there are records"


def claim_from(text: str, *records: RunRecord) -> Claim:
    """A sentence that is read from the records of these runs."""
    return Claim(text, run_names(records))


def claim_without(text: str, *runs: str) -> Claim:
    """A sentence that says that these runs could not be made."""
    return Claim(text, without=runs)


def run_names(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """The names of the runs, each once."""
    return tuple(dict.fromkeys(record.name for record in records))
