"""Findings as text for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from paceline.doctor.findings import COST, MODEL, NOTE, Finding

ONE_LINE = ("lr_not_scaled",)  # causes that are true of most scripts, and mostly meant
_HEADS = {MODEL: "changes the model", COST: "costs time or space", NOTE: "to know"}


def text(found: Sequence[Finding], steps: int, processes: int) -> str:
    """All findings, and a last line with their numbers."""
    asides = [finding for finding in found if finding.cause in ONE_LINE]
    listed = [finding for finding in found if finding.cause not in ONE_LINE]
    parts = [_one(number, finding) for number, finding in enumerate(listed, 1)]
    counts = {kind: sum(f.about.kind == kind for f in found) for kind in _HEADS}
    watched = f"watched {steps} steps on {processes} processes"
    if not found:
        return f"paceline doctor: {watched}: nothing found.\n"
    said = [f"{n} that change{'s' if n == 1 else ''} the model" for n in [counts[MODEL]] if n]
    said += [f"{n} that cost{'s' if n == 1 else ''} time or space" for n in [counts[COST]] if n]
    said += [f"{n} to know" for n in [counts[NOTE]] if n]
    last = f"paceline doctor: {watched}: {', '.join(said)}.\n"
    return "\n".join([*parts, *map(_aside, asides), last])


def _aside(finding: Finding) -> str:
    where = f"{finding.at}: " if finding.at else ""
    return f"{where}{finding.evidence}.  [{finding.cause}: {_HEADS[finding.about.kind]}]\n"


def _one(number: int, finding: Finding) -> str:
    about = finding.about
    where = f"{finding.at}: " if finding.at else ""
    lines = [f"{number}. {where}{about.title}  [{finding.cause}: {_HEADS[about.kind]}]"]
    if finding.beside and finding.beside != finding.at:
        lines.append(f"   with {finding.beside}")
    for name, value in (("seen", finding.evidence), ("leads to", about.consequence), ("do", finding.remedy)):
        lines.append(
            textwrap.fill(value, 116, initial_indent=f"   {name + ':':10}", subsequent_indent=" " * 13)
        )  # fmt: skip
    if about.page is not None:
        lines.append(f"   more:     {about.page}")
    return "\n".join(lines) + "\n"
