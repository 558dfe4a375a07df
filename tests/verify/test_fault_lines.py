"""`paceline verify` names the line of a fault (marked.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.verify.marked import MARKED, marked_lines, script
from tests.verify.prepared import answer_of

from paceline.verify.answer import DIFFERENT, SAME, Answer
from paceline.verify.fault_location import Fault, find_line
from paceline.verify.trace_diff import ScriptTrace

CORPUS = Path(__file__).parents[2] / "benchmarks" / "silentdist" / "corpus" / "ported"
QUICK = ["times-size", "state/clear"]


def missed(answer: Answer, text: str, name: str) -> str | None:
    """What is wrong with an answer."""
    said = f"{answer.code} {answer.cause} line {answer.line}: {answer.source}\n{answer.text}"
    if answer.code == SAME or answer.cause not in MARKED[name].causes:
        return f"another cause than {MARKED[name].causes}: {said}"
    return None if answer.line in marked_lines(text) else f"another line than {marked_lines(text)}: {said}"


CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MARKED]


@pytest.mark.conformance
@pytest.mark.parametrize("name", CASES)
def test_the_line_of_a_fault(name: str, tmp_path: Path) -> None:
    assert missed(answer_of(tmp_path, script(name), traced=True), script(name), name) is None


@pytest.mark.full
def test_an_optimizer_state_that_one_rank_clears_is_named_with_its_remedy(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, script("state/one"), traced=True)
    assert (answer.code, answer.quantity, answer.parameter) == (DIFFERENT, "optimizer state", "a.weight")
    assert "the optimizer's momentum_buffer of a.weight is missing on rank 0: it was cleared between" in answer.text
    assert (answer.remedy or "").startswith("Clear or change the optimizer's state in the same way on every rank")
    assert "Build the model" not in answer.text


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "cause"),
    [("loss_weight_by_rank", "control-by-rank"), ("stream_sharded_twice", "examples-overlap-or-miss")],
)
def test_causes_of_the_corpus_that_were_once_mistaken(name: str, cause: str, tmp_path: Path) -> None:
    """A rank that is read before the run starts, which no run can be told; examples that are others, not redrawn."""
    text = (CORPUS / f"{name}.py").read_text()
    answer = answer_of(tmp_path, text, traced=True)
    assert answer.cause == cause, answer.text
    assert answer.line is not None
    assert text.splitlines()[answer.line - 1].endswith("# fault"), answer.text


def traced(numbers: float, hooked: bool) -> ScriptTrace:
    """The script asks for its rank (line 2), puts a hook on a gradient (3), and calls the backward (5), where an op of
    the hook runs."""
    here = {"step": 0, "yield": 0}
    op = {"k": "op", "name": "mul", "at": [__file__, 5], "backward": True, "inputs": [], "outer": [], "shape": "scalar"}
    events = [
        {**here, "k": "ask", "at": [__file__, 2], "name": ""},
        {**here, "k": "hook", "at": [__file__, 3], "name": "register_hook", "values": [None]},
        {**here, "k": "root", "at": [__file__, 5], "name": "loss", "of": None, "values": [1.0]},
        {**here, **op, "numbers": [numbers], "values": [numbers]},
    ]
    return ScriptTrace([e for e in events if hooked or e["k"] != "hook"])


def test_an_op_of_a_hook_without_lines_has_the_line_that_put_the_hook() -> None:
    told = [traced(1.0, True)]
    found = find_line(Fault("control-by-rank", "gradient", "weight", 0), [traced(2.0, True)], told, [])
    assert found is not None
    assert (found.found and found.found.place) == (__file__, 3)
    alone = find_line(Fault("unknown", "gradient", "weight", 0), [traced(2.0, True)], [], [])
    assert alone is not None
    assert alone.place == (__file__, 3)
    without = find_line(Fault("unknown", "gradient", "weight", 0), [traced(2.0, False)], [], [])
    assert without is None or without.place != (__file__, 5)
