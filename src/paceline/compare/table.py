"""The table of a comparison, and the format of its numbers. Pure.

A row is an entry of the document's `rows` (document.py). The terminal and the HTML page have the same columns.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NOT_MEASURED = "-"
WIDTH = 118

Entry = Mapping[str, Any]
COLUMNS: Sequence[tuple[str, str, str, Callable[[Entry], str]]] = (
    # two heading lines in the terminal, the heading on the page, and the function that formats a row's cell
    ("", "strategy", "strategy", lambda row: row["name"]),
    ("examples/s", "median", "examples/s", lambda row: number(row["examples_per_second"])),
    ("step ms", "median", "step, ms (median)", lambda row: milliseconds(row["step_seconds"]["median"])),
    ("", "p95", "step, ms (p95)", lambda row: milliseconds(row["step_seconds"]["p95"])),
    ("mean ms", "compute", "compute, ms", lambda row: milliseconds(row["mean_step"]["compute_seconds"])),
    ("", "data", "data, ms", lambda row: milliseconds(row["mean_step"]["waiting_for_data_seconds"])),
    ("", "comm", "comm, ms", lambda row: milliseconds(row["mean_step"]["communicating_seconds"])),
    ("memory", "MB/rank", "memory, MB per rank", lambda row: f"{max(row['peak_memory_bytes_by_rank']) / 1e6:,.0f}"),
    ("wire", "MB/step", "wire, MB per step", lambda row: megabytes(row["wire_bytes_per_step"])),
    ("loss", "differs", "loss differs by", lambda row: difference(row["loss_difference"])),
    ("start", "s", "start, s", lambda row: f"{row['start_up_seconds']:.1f}"),
)


def ran(row: Entry) -> bool:
    """Whether a row has figures."""
    return "examples_per_second" in row


def render_table(rows: Sequence[Entry]) -> str:
    """Return the text: a table with a line per case that ran, and below it notes, failures and why losses differ."""
    measured = [row for row in rows if ran(row)]
    columns = [[above, below, *map(cell, measured)] for above, below, _, cell in COLUMNS]
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *rest in zip(*columns):
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(2, "  ".join("-" * width for width in widths))
    served = [row for row in measured if row["servers"]]
    if served:
        lines.append("")
    for row in served:
        replicas, servers = row["processes"] - row["servers"], row["servers"]
        lines.append(f"{row['name']}: {servers} server{'s' * (servers > 1)} in addition to the {replicas} replicas.")
    notes = [row["note"] for row in measured if row.get("note")]
    if notes:
        lines += ["", *dict.fromkeys(f"{text[0].upper()}{text[1:]}" for text in notes)]
    lines += _section("Did not run:", [f"{row['name']}: {row['failed']}" for row in rows if not ran(row)])
    later = [f"{row['name']}: {row['failed']}" for row in measured if row["failed"] is not None]
    lines += _section("Failed after the rounds shown in the table:", later)
    causes: dict[str, list[str]] = {}
    for row in measured:
        if row["loss_difference_cause"] is not None:
            causes.setdefault(row["loss_difference_cause"], []).append(row["name"])
    lines += _section("Why losses differ:", [f"{', '.join(names)}: {cause}." for cause, names in causes.items()])
    return "\n".join(lines) + "\n"


def _section(heading: str, entries: Sequence[str]) -> list[str]:
    """A heading and its entries, each indented; nothing if there are no entries."""
    lines = ["", heading] if entries else []
    for entry in entries:
        lines += textwrap.wrap(entry, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines


def number(value: float) -> str:
    """Format a number: as an integer from 100 up, otherwise with three significant digits."""
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
