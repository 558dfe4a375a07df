"""Questions of `paceline verify` whose runs are made in processes that are there (tests/ranks.py), many in one call."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

from paceline.config import StrategySpec, parse_strategy
from paceline.trials.spec import TrialSpec
from paceline.trials.start import Script, Start
from paceline.verify.answer import Answer
from paceline.verify.decision import decide
from paceline.verify.runs import Runs, VerifyOptions

PLANTED = Path(__file__).with_name("planted.py")
Case = tuple[str, str]  # fault and twin


class Prepared(Runs):
    """Runs that are made when they are asked for, or were made beforehand. made: why these failed, or None, by name."""

    def __init__(
        self,
        folder: Path,
        case: Case,
        processes: int,
        strategy: str | None,
        precision: str,
        steps: int,
        path: Path = PLANTED,
    ):
        script = Script(str(path), case, False, {"device": "cpu"})
        super().__init__(VerifyOptions(script, processes, strategy, precision, steps), processes, str(folder), int)
        self.made: dict[str, str | None] = {}
        self.may_trace = False  # two runs more for each fault
        self.planned: list[tuple[int, dict[str, Any]]] | None = None

    def run(self, name: str, strategy: StrategySpec | None = None, **how: bool) -> str | None:
        return self.made[name] if name in self.made else super().run(name, strategy, **how)

    def plan(self, name: str, strategy: StrategySpec | None = None, **how: bool) -> list[tuple[int, dict[str, Any]]]:
        """What `run` would run, in how many processes."""
        self.planned = planned = []
        self.run(name, strategy, **how)
        self.planned = None
        return planned

    def launch_run(self, name: str, start: Start, spec: TrialSpec) -> str | None:
        given = {"strategy": start.strategy and str(start.strategy), "precision": start.precision}
        settings = self.options.script.settings | {key: value for key, value in given.items() if value is not None}
        script, called = self.options.script, self.folder(name)
        work = {
            "name": called,
            "script": script.path,
            "args": script.args,
            "settings": settings,
            "spec": spec.to_json(),
        }
        if self.planned is not None:
            self.planned.append((start.processes, work))
            return None
        return together([(start.processes, work)]).get(called)


def answer_of(folder: Path, script: str, steps: int = 3, *, traced: bool = False) -> Answer:
    """What is answered of the text of a script on two processes. traced: also its line."""
    path = folder / "train.py"
    path.write_text(script)
    runs = Prepared(folder, (), 2, None, "fp32", steps, path)
    runs.may_trace = traced
    return decide(runs)


def together(work: Sequence[tuple[int, dict[str, Any]]]) -> dict[str, str]:
    """Runs of as many processes each, one after the other. Why they failed, by folder."""
    try:
        found = run_ranks(work[0][0], "tests.verify.job:run", json.dumps([one for _, one in work]), deadline=240)
    except AssertionError as error:  # of a run alone, whose ranks went apart
        return {one["name"]: str(error) for _, one in work}
    return {name: why for rank in found for name, why in rank.items()}


def answers(folder: Path, cases: Sequence[Case], processes: int, precision: str, steps: int = 4) -> dict[Case, Answer]:
    return {case: decide(runs) for case, runs in begun(folder, cases, processes, precision, steps).items()}


def begun(folder: Path, cases: Sequence[Case], processes: int, precision: str, steps: int = 4) -> dict[Case, Prepared]:
    """The runs that every question needs are made for all of them together; the others when they are asked for."""
    asked: dict[Case, Prepared] = {}
    for number, case in enumerate(cases):
        (folder / str(number)).mkdir()
        asked[case] = Prepared(folder / str(number), case, processes, None, precision, steps)
    alike = [
        runs for (fault, _), runs in asked.items() if fault not in ("control-by-rank/later", "control-by-rank/skip")
    ]  # its ranks end in an error
    for kind in ("A",), ("C", "C2", "B"):
        work = [one for runs in alike for name in kind for one in runs.plan(name, **_as_decided(name, runs))]
        failed = together(work) if work else {}
        for runs in alike:
            runs.made |= {name: failed.get(runs.folder(name)) for name in kind}
    return asked


class Left(Prepared):
    """A question that is asked again, of the records that another one has left, but for some runs that now fail."""

    def __init__(self, other: Prepared, absent: Collection[str]) -> None:
        case, spec = other.options.script.args, other.options.strategy
        steps, precision = other.options.steps, str(other.options.precision)
        super().__init__(Path(other._folder), (case[0], case[1]), other.nproc, spec, precision, steps)
        self._absent = absent

    def run(self, name: str, strategy: StrategySpec | None = None, **how: Any) -> str | None:
        there = Path(self.folder(name), "rank-0.json").exists() and name not in self._absent
        return None if there else "it is not made"


def _as_decided(name: str, runs: Prepared) -> dict[str, Any]:
    """As decision.py asks for it."""
    if name == "A":
        return {}
    if name == "B":
        of_all = runs.options.script.args[0] == "mean-of-means/batch-norm"
        of_all |= tuple(runs.options.script.args) == ("batch-norm-per-shard", "healthy")
        devices = ",".join(["cpu"] * runs.nproc)
        shards = 4 if runs.options.script.args[0].endswith("/reproducible") else runs.nproc
        return {"strategy": parse_strategy(f"data_parallel:devices={devices}" if of_all else f"single:shards={shards}")}
    twice = {"reversed_batches": True, "perturbed": True} if name == "C2" else {}
    return {"strategy": StrategySpec("single"), "dropout_off": True, "whole_batches": True, **twice}
