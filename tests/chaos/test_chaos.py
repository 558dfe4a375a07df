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
    OF_TORCHFT,
    TORCHFT,
    TORCHRUN,
    WAYS,
    Case,
    Undisturbed,
    can_run,
    judge,
    steps_lost,
    steps_made_again,
    table,
)
from tests.chaos.job import EPOCHS, EXAMPLES, GLOBAL_BATCH, STEPS
from tests.chaos.replicas import uses_lost, uses_of_examples


class Known(Undisturbed):
    """A run that nobody disturbed, as if it had been made."""

    def __init__(self) -> None:
        super().__init__()
        told = {"ledger": "a", "steps": 60, "weights": "b"}
        for way in (*WAYS, TORCHRUN):
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
        {"way": TORCHRUN, "number": 2, "kills": ["ranks"], "processes": [2, 2], "wrong": ["other bits in the weights"]},
    ]
    *_, ours, theirs = table(cases).splitlines()
    assert ours == "| ddp | 2 | 3: 1 of a launcher, 2 of rank | 1 | 1 | 1 | 1 |"
    assert theirs == f"| {TORCHRUN} | 1 | 1: 1 of ranks | 1 | 0 | 0 | not looked at |"


def test_steps_that_are_made_again_are_counted(tmp_path: Path) -> None:
    (tmp_path / "starts").write_text("0 0\n7 7\n9 5\n")
    assert steps_lost(tmp_path) == [0, 4]
    words = steps_made_again([{"way": KEPT, "lost": [0, 4]}, {"way": KEPT, "lost": [0]}, {"way": "ddp"}])
    assert words == (
        "Of 3 such starts 2 made no update again, 0 one, that of the step at hand, and 1 more than that: up to 4."
    )


def ledgers() -> list[list[list[Any]]]:
    """Of two replicas of torchft that nobody disturbed: each uses its half of the examples once in each epoch."""
    half = GLOBAL_BATCH // 2
    ledger: list[list[list[Any]]] = [[], []]
    for step in range(STEPS):
        first = step * GLOBAL_BATCH % EXAMPLES
        for replica in range(2):
            numbers = list(range(first + replica * half, first + (replica + 1) * half))
            ledger[replica] += [["offers", 1, step, numbers], ["commits", 1, step]]
    return ledger


def write(path: Path, ledger: list[list[list[Any]]]) -> Path:
    for replica, entries in enumerate(ledger):
        (path / f"ledger-{replica}").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_the_uses_of_examples_are_counted_by_what_was_committed(tmp_path: Path) -> None:
    assert uses_of_examples(write(tmp_path, ledgers())) == (0, 0)
    # A replica is killed after its gradients were taken and before it could note that: the other has committed them.
    cut = ledgers()
    cut[1].pop()
    assert uses_of_examples(write(tmp_path, cut)) == (0, 0)
    # Nobody commits the last step, and the one that lives makes it again in the next quorum, with other examples.
    for entries in cut:
        entries[:] = [entry for entry in entries if entry[2] < STEPS - 1 or entry[0] == "offers"]
    cut[0] += [["offers", 2, STEPS - 1, [0, 1, 2, 3]], ["commits", 2, STEPS - 1]]
    assert uses_of_examples(write(tmp_path, cut)) == (GLOBAL_BATCH, 4)


def test_a_step_of_torchft_made_again_from_a_checkpoint_counts_once(tmp_path: Path) -> None:
    again = ledgers()
    again[0] += [["offers", 2, STEPS - 1, list(range(EXAMPLES - GLOBAL_BATCH, EXAMPLES))], ["commits", 2, STEPS - 1]]
    assert uses_of_examples(write(tmp_path, again)) == (0, 0)


def test_what_torchft_lost_is_told_of_trainings_in_which_something_was_killed() -> None:
    hit = [{"way": TORCHFT, "kills": ["rank"], "uses": uses} for uses in ([0, 0], [150, 2], [8, 4])]
    spared: list[dict[str, Any]] = [
        {"way": TORCHFT, "kills": [], "uses": [0, 0]},
        {"way": TORCHFT, "kills": ["rank"], "uses": []},  # it hung
        {"way": TORCHRUN, "kills": ["rank"]},
    ]
    assert uses_lost([*hit, *spared], TORCHFT) == (
        f"Of 3 such trainings 1 used each example {EPOCHS} times. Of {EXAMPLES * EPOCHS} uses 0 to 150 were missing, 8 "
        "in the median, and 0 to 4 were too many, 2 in the median."
    )


def test_without_torchft_its_rows_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos, "find_spec", lambda name: None)
    assert can_run(["ddp", TORCHFT]) == ["ddp"]
    assert capsys.readouterr().err == f'"{TORCHFT}" left out: torchft is not installed. pip install torchft-nightly\n'
    assert can_run([*OF_TORCHFT]) == []
    monkeypatch.setattr(chaos, "find_spec", lambda name: object())
    assert can_run(["ddp", *OF_TORCHFT]) == ["ddp", *OF_TORCHFT]


def test_the_table_of_the_docs_is_that_of_the_results() -> None:
    page = (chaos.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert steps_made_again(json.loads(chaos.RESULTS.read_text())["cases"]) in page, "run python -m tests.chaos --page"
    assert table(json.loads(chaos.RESULTS.read_text())["cases"]) in page, "run python -m tests.chaos --page"
    for way in OF_TORCHFT:
        assert uses_lost(json.loads(chaos.RESULTS.read_text())["cases"], way) in page, (
            "run python -m tests.chaos --page"
        )
