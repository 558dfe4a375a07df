"""The table in the terminal, and its numbers as people read them. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from paceline.compare.figures import Row

NOT_MEASURED = "-"
HEADINGS = (
    ("", "examples/s", "step ms", "", "ms of it in", "", "", "memory", "wire", "loss", "start"),
    ("strategy", "median", "median", "p95", "compute", "data", "comm", "MB/rank", "MB/step", "differs", "s"),
)
WIDTH = 118


def render_table(rows: Sequence[Row]) -> str:
    """Lines, each ending in a newline: a row for each case that ran, and below the table why the others did not run."""
    cells = [*HEADINGS, *(_cells(row) for row in rows if row.figures is not None)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADINGS[0]))]
    lines = []
    for number, line in enumerate(cells):
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
        if number == len(HEADINGS) - 1:
            lines.append("  ".join("-" * width for width in widths))
    served = [row.case for row in rows if row.figures is not None and row.case.servers]
    if served:
        lines.append("")
    for case in served:
        replicas, servers = case.processes - case.servers, case.servers
        lines.append(f"{case.name}: {servers} server{'s' * (servers > 1)} beside the {replicas} replicas.")
    lone = [row.case.alone for row in rows if row.figures is not None and row.case.alone]
    if lone:
        lines += ["", *dict.fromkeys(f"{text[0].upper()}{text[1:]}" for text in lone)]
    lines += _section("Did not run:", [f"{r.case.name}: {r.failed}" for r in rows if r.figures is None])
    later = [f"{r.case.name}: {r.failed}" for r in rows if r.figures is not None and r.failed is not None]
    lines += _section("Failed after the rounds that the figures are of:", later)
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row.cause is not None:
            causes.setdefault(row.cause, []).append(row.case.name)
    lines += _section("Why losses differ:", [f"{', '.join(names)}: {cause}." for cause, names in causes.items()])
    return "\n".join(lines) + "\n"


def _section(heading: str, entries: Sequence[str]) -> list[str]:
    """A heading and its entries, each indented; nothing where there are none."""
    lines = ["", heading] if entries else []
    for entry in entries:
        lines += textwrap.wrap(entry, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _cells(row: Row) -> tuple[str, ...]:
    f = row.figures
    assert f is not None
    return (
        row.case.name,
        number(f.examples_per_second),
        milliseconds(f.step_seconds),
        milliseconds(f.p95_seconds),
        milliseconds(f.compute),
        milliseconds(f.waiting),
        milliseconds(f.communicating),
        f"{max(f.memory) / 1e6:,.0f}",
        megabytes(f.wire),
        difference(row.difference),
        f"{f.start_up:.1f}",
    )


def number(value: float) -> str:
    """With at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def megabytes(count: float | None) -> str:
    if count is None:
        return NOT_MEASURED
    value = count / 1e6
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}" if value else "0"


def difference(value: float | None) -> str:
    if value is None:
        return NOT_MEASURED
    return "0" if value == 0 else "nan" if math.isnan(value) else f"{value:.1e}"
