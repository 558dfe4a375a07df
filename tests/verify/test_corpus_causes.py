"""Causes of scripts of the corpus that were once mistaken for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.prepared import Prepared

from paceline.verify.decision import decide

CORPUS = Path(__file__).parents[1] / "corpus" / "verify"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cause"),
    [("loss_weight_by_rank", "control-by-rank"), ("stream_sharded_twice", "examples-overlap-or-miss")],
)
def test_the_cause_and_the_line(name: str, cause: str, tmp_path: Path) -> None:
    """A rank that is read before the run starts, which no run can be told; examples that are others, not redrawn."""
    path = CORPUS / f"{name}.py"
    runs = Prepared(tmp_path, (), 2, None, "fp32", 3, path)
    runs.may_trace = True
    answer = decide(runs)
    assert answer.cause == cause, answer.text
    assert answer.line is not None
    assert path.read_text().splitlines()[answer.line - 1].endswith("# fault"), answer.text
