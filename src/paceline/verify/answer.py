"""What `paceline verify` answers: a verdict, the sentences that state it, and where the cause is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.verify.evidence import Cause
from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import Difference

SAME, DIFFERENT, UNKNOWN = 0, 1, 2
SCHEMA = 1
DATA = {"examples", "data"}
_VERDICTS = {SAME: "same", DIFFERENT: "different", UNKNOWN: "could not tell"}


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


@dataclass
class Answer:
    """What is printed, and written with `--json`: the fields are keys of the document."""

    code: int  # SAME, DIFFERENT or UNKNOWN
    claims: list[Claim]  # the sentences of the verdict
    step: int | None = None  # the first step that differs, counted from 0
    quantity: str | None = None  # what differs first in it (differences.ORDER)
    parameter: str | None = None  # the parameter, or the buffer, that differs
    cause: str | None = None  # the key of the cause
    remedy: str | None = None  # what to do about it
    difference: float | None = None  # how far the quantity is apart
    tolerance: float | None = None  # how far rounding may take it apart
    steps: int = 0  # how many steps were compared
    file: str | None = None  # the file of the line in which the cause is
    line: int | None = None  # its number
    source: str | None = None  # its text
    beside: str | None = None  # a further place that has to do with the cause, as "file:line"
    indeterminate: list[str] = field(default_factory=list)  # parameters whose gradient is rounding and little else
    notes: list[Claim] = field(default_factory=list)  # further sentences, a line each
    differences: list[dict[str, Any]] = field(default_factory=list)  # the first 50 differences of the step

    @property
    def text(self) -> str:
        """The sentences of the verdict, as they are printed."""
        return " ".join(claim.text for claim in self.claims).replace(" \n", "\n")

    def check(self, made: Collection[str]) -> None:
        """Raises AssertionError where a sentence speaks of a run that has left no records."""
        for claim in (*self.claims, *self.notes):
            claim.check(made)

    def document(self) -> dict[str, Any]:
        """What `--json` writes (docs/verify.md says what it holds)."""
        own = {"text": self.text, "notes": [note.text for note in self.notes]}
        claims = [asdict(claim) for claim in (*self.claims, *self.notes)]
        return {"schema": SCHEMA, "verdict": _VERDICTS[self.code], **vars(self), **own, "claims": claims}


def describe(d: Difference) -> str:
    """The first difference, in a sentence."""
    what = f"the {d.quantity}" + (f" of {d.name}" if d.name else "")
    if d.difference != d.difference:
        return f"First in step {d.step + 1}: {what}."
    if d.quantity in DATA:
        return f"First in step {d.step + 1}: {what}; {d.difference:.0f} are in one run and not in the other."
    return f"First in step {d.step + 1}: {what}, by {d.difference:.3g} (allowed: {d.tolerance:.2g})."


def answer_with(code: int, claims: list[Claim], found: Sequence[Difference], cause: str) -> Answer:
    """An answer of these sentences about the first of the differences."""
    first = found[0]
    return Answer(
        code,
        claims,
        step=first.step,
        quantity=first.quantity,
        parameter=first.name,
        difference=first.difference,
        tolerance=first.tolerance,
        cause=cause,
        differences=[asdict(d) for d in found[:50]],
    )


def answer_different(
    found: Sequence[Difference], cause: Cause | None, steps: int, records: Sequence[RunRecord]
) -> Answer:
    """The answer that the runs differ, with the cause and its remedy.

    Args:
        records: the runs that differ, or the one run whose ranks differ.
    """
    claims = [claim_from(f"different. {describe(found[0])}", *records)]
    if cause is not None:
        claims += [
            Claim(f"\nCause: {cause.sentence}.", run_names(cause.shown_by or records)),
            Claim(f"\nRemedy: {cause.remedy}"),
        ]
    else:
        claims.append(claim_from("\nCause: none of those that are known leaves such records.", *records))
    answer = answer_with(DIFFERENT, claims, found, cause.key if cause is not None else "unknown")
    answer.remedy, answer.steps = cause.remedy if cause is not None else None, steps
    return answer
