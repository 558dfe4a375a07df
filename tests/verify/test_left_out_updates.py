"""The order of updates and collectives, as two ranks have written it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.update_order import COLLECTIVE, JOIN, UPDATE, order_path
from paceline.verify.left_out_updates import answer_for_left_out_update

LINES = {
    "c": [COLLECTIVE, "train.py", 5],
    "u": [UPDATE, "train.py", 9],
    "d": [COLLECTIVE],
    "j": [JOIN],
}  # d: DDP's, with no line


def write(folder: Path, *orders: str) -> None:
    for rank, order in enumerate(orders):
        lines = [json.dumps(LINES[one]) + "\n" for one in order]
        Path(order_path(str(folder), rank)).write_text("".join(lines))


@pytest.mark.parametrize(
    ("orders", "step", "line"),
    [
        (("cucucu", "cuccu"), 1, 5),  # rank 1 leaves out the second update, and goes on
        (("ccu", "cucu"), 0, 5),  # rank 0 leaves out the first one, and makes the second as its first
        (("cucu", "cuc"), None, None),  # rank 1 ended or was killed before its second update
        (("cucu", "cucc"), 1, 5),  # rank 1 has passed the point of the update
        (("cucu", "cucu"), None, None),
        (("uuu", "u"), None, None),  # no collective shows who is ahead
        (("dudu", "dud"), None, None),
        (("dudu", "dudd"), 1, 9),  # no line of the script makes the collective
        (("cuc", "cuc"), None, None),
        (("cuucuc", "cucuc"), None, None),  # local SGD: the ranks make different numbers of updates before they average
        (("jcucucc", "jcuccc"), None, None),  # torch's Join: rank 1 has no data for the second update
        (("", ""), None, None),
    ],
)
def test_an_update_that_a_rank_leaves_out(
    tmp_path: Path, orders: tuple[str, str], step: int | None, line: int | None
) -> None:
    write(tmp_path, *orders)
    found = answer_for_left_out_update(str(tmp_path), 2)
    assert (found and found.step, found and found.line) == (step, line)
    assert found is None or found.cause == "steps_differ"


def test_a_line_that_is_cut_off_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, "cu", "cu")
    with open(order_path(str(tmp_path), 1), "a") as file:
        file.write('["collec')
    assert answer_for_left_out_update(str(tmp_path), 2) is None
    assert answer_for_left_out_update(str(tmp_path), 3) is None  # a rank that has written nothing
