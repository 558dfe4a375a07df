"""What the judgement of `make chaos` finds in runs that lost something. Trainings: tests/system/test_kills.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.chaos import __main__ as chaos
from tests.chaos.__main__ import (
    KEPT,
    WAYS,
    Case,
    Undisturbed,
    judge,
    steps_lost,
    steps_made_again,
    table,
)


class Known(Undisturbed):
    """A run that nobody disturbed, as if it had been made."""

    def __init__(self) -> None:
        super().__init__()
        told = {"ledger": "a", "steps": 60, "weights": "b"}
        for way in WAYS:
            self._known[way, 2] = told, {"w": torch.ones(3, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("found", "same_bits", "wrong"),
    [
        ({"ledger": "a", "steps": 60, "weights": "b"}, True, []),
        ({"ledger": "a", "steps": 60, "weights": "c"}, True, ["other bits in the weights"]),
        (
            {"ledger": "z", "steps": 58, "weights": "b"},
            True,
            ["other examples: 58 steps of 60, or in another order"],
        ),
        ({"ledger": "a", "steps": 60, "weights": "c"}, False, ["weights that differ by 1.7e-09 of their norm"]),
        (None, True, ["it did not come to its end"]),
    ],
)
def test_what_was_lost_is_seen(tmp_path: Path, found: dict[str, Any] | None, same_bits: bool, wrong: list[str]) -> None:
    case = Case("ddp", 1, processes=[2])
    save_file({"w": torch.tensor([1, 1, 1 + 3e-9], dtype=torch.float64)}, tmp_path / "weights.safetensors")
    judge(case, found, tmp_path, Known(), same_bits=same_bits)
    assert case.wrong == wrong


def test_the_table_counts_trainings_kills_and_what_went_wrong(tmp_path: Path) -> None:
    bad = ["start 2 hung", "process 7 is left: sleep"]
    cases = [
        {"way": "ddp", "number": 0, "kills": ["rank", "launcher"], "processes": [2, 2, 2], "wrong": []},
        {"way": "ddp", "number": 1, "kills": ["rank"], "processes": [4], "wrong": bad},
        {
            "way": "torchrun",
            "number": 2,
            "kills": ["ranks"],
            "processes": [2, 2],
            "wrong": ["other bits in the weights"],
        },
    ]
    *_, ours, theirs = table(cases).splitlines()
    assert ours == "| ddp | 2 | 3 | 1 | 1 | 1 | 1 |"
    assert theirs == "| torchrun | 1 | 1 | 1 | 0 | 0 | not looked at |"


def test_steps_that_are_made_again_are_counted(tmp_path: Path) -> None:
    (tmp_path / "starts").write_text("0 0\n7 7\n9 5\n")
    assert steps_lost(tmp_path) == [0, 4]
    words = steps_made_again([{"way": KEPT, "lost": [0, 4]}, {"way": KEPT, "lost": [0]}, {"way": "ddp"}])
    assert words == (
        "Of 3 such restarts, 2 repeated no update, 0 repeated one (the interrupted step), and 1 repeated more: up to 4."
    )


def test_the_table_of_the_docs_is_that_of_the_results() -> None:
    page = (chaos.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    words = steps_made_again(json.loads(chaos.RESULTS.read_text())["cases"])
    assert words in " ".join(page.split()), "run python -m tests.chaos --page"
    assert table(json.loads(chaos.RESULTS.read_text())["cases"]) in page, "run python -m tests.chaos --page"
