"""Measured figures on the pages can be traced to the run that gave them.

A table of measured figures stands below a comment that names the JSON file of its run:

    <!-- figures: benchmarks/results/compare_digits.json -->

The file holds the command, the hardware, the date, and the figures. A table of `paceline compare` is what the command
prints of these; of any other table, each number is one of the file's, rounded to the digits that are shown.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.compare.table import render_table

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "README.zh-CN.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMED = re.compile(r"<!-- figures: (?P<file>\S+) -->")
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
CELL = re.compile(r"[^A-Za-z]*(?:\d[\d,.]*(?:e-?\d+)?)[^A-Za-z]*(?:us|ms|s|MB|of \d+)?[^A-Za-z]*(?:us|ms|s|MB)?")
UNITS = (1.0, 1e2, 1e3, 1e6, 1e-6, 1e-3)  # the page's unit in the file's: %, ms, us, MB

# Tables that were measured before the results of a run were kept, as of 2026-11-22: the page, and how the table begins.
# They go when they are measured anew, and nothing is to be added.
BEFORE_RESULTS_WERE_KEPT = {
    ("benchmarks/README.md", "| model | A, A' | P, P' |"),
    ("benchmarks/README.md", "| model | D, D' | R, R' |"),
    ("docs/learning_rate.md", "| batch | fixed | sqrt |"),
    ("docs/strategies/diloco.md", "| sent by each process |"),
    ("docs/strategies/fsdp.md", "| | n = 2: kept |"),
    ("docs/strategies/local_sgd.md", "| sent by each process, a step on average |"),
    ("docs/strategies/parameter_server.md", "| mode | examples/s |"),
}


@dataclass(frozen=True)
class Table:
    """page: from the root. lines: as they stand there, without indentation. file: the JSON named above it, or None."""

    page: str
    line: int
    lines: tuple[str, ...]
    file: str | None

    @property
    def fenced(self) -> bool:
        return not self.lines[0].startswith("|")

    def cells(self) -> list[str]:
        """Those of the body; of a fenced table its words."""
        if self.fenced:
            return [word for line in self.lines for word in line.split()]
        rows = [line.strip().strip("|").split("|") for line in self.lines[2:]]
        return [cell.strip() for row in rows for cell in row[1:] if cell.strip()]

    def begins(self, page: str, words: str) -> bool:
        return self.page == page and self.lines[0].startswith(words)

    def measured(self) -> bool:
        """Whether it shows figures: columns over dashes, or cells of which most are numbers (with a unit)."""
        if self.fenced:
            return any(re.fullmatch(r"-+(  -+){2,}", line) for line in self.lines)
        cells = self.cells()
        return sum(bool(CELL.fullmatch(cell)) for cell in cells) * 2 > len(cells)


def tables(page: Path, root: Path = ROOT) -> Iterator[Table]:
    lines = page.read_text(encoding="utf-8").splitlines()
    number = 0
    while number < len(lines):
        line, start, kind = lines[number].strip(), number, None
        if re.fullmatch(r"```\w*", line):
            kind = line
            end = next(k for k in range(number + 1, len(lines)) if lines[k].strip() == "```")
            body, number = lines[number + 1 : end], end + 1
        elif line.startswith("|"):
            end = next((k for k in range(number, len(lines)) if not lines[k].strip().startswith("|")), len(lines))
            body, number = lines[number:end], end
        else:
            number += 1
            continue
        if body and kind in (None, "```text"):
            above = next((text for text in reversed(lines[:start]) if text.strip()), "")
            named = NAMED.fullmatch(above.strip())
            stripped = tuple(text.strip() if kind is None else text for text in body)
            yield Table(str(page.relative_to(root)), start + 1, stripped, named and named["file"])


TABLES = [found for page in PAGES for found in tables(page)]
MEASURED = [found for found in TABLES if found.measured()]
TRACED = [found for found in TABLES if found.file is not None]


def test_no_table_and_no_row_of_figures_stands_twice() -> None:
    seen: dict[tuple[str, ...], Table] = {}
    for found in TABLES:
        rows = (tuple(line.split()) for line in found.lines if len(NUMBER.findall(line)) > 4)
        for key in ((found.lines), *(rows if found.measured() else ())):
            first = seen.setdefault(key, found)
            same = first is found or {first.page, found.page} == {"README.md", "README.zh-CN.md"}
            assert same, f"{found.page}:{found.line} shows what {first.page}:{first.line} does: {key}"


def test_measured_figures_name_the_file_of_their_run() -> None:
    untraced = [found for found in MEASURED if found.file is None]
    listed = {id(found): entry for found in untraced for entry in BEFORE_RESULTS_WERE_KEPT if found.begins(*entry)}
    without = [f"{found.page}:{found.line}" for found in untraced if id(found) not in listed]
    assert without == [], "put <!-- figures: benchmarks/results/NAME.json --> above"
    assert set(listed.values()) == BEFORE_RESULTS_WERE_KEPT, "measured anew, or gone: take it off the list"


@pytest.mark.parametrize("found", TRACED, ids=lambda found: f"{found.page}:{found.line}")
def test_figures_are_those_of_their_file(found: Table) -> None:
    assert found.file is not None
    document = json.loads((ROOT / found.file).read_text(encoding="utf-8"))
    command, machine, date = (document.get(key) for key in ("command", "machine", "time"))
    assert command, "which command gave it"
    assert machine["processor"], "on what it was measured"
    assert {"cores", "accelerators", "torch", "python"} <= machine.keys()
    assert re.match(r"20\d\d-\d\d-\d\d", date), "when it was measured"
    if "rows" in document and found.fenced:
        assert "\n".join(found.lines) == compared(document)
        return
    missing = not_held(found, document)
    assert missing == [], f"{found.page}:{found.line} shows numbers that {found.file} does not hold"


def test_a_number_is_looked_up_to_the_digits_that_are_shown() -> None:
    held = [0.0397, 2677.8, 0.899]
    assert all(shown(text, held) for text in ("39.7", "40", "2,678", "89.9", "0.90"))
    assert not any(shown(text, held) for text in ("39.8", "2,679", "89.8", "0.91", "7"))


# What the READMEs quote, by file: how each figure of the cell "result" comes from the run's JSON.
QUOTED: dict[str, Callable[[Any], list[str]]] = {
    "drift": lambda run: [
        f"{run['difference_from_1_process'][side]['4']['weights']:.2g}".replace("e-0", "e-")
        for side in ("Paceline", "Hand-written DDP")
    ],
    "overhead": lambda run: [
        f"{end([model['ours/by hand'][0] for model in run['results'].values()]):.3f}" for end in (min, max)
    ],
    "gpu": lambda run: (
        [
            f"{run['checks'][f'a_step_of_{step}']['figures']['ours/by hand'][0]:.3f}"
            for step in ("resnet50", "gpt2", "one_millisecond")
        ]
        + [f"{1e3 * run['checks']['a_step_of_one_millisecond']['figures']['by hand']['median, s']:.1f}"]
    ),
    "batch_norm": lambda run: [f"{model['P/A'][0]:.2f}" for model in run["results"].values()],
    "chaos": lambda run: [
        str(sum(ways[key] for name, ways in run["counts"].items() if not name.startswith("torch")))
        for key in ("good", "trainings", "kills")
    ],
}


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_a_readme_quotes_what_the_files_hold(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\|([^|]*)\| \[(\w+)\.json\]\(benchmarks/results/\2\.json\) \|$", text, re.M)
    assert [name for _, name in rows] == list(QUOTED)
    for cell, name in rows:
        document = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        assert NUMBER.findall(cell) == QUOTED[name](document), f"{readme} quotes {name}.json: {cell}"
    drift = json.loads((ROOT / "benchmarks" / "results" / "drift.json").read_text(encoding="utf-8"))
    assert drift["time"][:10] in text, "the date below the picture"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_prose_of_a_first_page_quotes_no_figure(page: str) -> None:
    """Ratios and distances belong into its tables, which are compared with the files; prose is not."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    without_versions = re.sub(r"(?:torch|CUDA|Python|from) \d+(?:\.\d+)+", "", prose)
    assert re.findall(r"(?<![\w.-])\d+\.\d+|\de-\d", without_versions) == []


def compared(document: dict[str, Any]) -> str:
    """What `paceline compare` printed when it wrote the file."""
    rows = [{"loss_difference_cause": None} | entry for entry in document["rows"]]
    text = render_table(rows)
    return f"{text}\n{document['verdict']['sentence']}" if document["verdict"] else text.rstrip("\n")


def not_held(found: Table, document: Any) -> list[str]:
    """The numbers of a table that the document does not hold."""
    held = sorted(set(numbers(document)))
    return [text for cell in found.cells() for text in NUMBER.findall(cell) if not shown(text, held)]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield float(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, list):
        for item in value:
            yield from numbers(item)


def shown(text: str, held: list[float]) -> bool:
    """Whether a number is one of those held, in some unit, rounded to the digits that are shown."""
    value = float(text.replace(",", ""))
    digits, _, exponent = text.replace(",", "").partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))  # the place of the last digit shown
    return any(math.isclose(number * unit, value, abs_tol=0.501 * last) for number in held for unit in UNITS)


# python -m tests.docs.test_figures benchmarks/results/compare_digits.json prints the table for the page.
if __name__ == "__main__":
    print(compared(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))
