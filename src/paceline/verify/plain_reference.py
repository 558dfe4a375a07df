"""The runs of one process that `paceline verify` compares a script without Paceline with: C or S, and C2 to C4.

plain_decision.py describes these runs, and answers.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from paceline.verify.answer import Claim, claim_from
from paceline.verify.differences import differences_computed
from paceline.verify.plain_subject import SubjectRun, batches_ahead, batches_per_update, between_updates, listed
from paceline.verify.run_record import RunRecord
from paceline.verify.runs import SINGLE, SUBJECT, Runs
from paceline.verify.tolerances import Tolerances

_C2 = {"perturbed": True, "reversed_batches": True}


class PlainReference:
    """Makes the runs of one process, and finds out whether they can be compared with the subject run.

    Attributes:
        ours: the record of the subject run.
        subject: questions about it.
        how: fields of TrialSpec for the runs of one process.
        notes: facts that the answer must mention.
        skipped: an update that one process makes from other batches; None: there is none.
    """

    def __init__(self, runs: Runs, ours: RunRecord) -> None:
        self._runs, self._processes = runs, len(ours.ranks)
        self.ours, self.subject = ours, SubjectRun(ours)
        self.how: dict[str, Any] = {
            "processes": self._processes,
            "divided_model": self.subject.divide_model,
            "dispatched": self.subject.are_dispatched,
        }
        self.notes: list[Claim] = []
        self.skipped: int | None = None

    def whole(self) -> tuple[RunRecord | None, str]:
        """(C or S, ""), or (None, the reason why neither can be compared)."""
        found, why = self._run_whole("C")
        ahead = batches_ahead(self.ours)
        mine = theirs = batches_per_update(self.ours) / (self._processes if self.subject.are_dispatched else 1)
        if found is not None:
            theirs = batches_per_update(found, ahead)
        elif not self._ran_out("C"):
            return None, f"the script could not run in one process: {why}"
        if found is None or theirs == mine * self._processes:
            self.how["separate_batches"] = True
            found, why = self._run_whole("S")
            if found is None:
                return None, f"the script could not run in one process: {why}"
            theirs = batches_per_update(found, ahead) / self._processes
        self.skipped = self._first_skip(found)
        if mine != theirs and self.skipped is not None:
            return found, ""
        if mine != theirs:
            return None, (
                f"an update of your run takes {mine:g} batches of each rank, and one process takes {theirs:g} batches "
                "for an update. Set the number of accumulated batches to a fixed number, or divide it by the number of "
                "processes."
            )
        problem, shapes = found.ranks[0]["problem"], found.ranks[0]["other_shapes"]
        if shapes and not self.ours.in_parts:
            return self._whole_of_parts(found.name, shapes)
        if problem:
            return None, f"{problem}."
        if self.ours.in_parts and not self._joins_parts(found):
            return None, (
                f"each rank holds a part of {listed(self.ours.in_parts)}. The parts, joined, are not the parameters "
                "that one process builds, and no equal loss shows that they fit. So verify does not know how the parts "
                "make a model. "
                "Build the whole parameter with the same seed on all ranks, and take each rank's part of it."
            )
        step = self._with_other_examples(found)
        if step is not None:
            return None, (
                f"in update {step + 1} one process computes other examples than your ranks together: the ranks take "
                "their batches from different loaders at the same time."
            )
        if set(found.parameters) != set(self.ours.parameters):
            other = sorted(set(found.parameters) ^ set(self.ours.parameters))
            return None, f"one process trains other parameters than your run: {listed(other)}."
        return found, ""

    def _whole_of_parts(self, name: str, in_parts: list[str]) -> tuple[RunRecord | None, str]:
        """(C or S, "") for ranks that each hold a part of some parameters. Your run is made again, with all parts."""
        for run in (SUBJECT, name):
            self._runs.discard(run)
        failed = self._runs.run(SUBJECT, in_parts=in_parts)
        ours = self._runs.load(SUBJECT, self._processes) if failed is None else None
        if ours is None or not ours.steps:
            return None, f"your run could not be repeated: {failed or 'it made no step'}"
        self.ours, self.subject, self.how["in_parts"] = ours, SubjectRun(ours), in_parts
        self.how.pop("separate_batches", None)
        return self.whole()

    def _joins_parts(self, whole: RunRecord) -> bool:
        """Whether the ranks' parts, joined, are what one process builds, or give the same losses."""
        if whole.ranks[0]["parts_are_own"]:
            return True
        steps = range(min(self.ours.steps, whole.steps))
        return self.subject.share_batches and not any(self.losses_differ(whole, step) for step in steps)

    def losses_differ(self, whole: RunRecord, step: int) -> tuple[float, float] | None:
        """The first loss of a step that differs between rank 0 and one process, if all ranks compute whole batches."""
        pairs = zip(
            self.ours.step_records(step)[0]["loss_values"], whole.step_records(step)[0]["loss_values"], strict=False
        )
        return next(((a, b) for a, b in pairs if not abs(a - b) <= 1e-4 * max(abs(a), abs(b))), None)

    def _ran_out(self, name: str) -> bool:
        """Whether a run of one process used all recorded batches before its first update."""
        record = self._runs.load(name, 1)
        return record is not None and bool(record.ranks[0]["exhausted"])

    def _first_skip(self, whole: RunRecord) -> int | None:
        """The first update that your run makes from fewer or more batches than one process. None if their numbers
        differ in a regular way."""
        mine, theirs = between_updates(self.ours), between_updates(whole)
        # a script may fetch one batch ahead, so the first update follows more of them
        regular = len(set(mine[1:])) < 2 and len(set(theirs[1:])) < 2
        steps = range(min(len(mine), len(theirs)))
        first = None if regular else next((step for step in steps if mine[step] != theirs[step]), None)
        passes = self.ours.ranks[0]["passes"]
        ends = [end for end, place in zip(accumulate(place[2] for place in passes), passes, strict=True) if place[3]]
        before = sum(mine[:first])
        if first is None or any(before < end <= before + max(mine[first], theirs[first]) for end in ends):
            return None  # the last update of a pass may be made from fewer batches
        if not (any(mine[first:]) and any(theirs[first:])):
            return None  # several updates are made from a batch, and one of the runs takes no further one
        return first

    def _with_other_examples(self, whole: RunRecord) -> int | None:
        """The first step with different examples in A and C, or None."""
        if "separate_batches" in self.how or self.subject.are_dispatched:
            return None
        for step in range(min(self.ours.steps, whole.steps)):
            mine, theirs = (
                [
                    sorted((loader, key) for loader, keys in record["keys"] for key in keys)
                    for record in run.step_records(step)
                ]
                for run in (self.ours, whole)
            )
            if sorted(key for keys in mine for key in keys) != theirs[0] and any(keys != theirs[0] for keys in mine):
                return step
        return None

    def _run_whole(self, name: str) -> tuple[RunRecord | None, str | None]:
        """Make C or S, and C2 at the same time."""
        with self._runs.ahead("C2", SINGLE, **{**self.how, **_C2}):
            return self._runs.run_single_process(name, SINGLE, **self.how)

    def run(self, name: str, **how: Any) -> RunRecord | None:
        return self._runs.run_single_process(name, SINGLE, **{**self.how, **how})[0]

    def tolerances(self, whole: RunRecord) -> Tolerances | None:
        """The tolerances; None if one process differs from itself."""
        record = self.ours.ranks[0]

        def measured(other: RunRecord | None) -> Tolerances:
            return Tolerances(whole, other, record["precision"], record["tf32"])

        tolerances = measured(self.run("C2", **_C2))
        if tolerances.rounding_only:
            return tolerances
        again, exact = self.run("C4"), measured(None)
        if again is None or any(list(differences_computed(again, whole, exact, k)) for k in range(whole.steps)):
            return None
        in_order = measured(self.run("C3", perturbed=True))
        if in_order.rounding_only:
            return in_order
        tolerances.enlarged = True
        self.notes.append(
            claim_from(
                "this model amplifies rounding: the last bit of its weights moves most gradients by more than half of "
                "their digits, so smaller faults cannot be detected",
                whole,
            )
        )
        return tolerances
