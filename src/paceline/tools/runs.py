"""What `paceline verify` is asked, the runs that it makes, and what it answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline import strategies
from paceline.config import StrategySpec, parse_strategy
from paceline.tools.cases import devices, laid_out
from paceline.tools.claims import Claim
from paceline.tools.trials import Script, Start

SAME, DIFFERENT, UNKNOWN = 0, 1, 2
SCHEMA = 1
_VERDICTS = {SAME: "same", DIFFERENT: "different", UNKNOWN: "could not tell"}


@dataclass(frozen=True)
class Question:
    """What the command line asks for. strategy: None where the script's own stands. deadline: seconds for one run."""

    script: Script
    nproc: str | int
    strategy: str | None = None
    precision: str | None = None
    steps: int = 20
    deadline: float = 300.0
    json_file: str | None = None


@dataclass
class Answer:
    """What is printed, and written with `--json`. claims: the sentences of the verdict; notes: further ones, a line
    each. step: from 0. parameter: or a buffer. file, line, source: where in the script the cause is; beside: a
    further place that has to do with it. indeterminate: parameters whose gradient is rounding alone."""

    code: int
    claims: list[Claim]
    step: int | None = None
    quantity: str | None = None
    parameter: str | None = None
    cause: str | None = None
    remedy: str | None = None
    difference: float | None = None
    tolerance: float | None = None
    steps: int = 0
    file: str | None = None
    line: int | None = None
    source: str | None = None
    beside: str | None = None
    indeterminate: list[str] = field(default_factory=list)
    notes: list[Claim] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(claim.text for claim in self.claims).replace(" \n", "\n")

    def check(self, made: Collection[str]) -> None:
        """Raises AssertionError where a sentence speaks of a run of which there are no records."""
        for claim in (*self.claims, *self.notes):
            claim.check(made)

    def document(self) -> dict[str, Any]:
        own = {"text": self.text, "notes": [note.text for note in self.notes]}
        claims = [asdict(claim) for claim in (*self.claims, *self.notes)]
        return {"schema": SCHEMA, "verdict": _VERDICTS[self.code], **vars(self), **own, "claims": claims}


class Runs:
    """The runs of one question. start: of the run in question. folder: where their records lie, each below its name.
    count: of accelerators. left: those that have left records of steps. lines: whether runs may be made to say where a
    fault is. Raises SettingError for a strategy that cannot be."""

    def __init__(self, question: Question, nproc: int, folder: str, count: Callable[[], int]) -> None:
        self.question, self.nproc, self._folder, self._count = question, nproc, folder, count
        self.start = Start(None, nproc, question.precision)
        self.left: set[str] = set()
        self.lines = True
        if question.strategy is not None:
            asked = parse_strategy(question.strategy)
            strategies.check(StrategySpec(asked.name), None)  # the name; its options are looked at with the plan
            spec, processes, _ = laid_out(asked, nproc, self.devices(nproc))
            self.start = Start(spec, processes, question.precision)

    def devices(self, count: int) -> list[str]:
        """For replicas in one process."""
        return devices(str(self.question.script.settings.get("device") or ""), count, self._count)

    def turns(self, shards: int) -> StrategySpec:
        """One process that computes so many shards, one after the other."""
        return parse_strategy(f"single:shards={shards}") if shards > 1 else StrategySpec("single")

    def folder(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def run(self, name: str, strategy: StrategySpec | None = None, **how: Any) -> str | None:
        """One run to its end. None, or why it failed. strategy: of one process; None: the run in question's own. how:
        plain, whole, backwards, nudged, only, update, turned, told, lines, steps (trial/order.py)."""
        os.makedirs(self.folder(name))
        start = self.start if strategy is None else Start(strategy, 1, self.question.precision)
        place = {"directory": self.folder(name), "records": self.folder("A"), "leads": name == "A"}
        place |= {"alone": strategy is not None}
        length = {"steps": self.question.steps, "warmup": 0, "began": 0.0}
        return self.launched(name, start, {**place, **length, **how})

    def launched(self, name: str, start: Start, order: Mapping[str, Any]) -> str | None:
        raise NotImplementedError
