"""`paceline verify` names the line of a fault (marked.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.marked import MARKED, marked_lines, script
from tests.verify.prepared import Prepared

from paceline.verify.answer import SAME, Answer
from paceline.verify.decision import decide

QUICK = ["times-size"]


def asked(folder: Path, name: str, processes: int = 2, steps: int = 3) -> tuple[Answer, str]:
    path = folder / "train.py"
    path.write_text(script(name))
    runs = Prepared(folder, (), processes, None, "fp32", steps, path)
    runs.may_trace = True
    return decide(runs), path.read_text()


def missed(answer: Answer, text: str, name: str) -> str | None:
    """What is wrong with an answer."""
    said = f"{answer.code} {answer.cause} line {answer.line}: {answer.source}\n{answer.text}"
    if answer.code == SAME or answer.cause not in MARKED[name].causes:
        return f"another cause than {MARKED[name].causes}: {said}"
    return None if answer.line in marked_lines(text) else f"another line than {marked_lines(text)}: {said}"


def marks(number: int, name: str) -> list[pytest.MarkDecorator]:
    """.ci/run has every sixth."""
    if name in QUICK:
        return []
    return [pytest.mark.full if number % 6 else pytest.mark.conformance]


CASES = [pytest.param(name, marks=marks(number, name)) for number, name in enumerate(MARKED)]


@pytest.mark.parametrize("name", CASES)
def test_the_line_of_a_fault(name: str, tmp_path: Path) -> None:
    assert missed(*asked(tmp_path, name), name) is None
