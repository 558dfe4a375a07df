"""From the records of a step to the script's line of a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.verify.plain_location import COLLECTIVE, GRADIENT, WEIGHT, locate

LINES = {"backward": ["train.py", 20], "step": ["train.py", 30]}


def at(kind: str, *lines: int, name: str = "", calls: tuple[int, ...] = ()) -> list[Any]:
    """An entry of a record: its stack has these lines, innermost first. calls: the number of each call."""
    numbers = calls or tuple(range(len(lines)))
    return [kind, name, [["train.py", line, call] for line, call in zip(lines, numbers, strict=True)]]


def find(cause: str | None, *ranks: list[Any], nodes: Any = (), **more: Any) -> Any:
    steps = [{"lines": LINES | more.pop("lines", {}), "writes": writes, **more} for writes in ranks or [[]]]
    found = locate(cause, steps, {"wrapper": ["train.py", 5], "loader": ["train.py", 3]}, list(nodes))
    return found and (found.at[1], found.beside and found.beside[1])


def test_gradients_that_are_changed_before_they_are_reduced() -> None:
    writes = [
        at(GRADIENT, 20),
        at(GRADIENT, 44, 25, calls=(7, 1)),  # clip(), called in line 25
        at(COLLECTIVE, 60, 26, calls=(8, 1)),  # reduce(), called in line 26 of the same function
    ]
    assert find("weights", writes) == (25, 26)


def test_gradients_that_are_multiplied_by_a_reduced_number() -> None:
    writes = [at(GRADIENT, 20), at(COLLECTIVE, 43), at(GRADIENT, 51), at(GRADIENT, 51)]
    assert find("factor", writes) == (43, 51)


@pytest.mark.parametrize(("cause", "line"), [("weights", 16), ("factor", 40)])
def test_a_line_that_only_reduces_the_gradients(cause: str, line: int) -> None:
    """The loss of a rank may have a wrong weight. A wrong factor may come from the reduction."""
    writes = [at(GRADIENT, 20), at(COLLECTIVE, 40), at(GRADIENT, 40), at(COLLECTIVE, 40), at(GRADIENT, 40)]
    found = find(cause, writes, nodes=[["MeanBackward0", "train.py", 16]])
    assert found is not None
    assert found[0] == line


def test_gradients_that_are_changed_without_a_collective() -> None:
    assert find("factor", [at(GRADIENT, 20), at(GRADIENT, 28)]) == (28, None)


def test_weights_that_one_rank_alone_writes() -> None:
    common = at(WEIGHT, 30)
    assert find("ranks-drift-apart", [common, at(WEIGHT, 9, 33)], [common]) == (9, 33)


def test_a_forward_that_bypasses_the_wrapper() -> None:
    assert find("not-reduced", [], lines={"past_wrapper": ["train.py", 18]}) == (18, 5)


def test_the_update_of_an_optimizer_of_the_script() -> None:
    assert find("update", [], writes_in_update=[at(WEIGHT, 12, 30)]) == (12, 30)


@pytest.mark.parametrize(("cause", "line"), [("mean-of-means", 16), ("factor", 17)])
def test_the_loss_if_nothing_changes_the_gradients(cause: str, line: int) -> None:
    nodes = [["DivBackward0", "train.py", 17], ["MeanBackward0", "train.py", 16]]
    assert find(cause, [at(GRADIENT, 20)], nodes=nodes) == (line, 20)


def test_the_norm_that_scales_gradients_is_found_in_the_source(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def clip(grads, most):\n"
        "    square = sum(g.square().sum() for g in grads)\n"
        "    norm = square.sqrt()\n"
        "    scale = most / norm\n"
        "    for g in grads:\n"
        "        g.mul_(scale)\n"
    )
    file = str(script)
    step = {
        "lines": {"backward": [file, 20]},
        "writes": [[GRADIENT, "", [[file, 20, 1]]], [GRADIENT, "", [[file, 6, 2]]]],
    }
    found = locate("factor", [step], {}, [])
    assert found is not None
    assert (found.at, found.beside) == ((file, 6), (file, 2))
