"""The table of a plan. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 118
_HEADINGS = (
    ("", "examples", "memory", "step ms", "", "", "MB sent", "runs out first", ""),
    ("strategy", "/s", "GB/device", "low", "middle", "high", "/device", "", "used"),
)


def render_plan(document: Mapping[str, Any]) -> str:
    """The text: a line for each strategy, the fastest that fits first; then strategies that cannot run, and notes."""
    rows = [row for row in document["rows"] if row["failed"] is None]
    cells = [*_HEADINGS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADINGS[0]))]
    lines = []
    for line in cells:
        parts = [
            cell.ljust(width) if column in (0, 7) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    lines.insert(2, "  ".join("-" * width for width in widths))
    over = {row["name"]: row["fits"] for row in rows}
    lines += _section("Does not fit:", [", ".join(name for name, fits in over.items() if fits is False)])
    by_note: dict[str, list[str]] = {}
    for row in rows:
        for note in row["notes"]:
            by_note.setdefault(note, []).append(row["name"])
    lines += _section("Notes:", [f"{', '.join(names)}: {note}." for note, names in by_note.items()])
    failed = [f"{row['name']}: {row['failed']}" for row in document["rows"] if row["failed"] is not None]
    lines += _section("Cannot run:", failed)
    lines += _section("How this was computed:", document["basis"])
    return "\n".join(lines) + "\n"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = row["step_seconds"]
    first = row["runs_out_first"]
    return (
        row["name"],
        _number(row["examples_per_second"]),
        _number(row["memory_bytes"]["total"]["middle"] / 1e9),
        *(_number(seconds[key] * 1e3) for key in ("low", "middle", "high")),
        _number(row["sent_bytes_per_device"] / 1e6),
        first,
        f"{row['used'][first]:.0%}",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _section(heading: str, entries: Sequence[str]) -> list[str]:
    entries = [entry for entry in entries if entry]
    lines = ["", heading] if entries else []
    for entry in entries:
        lines += textwrap.wrap(entry, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return lines
