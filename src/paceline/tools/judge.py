"""The verdict of `paceline verify`: which runs are made, and what follows from how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from paceline.config import StrategySpec, parse_strategy
from paceline.tools.causes import find
from paceline.tools.evidence import Cause, Evidence
from paceline.tools.ranks import of_failed_ranks, of_the_ranks
from paceline.tools.runs import DIFFERENT, SAME, UNKNOWN, Answer, Runs
from paceline.tools.sides import Difference, Side, Tolerances, before, computed, differences, norm

_DATA = {"examples", "data"}
_COMPUTED = {"loss", "gradient"}
_ERRORS = {  # with which a run refuses a fault by itself
    "UnusedParameterError": "unused-parameters",
    "NonFiniteError": "not-finite",
    "that the prepared models did not have": "registered-late",
    "weights differ between ranks before the first step": "initialisation-by-rank",
}


def judge(runs: Runs) -> Answer:
    """Makes the runs that are needed, in turn."""
    failed = runs.run("A")
    if failed is not None:
        return _of_a_failure(runs, failed)
    ours = _side(runs, "A", runs.start.processes)
    if ours is not None and ours.ranks[0]["dealt"]:
        return Answer(
            UNKNOWN,
            f"could not tell: {ours.ranks[0]['strategy']} hands out parts of global batches as processes come free, so "
            "that there are no steps to compare. It changes the mathematics on purpose; `paceline compare` shows its "
            "losses beside those of one process.",
            cause="by-design",
        )
    if ours is None or not ours.steps:
        return Answer(
            UNKNOWN,
            "could not tell: the script made no step that could be seen. Does it call paceline.start, iterate over a "
            "loader of the run, and call run.step?",
        )
    if ours.ranks[0]["local"]:
        return _of_replicas_apart(runs, ours)
    found = of_the_ranks(ours)
    if found is not None:
        step, quantity, cause = found
        return _different([Difference(step, quantity, cause.name, float("nan"), 0.0)], cause, ours.steps)
    return _Case(runs, ours).answer()


def _of_a_failure(runs: Runs, why: str) -> Answer:
    sides = [side for rank in range(runs.start.processes) if (side := _rank(runs, rank)) is not None]
    cause = of_failed_ranks([record for side in sides for record in side.ranks])
    if cause is not None:
        step = sides[0].steps
        answer = _different([Difference(step, "gradient", cause.name, float("nan"), 0.0)], cause, step)
        answer.notes.append(f"the run ended with: {why}")
        return answer
    key = next((key for words, key in _ERRORS.items() if words in why), None)
    return Answer(UNKNOWN, f"could not tell: the run in question failed: {why}", cause=key)


def _of_replicas_apart(runs: Runs, ours: Side) -> Answer:
    """Their steps cannot be compared one by one: where both runs are after the last one, beginning alike, is."""
    whole, why = _one(runs, "C", _SINGLE, plain=True, whole=True)
    name = ours.ranks[0]["strategy"]
    text = (
        f"different by design: {name} changes the mathematics on purpose: its replicas train apart between exchanges."
    )
    answer = Answer(DIFFERENT, text, cause="by-design", steps=ours.steps)
    answer.remedy = "Take ddp or another strategy that is exact, if the model has to be that of one process."
    if whole is None:
        answer.notes.append(f"how far it is from one process is not known: {why}")
        return answer
    start, mine, theirs = ours.start(0), ours.tensors("end"), whole.tensors("end")
    common = [key for key in ours.parameters if key in start and key in mine and key in theirs]
    if common:
        apart = sum(float((mine[k].double() - theirs[k].double()).square().sum()) for k in common) ** 0.5
        moved = sum(float((theirs[k].double() - start[k].double()).square().sum()) for k in common) ** 0.5
        answer.quantity, answer.difference = "weights", apart / moved if moved else float("nan")
        answer.text += (
            f" After {ours.steps} steps from the same weights it is {100 * apart / max(moved, 1e-300):.3g}% of the way "
            "that one process has gone beside it (2-norm of all weights together)."
        )
    return answer


def _rank(runs: Runs, rank: int) -> Side | None:
    try:
        return Side(runs.folder("A"), 1, rank)
    except FileNotFoundError:
        return None


_SINGLE = StrategySpec("single")


class _Case:
    """A run in question that can be compared step by step, and the runs beside it."""

    def __init__(self, runs: Runs, ours: Side) -> None:
        self.runs, self.ours = runs, ours
        record = ours.ranks[0]
        self.n: int = record["shards"]
        self.whole, self.why_not_whole = _one(runs, "C", _SINGLE, plain=True, whole=True)
        self.reversed: Side | None = None
        self.notes: list[str] = []
        self.kinks = 0  # steps in which rounding at a kink shows
        self.order_counts = False  # whether a batch's loss depends on the order of its examples
        self.tolerances = self._tolerances()
        turns = parse_strategy(f"single:shards={self.n}") if self.n > 1 else _SINGLE
        if record["normalised"] and record["batch_norm"] == "global" and self.n > 1:  # of all shards at once
            turns = parse_strategy(f"data_parallel:devices={','.join(runs.devices(self.n))}")
        self.in_turns = turns
        if ours.gathers:
            made: tuple[Side | None, str | None] = None, "the loss gathers examples of all of them (run.gather)"
        else:
            made = _one(runs, "B", turns)
        self.shards, self.why_not_shards = made
        self.plain: Side | None = ours
        if ours.drew:
            self.plain = _side(runs, "A0", runs.start.processes) if runs.run("A0", plain=True) is None else None

    def _tolerances(self) -> Tolerances:
        if self.whole is not None:
            how = {"plain": True, "whole": True, "nudged": True}
            self.reversed, _ = _one(self.runs, "C2", _SINGLE, backwards=True, **how)
        return self._tolerances_from(self.reversed)

    def _tolerances_from(self, other: Side | None) -> Tolerances:
        record = self.ours.ranks[0]
        return Tolerances(self.whole, other, record["precision"], record["tf32"])

    def answer(self) -> Answer:
        steady = self._look_at_the_tolerances()
        cut, spread = self._cut(), self._spread()
        answer = self._verdict(cut, spread) if steady or {d.quantity for d in cut} & _DATA else self._unsteady()
        answer.steps = self.ours.steps
        answer.notes += self.notes
        answer.indeterminate = sorted(self.tolerances.indeterminate)
        if answer.indeterminate:
            answer.notes.append(
                "indeterminate, since their gradients are rounding and little else (judged by absolute size): "
                + ", ".join(answer.indeterminate)
            )
        if self.kinks:
            answer.notes.append(
                f"in {self.kinks} of the steps some gradients differ in the second half of their digits, and nothing "
                "else does: rounding takes a number over a kink (of a ReLU, say)"
            )
        if self.order_counts:
            answer.notes.append(
                "a batch's loss depends on the order of its examples, which was left as it is for the tolerances"
            )
        if self.shards is None:
            why = (self.why_not_shards or "").splitlines()[0]
            answer.notes.append(f"B, the same shards in one process, could not be run: {why}")
        if self.whole is None:
            answer.notes.append(f"C, whole batches in one process, could not be run: {self.why_not_whole}")
        reached = {name for k in range(self.ours.steps) for name in self.ours.gradients(k, 0)}
        unused = [name for name in self.ours.parameters if name not in reached]
        if unused and self.ours.updates(0) == 1:
            answer.notes.append(f"no loss reaches these parameters: {', '.join(unused[:5])}")
        return answer

    def _look_at_the_tolerances(self) -> bool:
        """Whether one process makes the same of the same batch twice. Where C2 differs by more than rounding usually
        does, either the order of a batch's examples counts, which is then left as it is for the tolerances; or rounding
        does as much in this model, which so is only known so far."""
        whole = self.whole
        if self.tolerances.rounding_only or whole is None:
            return True
        again, _ = _one(self.runs, "C4", _SINGLE, plain=True, whole=True)
        exact = self._tolerances_from(None)
        if again is None or self._first(lambda k: computed(again, whole, exact, k), again, whole):
            return False
        nudged, _ = _one(self.runs, "C3", _SINGLE, plain=True, whole=True, nudged=True)
        in_order = self._tolerances_from(nudged)
        self.order_counts = nudged is not None and in_order.rounding_only
        if self.order_counts:
            self.tolerances = in_order
        else:
            self.tolerances.enlarged = True
            self.notes.append(
                "this model enlarges rounding: a last bit of its weights moves most gradients by more than half of "
                "their digits, and no finer fault can be seen"
            )
        return True

    def _cut(self) -> list[Difference]:
        """A against C: has cutting the batch, or anything else, changed something?"""
        plain, whole = self.plain, self.whole
        if plain is None or whole is None:
            return []
        return self._first(lambda k: differences(plain, whole, self.ours, self.tolerances, k), plain, whole)

    def _spread(self) -> list[Difference]:
        """A against B: has distributing it?"""
        shards = self.shards
        if shards is None:
            return []
        turns = shards.ranks[0]["turns"]  # in which all shards have passed when the first update is made
        return self._first(
            lambda k: computed(self.ours, shards, self.tolerances, k, first=turns > 0 and self.ours.updates(k) > 1),
            self.ours,
            shards,
        )

    def _first(self, of: Callable[[int], Iterator[Difference]], *sides: Side) -> list[Difference]:
        """The differences in the first step that has any, but for kinks (sides.py)."""
        steps = range(min(side.steps for side in sides))
        every, kinks = but_kinks([list(of(step)) for step in steps], self.tolerances)
        self.kinks = max(self.kinks, kinks)
        return next((found for found in every if found), [])

    def _verdict(self, cut: Sequence[Difference], spread: Sequence[Difference]) -> Answer:
        whole, shards, ours = self.whole, self.shards, self.ours
        if ours.ranks[0]["lossy"] and cut and cut[0].quantity in _COMPUTED:
            text = f"different by design: {ours.ranks[0]['strategy']} sends numbers with errors. {_words(cut[0])}"
            return _answer(DIFFERENT, text, cut, "by-design")
        if cut and whole is not None and not self._repeatable_start(whole):
            cut = [d for d in cut if d.quantity != "initial weights"]
        if whole is not None and self.plain is not None and not cut:
            if not ours.drew or (shards is not None and not spread):
                return self._same(whole, spread)
            if shards is None or self._astray():
                text = "could not tell: the same with dropout off; with it on there is nothing to compare with."
                return Answer(UNKNOWN, text)
        if not cut and not spread:
            if shards is None:
                return Answer(UNKNOWN, "could not tell: there is nothing to compare with.")
            text = "could not tell whether cutting the batch changes the model: one process that computes the same "
            return Answer(UNKNOWN, text + "shards is the same, but there is no run of whole batches to compare with.")
        quantities = {d.quantity for d in (*cut, *spread)}
        noise = any(side is not None and side.drew for side in (self.plain, whole)) and quantities <= _COMPUTED | _DATA
        if noise and not spread and not quantities & _DATA:
            return Answer(
                UNKNOWN,
                "could not tell whether cutting the batch changes the model: the script draws random numbers that "
                "cannot be turned off. Distribution changes nothing: one process that computes the same shards is the "
                "same.",
            )
        if {d.quantity for d in spread} & _COMPUTED and not {d.quantity for d in spread} & _DATA and self._shaky():
            return self._unsteady()
        cause = find(self._evidence(cut, spread))
        return _different(cut or spread, cause, ours.steps)

    def _evidence(self, cut: Sequence[Difference], spread: Sequence[Difference]) -> Evidence:
        parts = self.shards
        if self.ours.drew and cut and not spread and self.shards is not None:
            parts, _ = _one(self.runs, "B0", self.in_turns, plain=True)
        assert self.plain is not None or not cut
        sides = (self.shards, self.whole, parts, self.reversed)
        return Evidence(self.ours, self.plain or self.ours, *sides, cut, spread, self.n)

    def _astray(self) -> bool:
        """Whether one process that computes the shards in turn differs from the run in question also with dropout off,
        where that is the same as one of whole batches: of a script that does not go by the updates, say."""
        plain, other = self.plain, _one(self.runs, "B0", self.in_turns, plain=True)[0]
        if plain is None or other is None:
            return True
        return bool(self._first(lambda k: computed(plain, other, self.tolerances, k), plain, other))

    def _repeatable_start(self, whole: Side) -> bool:
        other = self.shards
        return other is None or not [d for d in before(other, whole, 0) if d.quantity == "initial weights"]

    def _shaky(self) -> bool:
        """Whether one process that computes the shards differs from itself."""
        again, _ = _one(self.runs, "B2", self.in_turns)
        shards = self.shards
        if again is None or shards is None:
            return False
        return bool(self._first(lambda k: computed(again, shards, self.tolerances, k), again, shards))

    def _unsteady(self) -> Answer:
        return Answer(
            UNKNOWN,
            "could not tell: one process, run twice on the same batches, differs from itself by more than rounding: an "
            "operator is not deterministic, or draws from a generator of its own that is not seeded. "
            "paceline.start(deterministic=True) names operators that are not.",
            cause="not-deterministic",
        )

    def _same(self, whole: Side, spread: Sequence[Difference]) -> Answer:
        assert self.plain is not None
        steps = min(self.plain.steps, whole.steps)
        worst, at, share = (0.0, 0.0, 1.0), "", []
        for step in range(steps):
            first, second = self.plain.gradients(step, 0), whole.gradients(step, 0)
            for name in first.keys() & second.keys():
                apart, allowed = norm(first[name] - second[name]), self.tolerances.gradient(name, second)
                if name not in self.tolerances.indeterminate and norm(second[name]):
                    share.append(allowed / norm(second[name]))
                if allowed and apart / allowed > worst[0] / worst[2]:
                    worst, at = (apart, norm(second[name]), allowed), f"in the gradient of {name}, step {step + 1}"
        text = f"the same, within rounding: {steps} steps"
        if at:
            text += f"; the largest difference is {worst[0]:.2g} of {worst[1]:.2g} (allowed: {worst[2]:.2g}), {at}."
        else:
            text += ", to the bit."
        answer = Answer(SAME, text, difference=worst[0], tolerance=worst[2])
        if share:
            typical = sorted(share)[len(share) // 2]
            answer.notes.append(f"a gradient that was wrong by {typical:.1g} of its norm would have shown")
        if spread:
            words = _words(spread[0])
            answer.notes.append(f"one process that computes the shards in turn differs, which is about itself: {words}")
        return answer


def but_kinks(every: list[list[Difference]], tolerances: Tolerances) -> tuple[list[list[Difference]], int]:
    """(the steps' differences without those steps in which rounding at a kink may have made them; how many these are).
    Where they are half of all steps or more, it was not that."""
    kinks = [bool(found) and tolerances.of_kinks(found) for found in every]
    if 2 * sum(kinks) >= len(every):
        return every, 0
    return [found for found, kink in zip(every, kinks, strict=True) if not kink], sum(kinks)


def _one(runs: Runs, name: str, strategy: StrategySpec, **how: bool) -> tuple[Side | None, str | None]:
    """A run of one process; or why there is none."""
    failed = runs.run(name, strategy, **how)
    side = _side(runs, name, 1) if failed is None else None
    if side is not None and side.steps:
        return side, None
    return None, failed or "it made no step"


def _side(runs: Runs, name: str, processes: int) -> Side | None:
    try:
        return Side(runs.folder(name), processes)
    except FileNotFoundError:
        return None


def _words(d: Difference) -> str:
    what = f"the {d.quantity}" + (f" of {d.name}" if d.name else "")
    if d.difference != d.difference:
        return f"First in step {d.step + 1}: {what}."
    if d.quantity in _DATA:
        return f"First in step {d.step + 1}: {what}; {d.difference:.0f} are in one run and not in the other."
    return f"First in step {d.step + 1}: {what}, by {d.difference:.3g} (allowed: {d.tolerance:.2g})."


def _answer(code: int, text: str, found: Sequence[Difference], cause: str) -> Answer:
    first = found[0]
    return Answer(
        code,
        text,
        step=first.step,
        quantity=first.quantity,
        parameter=first.name,
        difference=first.difference,
        tolerance=first.tolerance,
        cause=cause,
        differences=[asdict(d) for d in found[:50]],
    )


def _different(found: Sequence[Difference], cause: Cause | None, steps: int) -> Answer:
    lines = [f"different. {_words(found[0])}"]
    if cause is not None:
        lines += [f"Cause: {cause.sentence}.", f"Remedy: {cause.remedy}"]
    else:
        lines.append("Cause: none of those that are known leaves such records.")
    answer = _answer(DIFFERENT, "\n".join(lines), found, cause.key if cause is not None else "unknown")
    answer.remedy, answer.steps = cause.remedy if cause is not None else None, steps
    return answer
