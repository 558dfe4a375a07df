"""The answer of `paceline verify`: a verdict, the sentences that state it, and the line of the cause."""

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
    """A sentence of the answer, and the runs that it describes.

    Some sentences describe no run, for example why the script failed to start.
    """

    text: str  # the sentence
    runs: tuple[str, ...] = ()  # the runs that it describes: their records show it
    without: tuple[str, ...] = ()  # the runs that the sentence calls missing

    def check(self, made: Collection[str]) -> None:
        """Raises AssertionError if the sentence describes a run that left no records, or calls a run missing that left
        records."""
        missing = [run for run in self.runs if run not in made]
        there = [run for run in self.without if run in made]
        assert not missing, f"{self.text!r} describes {missing}, which have no records"
        assert not there, f"{self.text!r} calls {there} missing, but they have records"


def claim_from(text: str, *records: RunRecord) -> Claim:
    """Make a claim that the records of these runs show."""
    return Claim(text, run_names(records))


def claim_without(text: str, *runs: str) -> Claim:
    """Make a claim about runs that could not be made."""
    return Claim(text, without=runs)


def run_names(records: Iterable[RunRecord]) -> tuple[str, ...]:
    """The names of the runs, without duplicates."""
    return tuple(dict.fromkeys(record.name for record in records))


@dataclass
class Answer:
    """The answer to print. Its fields are keys of the `--json` document."""

    code: int  # SAME, DIFFERENT or UNKNOWN
    claims: list[Claim]  # the sentences of the verdict
    step: int | None = None  # the first step that differs, counted from 0
    quantity: str | None = None  # the first quantity of that step that differs (differences.ORDER)
    parameter: str | None = None  # the parameter or buffer that differs
    cause: str | None = None  # the key of the cause
    remedy: str | None = None  # the fix
    difference: float | None = None  # the size of the difference
    tolerance: float | None = None  # the largest difference that rounding explains
    steps: int = 0  # the number of steps that were compared
    file: str | None = None  # the file with the cause
    line: int | None = None  # its line
    source: str | None = None  # the text of the line
    beside: str | None = None  # a second line related to the cause, as "file:line"
    indeterminate: list[str] = field(default_factory=list)  # parameters with gradients that are mostly rounding
    notes: list[Claim] = field(default_factory=list)  # further sentences, one per line
    differences: list[dict[str, Any]] = field(default_factory=list)  # the first 50 differences of the step

    @property
    def text(self) -> str:
        """The sentences of the verdict, as printed."""
        return " ".join(claim.text for claim in self.claims).replace(" \n", "\n")

    def check(self, made: Collection[str]) -> None:
        """Check all sentences (see Claim.check)."""
        for claim in (*self.claims, *self.notes):
            claim.check(made)

    def document(self) -> dict[str, Any]:
        """The document of `--json` (described in docs/verify.md)."""
        own = {"text": self.text, "notes": [note.text for note in self.notes]}
        claims = [asdict(claim) for claim in (*self.claims, *self.notes)]
        return {"schema": SCHEMA, "verdict": _VERDICTS[self.code], **vars(self), **own, "claims": claims}


def describe(d: Difference) -> str:
    """State the first difference in a sentence."""
    what = f"the {d.quantity}" + (f" of {d.name}" if d.name else "")
    if d.difference != d.difference:
        return f"First in step {d.step + 1}: {what}."
    if d.quantity in DATA:
        return f"First in step {d.step + 1}: {what}; {d.difference:.0f} examples are in only one of the two runs."
    return f"First in step {d.step + 1}: {what}, by {d.difference:.3g} (allowed: {d.tolerance:.2g})."


def answer_with(code: int, claims: list[Claim], found: Sequence[Difference], cause: str) -> Answer:
    """Build an answer from these sentences about the first of the differences."""
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
    """Build the answer that the runs differ, with the cause and its remedy.

    Args:
        records: the two runs that differ, or a single run if its ranks differ from each other.
    """
    claims = [claim_from(f"different. {describe(found[0])}", *records)]
    if cause is not None:
        claims += [
            Claim(f"\nCause: {cause.sentence}.", run_names(cause.shown_by or records)),
            Claim(f"\nRemedy: {cause.remedy}"),
        ]
    else:
        claims.append(claim_from("\nCause: not found. No known cause explains these records.", *records))
    answer = answer_with(DIFFERENT, claims, found, cause.key if cause is not None else "unknown")
    answer.remedy, answer.steps = cause.remedy if cause is not None else None, steps
    return answer
