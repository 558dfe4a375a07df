"""Optimizers that work on shards of matrices, on written records; the names in a library's frames."""

from __future__ import annotations

import dataclasses
import sys
from types import FrameType
from typing import Any

from paceline.doctor.recorders.call_context import library_names
from paceline.doctor.rules import gradient_rules
from paceline.doctor.rules.recorded_run import Event, RecordedRun

AT = ["muon.py", 7]


def steps(*kinds: str, exchanged: bool = False, count: int = 3) -> list[Event]:
    of = {"k": "of_shard", "opt": 0, "op": "mm", "weight": "parameter 1", "shape": [8, 4], "whole": [16, 4], "at": AT}
    end = {"k": "shards", "opt": 0, "optimizer": "Muon", "exchanged": exchanged, "at": []}
    return [e for _ in range(count) for e in (*({**of, "kind": kind} for kind in kinds), end)]


def found(events: list[Event]) -> list[tuple[str, str]]:
    return [(f.cause, f.at) for f in gradient_rules.findings(RecordedRun([events, events]))]


def test_products_and_norms_of_shards() -> None:
    wrong = [("matrix_of_shard", "muon.py:7")]
    assert found(steps("product")) == wrong
    assert found(steps("norm", "norm")) == wrong  # of a weight and its update
    assert found(steps("norm")) == []  # one that is only looked at
    assert found(steps("product", exchanged=True)) == []  # summed over the ranks
    assert found(steps("product", count=1)) == []
    assert found([*steps("product", count=1), *steps(count=2)]) == []


@dataclasses.dataclass
class About:
    name: str
    size: int = 3


class Metric:
    def __init__(self, name: str) -> None:
        self.about, self.kind, self.long = About(name), "mean", "x" * 80

    def reduce(self) -> FrameType:
        return sys._getframe()


def reduce_all(values: dict[str, Any]) -> list[FrameType]:
    return [sys._getframe() for key in values]


def test_the_names_by_which_a_library_chooses() -> None:
    assert library_names([Metric("loss").reduce()]) == {"about.name of Metric": "loss", "kind of Metric": "mean"}
    inner = reduce_all({"loss": 1})[0]
    assert "loss" in library_names([inner]).values()
