"""The verdict of `paceline verify`: which runs are made, and what follows from how they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from paceline.config import parse_strategy
from paceline.tools.answers import (
    DATA,
    SINGLE,
    answered,
    different,
    of_a_failure,
    of_replicas_apart,
    one,
    side_of,
    words,
)  # fmt: skip
from paceline.tools.causes import find
from paceline.tools.claims import Claim, missing, shown
from paceline.tools.evidence import Evidence
from paceline.tools.locator import Locator
from paceline.tools.ranks import of_the_ranks
from paceline.tools.runs import DIFFERENT, SAME, UNKNOWN, Answer, Runs
from paceline.tools.sides import Difference, Side, Tolerances, before, computed, differences, norm

_COMPUTED = {"loss", "gradient"}
_NOISE = {*_COMPUTED, "buffers"}  # where numbers that are drawn show


def judge(runs: Runs) -> Answer:
    """Makes the runs that are needed, in turn. Every sentence of the answer is bound to those that show it."""
    answer = _judged(runs)
    answer.check(runs.left)
    return answer


def _judged(runs: Runs) -> Answer:
    failed = runs.run("A")
    if failed is not None:
        return of_a_failure(runs, failed)
    ours = side_of(runs, "A", runs.start.processes)
    if ours is not None and ours.ranks[0]["dealt"]:
        return Answer(
            UNKNOWN,
            [
                Claim(
                    f"could not tell: {ours.ranks[0]['strategy']} hands out parts of global batches as processes come "
                    "free, so that there are no steps to compare. It changes the mathematics on purpose; `paceline "
                    "compare` shows its losses beside those of one process."
                )
            ],
            cause="by-design",
        )
    if ours is not None and ours.ranks[0].get("ahead"):
        return Answer(
            UNKNOWN,
            [
                Claim(
                    "could not tell: the script fetches its next batch before it is done with the last one, so that "
                    "its steps lie in one another and cannot be made anew one by one. Fetch each batch at the top of "
                    "the loop (`for batch in loader:`) to have it verified: that changes nothing in what is trained."
                )
            ],
        )
    if ours is None or not ours.steps:
        return Answer(
            UNKNOWN,
            [
                missing(
                    "could not tell: the script made no step that could be seen. Does it call paceline.start, iterate "
                    "over a loader of the run, and call run.step?",
                    "A",
                )
            ],
        )
    if ours.ranks[0]["local"]:
        return of_replicas_apart(runs, ours)
    found = of_the_ranks(ours)
    if found is not None:
        step, quantity, cause = found
        difference = Difference(step, quantity, cause.name, float("nan"), 0.0)
        answer = different([difference], replace(cause, sides=(ours,)), ours.steps, [ours])
        return Locator(runs, ours, None, plain=False).add(answer, [difference])
    return _Case(runs, ours).answer()


class _Case:
    """A run in question that can be compared step by step, and the runs beside it."""

    def __init__(self, runs: Runs, ours: Side) -> None:
        self.runs, self.ours = runs, ours
        record = ours.ranks[0]
        self.n: int = record["shards"]
        self.whole, self.why_not_whole = one(runs, "C", SINGLE, plain=True, whole=True)
        self.reversed: Side | None = None
        self.notes: list[Claim] = []
        self.kinks = 0  # steps in which rounding at a kink shows
        self.order_counts = False  # whether a batch's loss depends on the order of its examples
        self.tolerances = self._tolerances()
        turns = runs.turns(self.n)
        at_once = parse_strategy(f"data_parallel:devices={','.join(runs.devices(self.n))}") if self.n > 1 else turns
        if record["normalised"] and record["batch_norm"] == "global":
            turns = at_once
        self.in_turns = turns
        self.shards: Side | None = None
        self.why_not_shards: str | None = None
        if ours.updates(0) > 1 and turns != at_once:  # in turns, the second is not made from what they make together
            self.shards, _ = one(runs, "B1", at_once)
            self.in_turns = turns if self.shards is None else at_once
        if self.shards is None:
            self.shards, self.why_not_shards = one(runs, "B", turns)
        self.told: Side | None = None
        self.why_not_told: str | None = None
        self.locator: Locator | None = None
        self.plain: Side | None = ours
        if ours.drew:
            self.plain = side_of(runs, "A0", runs.start.processes) if runs.run("A0", plain=True) is None else None

    def _tolerances(self) -> Tolerances:
        if self.whole is not None:
            how = {"plain": True, "whole": True, "nudged": True}
            self.reversed, _ = one(self.runs, "C2", SINGLE, backwards=True, **how)
        return self._tolerances_from(self.reversed)

    def _tolerances_from(self, other: Side | None) -> Tolerances:
        record = self.ours.ranks[0]
        return Tolerances(self.whole, other, record["precision"], record["tf32"])

    def answer(self) -> Answer:
        steady = self._look_at_the_tolerances()
        if self.whole is not None and (other := self._other_start(self.whole)) is not None:
            return self._noted(self._not_of_the_seed(self.whole, other))
        cut, spread = self._cut(), self._spread()
        if spread and self.ours.gathers and not {d.quantity for d in spread} & DATA:
            self.shards, spread = None, []
            self.why_not_shards = (
                "the loss depends on numbers of all processes (run.gather, run.mean), which are there together only "
                "where each computes its shard"
            )
        if self.shards is None:
            spread = self._told_apart(alone=bool(cut) and not self._of_noise(cut))
        if steady or {d.quantity for d in cut} & DATA:
            answer = self._verdict(cut, spread)
        else:
            assert self.whole is not None  # it was not the same twice
            answer = self._unsteady(self.whole, "C4")
        return self._noted(answer)

    def _noted(self, answer: Answer) -> Answer:
        answer.steps = self.ours.steps
        answer.notes += self.notes
        if self.ours.ranks[0]["full"]:
            said = (
                f"only {answer.steps} steps were compared: the disk for temporary files has no room for the states of "
                "more. Point TMPDIR to a larger disk"
            )
            answer.notes.append(shown(said, self.ours))
        compared = [side for side in (self.ours, self.whole, self.reversed) if side is not None]
        answer.indeterminate = sorted(self.tolerances.indeterminate)
        if answer.indeterminate:
            answer.notes.append(shown(self._of_the_indeterminate(), *compared))
        if self.kinks:
            kinks = (
                f"in {self.kinks} of the steps some gradients differ in the second half of their digits, and nothing "
                "else does: rounding takes a number over a kink (of a ReLU, say)"
            )
            answer.notes.append(shown(kinks, *compared))
        if self.order_counts:
            order = "a batch's loss depends on the order of its examples, which was left as it is for the tolerances"
            answer.notes.append(shown(order, *compared[1:]))
        if self.shards is None:
            why = (self.why_not_shards or "").splitlines()[0]
            made = [name for name in ("B", "B1") if name in self.runs.left]
            said = f"B, the same shards in one process, could not be {'compared' if made else 'run'}: {why}"
            answer.notes.append(Claim(said, tuple(made), () if made else ("B",)))
        if self.whole is None:
            answer.notes.append(
                missing(f"C, whole batches in one process, could not be run: {self.why_not_whole}", "C")
            )
        reached = {name for k in range(self.ours.steps) for name in self.ours.gradients(k, 0)}
        unused = [name for name in self.ours.parameters if name not in reached]
        if unused and self.ours.updates(0) == 1:
            answer.notes.append(shown(f"no loss reaches these parameters: {', '.join(unused[:5])}", self.ours))
        return answer

    def _of_the_indeterminate(self) -> str:
        names = ", ".join(sorted(self.tolerances.indeterminate))
        said = f"indeterminate, since their gradients are rounding and little else (judged by absolute size): {names}"
        moves = ". An optimizer that scales gradients, such as Adam, makes whole steps of these, which are not compared"
        norms = "; where a batch norm follows, evaluation with running statistics sees them (bias=False spares it)"
        return said + moves + (norms if self.ours.ranks[0]["norms"] else "")

    def _look_at_the_tolerances(self) -> bool:
        """Whether one process makes the same of the same batch twice. Where C2 differs by more than rounding usually
        does, either the order of a batch's examples counts, which is then left as it is for the tolerances; or rounding
        does as much in this model, which so is only known so far."""
        whole = self.whole
        if self.tolerances.rounding_only or whole is None:
            return True
        again, _ = one(self.runs, "C4", SINGLE, plain=True, whole=True)
        exact = self._tolerances_from(None)
        if again is None or self._first(lambda k: computed(again, whole, exact, k), again, whole):
            return False
        nudged, _ = one(self.runs, "C3", SINGLE, plain=True, whole=True, nudged=True)
        in_order = self._tolerances_from(nudged)
        self.order_counts = nudged is not None and in_order.rounding_only
        if self.order_counts:
            self.tolerances = in_order
        else:
            self.tolerances.enlarged = True
            enlarged = (
                "this model enlarges rounding: a last bit of its weights moves most gradients by more than half of "
                "their digits, and no finer fault can be seen"
            )
            self.notes.append(shown(enlarged, *(side for side in (whole, self.reversed, again) if side is not None)))
        return True

    def _cut(self) -> list[Difference]:
        """A against C: has cutting the batch, or anything else, changed something?"""
        plain, whole = self.plain, self.whole
        if plain is None or whole is None:
            return []

        def of(step: int) -> Iterator[Difference]:
            return differences(plain, whole, self.ours, self.tolerances, step)

        found = self._first(of, plain, whole)
        if self.noisy and {d.quantity for d in found} <= _NOISE:  # which would hide what comes later
            found = self._first(lambda k: (d for d in of(k) if d.quantity not in _NOISE), plain, whole) or found
        return [d for d in found if not (self.noisy and d.quantity in _NOISE)] or found

    @property
    def noisy(self) -> bool:
        """Whether the script draws numbers that are others where the batch is cut otherwise, with dropout off."""
        plain, whole = self.plain, self.whole
        if plain is None or whole is None:
            return False
        steps = range(min(plain.steps, whole.steps))
        return plain.drew or whole.drew or any(plain.others(k) != whole.others(k) for k in steps)

    def _of_noise(self, cut: Sequence[Difference]) -> bool:
        """Whether what differs from the whole batch may be what the script draws."""
        return self.noisy and {d.quantity for d in cut} <= _NOISE

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

    def _told_apart(self, alone: bool) -> list[Difference]:
        """Where no process can compute the shards: the run in question, in which each process is told that it is the
        only one. Whether it differs says whether asking for the rank, or for the number of processes, changes anything.
        alone: a difference is known already, and it is left to the locator."""
        if alone or self.runs.start.processes < 2:
            return []
        self.why_not_told = self.runs.run("D", told=True)
        self.told = side_of(self.runs, "D", self.runs.start.processes) if self.why_not_told is None else None
        told = self.told
        if told is None or not told.steps:
            self.told = None
            return []
        return self._first(lambda k: differences(self.ours, told, self.ours, self.tolerances, k), self.ours, told)

    def _verdict(self, cut: Sequence[Difference], spread: Sequence[Difference]) -> Answer:
        whole, shards, ours, told = self.whole, self.shards, self.ours, self.told
        if ours.ranks[0]["lossy"] and cut and cut[0].quantity in _COMPUTED and whole is not None and self.plain:
            text = f"different by design: {ours.ranks[0]['strategy']} sends numbers with errors. {words(cut[0])}"
            return answered(DIFFERENT, [shown(text, self.plain, whole)], cut, "by-design")
        if whole is not None and self.plain is not None and not cut:
            if not ours.drew and not (spread and shards is None):
                return self._same(whole, spread)
            if ours.drew and (shards or told) is not None and not spread:
                return self._same(whole, spread)
            if (shards is None and told is None) or (shards is not None and self._astray()):
                return self._nothing_beside(self.plain, whole)
        if not cut and not spread:
            return self._not_cut()
        quantities = {d.quantity for d in (*cut, *spread)}
        if self.noisy and not spread and quantities <= _NOISE and self.plain is not None and whole is not None:
            return self._noise(self.plain, whole)
        shaky = {d.quantity for d in spread} & _COMPUTED and not {d.quantity for d in spread} & DATA
        if shards is not None and shaky and self._shaky():
            return self._unsteady(shards, "B2")
        noisy = bool(spread and cut) and self._of_noise(cut)
        evidence = replace(self._evidence([] if noisy else cut, spread), noisy=noisy)
        cut = evidence.cut
        answer = different(cut or spread, find(evidence), ours.steps, evidence.compared)
        return self.locator.add(answer, cut or spread) if self.locator is not None else answer

    def _nothing_beside(self, plain: Side, whole: Side) -> Answer:
        text = "could not tell: the same with dropout off; with it on there is nothing to compare with."
        return Answer(UNKNOWN, [shown(text, plain, whole)])

    def _not_cut(self) -> Answer:
        """Nothing differs, of what there is."""
        found, left = self.shards or self.told, self.runs.left
        if found is None:
            absent = [run for run in ("A0", "B", "C", "D") if run not in left]
            return Answer(UNKNOWN, [missing("could not tell: there is nothing to compare with.", *absent)])
        same = "one process that computes the same shards is the same,"
        if self.shards is None:
            same = "the run in question is the same where each process is told that it is the only one,"
        text = f"could not tell whether cutting the batch changes the model: {same} but there is no run of whole "
        text += "batches to compare with."
        if "C" not in left:
            return Answer(UNKNOWN, [Claim(text, (self.ours.name, found.name), ("C",))])
        text = text.removesuffix("there is no run of whole batches to compare with.")
        text += "it could not be run with dropout off, as one process was that computes whole batches."
        return Answer(UNKNOWN, [Claim(text, (self.ours.name, found.name, "C"), ("A0",))])

    def _noise(self, plain: Side, whole: Side) -> Answer:
        """What one process draws for the whole batch is not what several draw for its parts."""
        text = (
            "could not tell whether cutting the batch changes the model: the script draws random numbers that cannot "
            "be turned off."
        )
        claims = [shown(text, plain, whole)]
        if self.shards is not None:
            same = "Distribution changes nothing: one process that computes the same shards is the same."
            claims.append(shown(same, self.ours, self.shards))
        elif self.told is not None:
            same = (
                "Asking for the rank, or for the number of processes, changes nothing: the run in question is the same "
                "where each process is told that it is the only one."
            )
            claims.append(shown(same, self.ours, self.told))
        else:
            claims.append(
                Claim(
                    "Whether distributing it does was not seen either. Write the step as a closure, "
                    "run.forward_backward(loss_fn, model, batch): then one process can compute the same shards."
                )
            )
        return Answer(UNKNOWN, claims)

    def _evidence(self, cut: Sequence[Difference], spread: Sequence[Difference]) -> Evidence:
        assert self.plain is not None or not cut
        plain, whole, step = self.plain or self.ours, self.whole, (cut or spread)[0].step
        sides = (self.shards, whole, self.reversed)
        known = Evidence(self.ours, plain, *sides, cut, spread, self.n, told=self.told)
        if self.told is not None:
            known = replace(known, asked=spread)
        self.locator = Locator(self.runs, self.ours, whole if cut else None, plain=bool(cut) and plain is not self.ours)
        known = self.locator.asked(known, self.tolerances)
        if whole is None or not cut or cut[0].quantity not in _COMPUTED:
            return known
        update = self._first_update(plain, whole, step)
        gradients = whole.gradients(step, update)
        known = replace(known, update=update, noise=self.tolerances.noise(gradients, gradients))
        if spread and known.told is not None and not known.asked:  # it was told too late, or has kept something
            return self._with_turned(known, plain, step)
        if spread or known.asked:
            return known
        if update and self.in_turns == self.runs.turns(self.n):  # they end before the first update
            known = replace(known, shards=None)
        if self.shards is None or self.in_turns != self.runs.turns(self.n) or update:
            return self._part_by_part(known, plain, step)
        parts, why = one(self.runs, "B0", self.in_turns, plain=True) if self.ours.drew else (self.shards, None)
        if parts is None:
            self.notes.append(missing(f"the shards in one process, with dropout off, could not be run: {why}", "B0"))
        if parts is None or parts.steps <= step:
            return known
        counted, own = bool(parts.of(step)[0]["counted"]), (parts,)
        return replace(known, parts=parts.parts(step), examples=parts.parts_of(step), counted=counted, of_parts=own)

    def _first_update(self, plain: Side, whole: Side, step: int) -> int:
        for update in range(min(plain.updates(step), whole.updates(step))):
            ours, theirs = plain.gradients(step, update), whole.gradients(step, update)
            for name in ours.keys() & theirs.keys():
                apart = norm(ours[name] - theirs[name]) if ours[name].shape == theirs[name].shape else 0.0
                if not apart <= self.tolerances.gradient(name, theirs):
                    return update
        return 0

    def _part_by_part(self, known: Evidence, plain: Side, step: int) -> Evidence:
        """Where no process can compute the shards in turn: the run in question, with each shard's loss alone. And,
        where nobody else computes them, with other ranks computing them."""
        parts, processes, steps = [], self.runs.start.processes, step + 1
        sides: list[Side] = []
        for shard in range(self.n):
            failed = self.runs.run(f"P{shard}", plain=True, only=shard, update=known.update, steps=steps)
            side = side_of(self.runs, f"P{shard}", processes) if failed is None else None
            if side is None or side.steps <= step:
                return known
            parts.append(side.gradients(step, known.update))
            sides.append(side)
        sizes: dict[int, int] = dict.fromkeys(range(self.n), 0)
        for record in plain.of(step):
            for _, shard, _, indices in record["ids"]:
                sizes[shard] += len(indices)
        counted = any(record["counted"] for record in plain.of(step))
        examples = list(sizes.values())
        known = replace(known, parts=parts, examples=examples, counted=counted, of_parts=tuple(sides))
        return known if known.shards is not None else self._with_turned(known, plain, step)

    def _with_turned(self, known: Evidence, plain: Side, step: int) -> Evidence:
        """With the run in question, each rank computing the shard of another one. What a process has kept of its
        earlier examples goes with the shard, so that only what depends on the rank itself is another."""
        if self.runs.run("T", plain=True, turned=True, steps=step + 1) is not None:
            return known
        turned = side_of(self.runs, "T", self.runs.start.processes)
        if turned is None or turned.steps <= step:
            return known
        apart = list(computed(turned, plain, self.tolerances, step))
        return replace(known, turned=apart, of_turned=(turned,))

    def _astray(self) -> bool:
        """Whether one process that computes the shards in turn differs from the run in question also with dropout off,
        where that is the same as one of whole batches: of a script that does not go by the updates, say."""
        plain, other = self.plain, one(self.runs, "B0", self.in_turns, plain=True)[0]
        if plain is None or other is None:
            return True
        return bool(self._first(lambda k: computed(plain, other, self.tolerances, k), plain, other))

    def _other_start(self, whole: Side) -> Side | None:
        """Another run of one process that begins with other weights, or takes other examples, or none."""
        for other in (self.reversed, self.shards):
            if other is None or other.ranks[0]["rank"] != whole.ranks[0]["rank"]:
                continue
            if any(d.quantity == "initial weights" for d in before(other, whole, self.tolerances, 0)):
                return other
            if other is self.reversed and any(
                other.seen(k, "ids") != whole.seen(k, "ids") for k in range(min(other.steps, whole.steps))
            ):
                return other
        return None

    def _not_of_the_seed(self, whole: Side, other: Side) -> Answer:
        start = [d for d in before(other, whole, self.tolerances, 0) if d.quantity == "initial weights"]
        what = f"begins with other weights ({start[0].name})" if start else "takes other examples, or in another order"
        text = (
            f"could not tell: one process, run twice, {what}: the program is no function of its seed. It seeds from a "
            "clock, a process's number or the system, or it draws before paceline.start, or from a generator that is "
            "not seeded."
        )
        answer = Answer(UNKNOWN, [shown(text, whole, other)], cause="not-deterministic")
        answer.quantity, answer.parameter = ("initial weights", start[0].name) if start else ("examples", None)
        answer.step = 0
        return Locator(self.runs, self.ours, None, plain=True).of_chance(answer, 0)

    def _shaky(self) -> bool:
        """Whether one process that computes the shards differs from itself."""
        again, _ = one(self.runs, "B2", self.in_turns)
        shards = self.shards
        if again is None or shards is None:
            return False
        return bool(self._first(lambda k: computed(again, shards, self.tolerances, k), again, shards))

    def _unsteady(self, first: Side, again: str) -> Answer:
        """again: the run that is as `first`, where it could be made."""
        text = (
            "could not tell: one process, run twice on the same batches, differs from itself by more than rounding: an "
            "operator is not deterministic, or draws from a generator of its own that is not seeded. "
            "paceline.start(deterministic=True) names operators that are not."
        )
        if again not in self.runs.left:
            text = (
                "could not tell: one process differs by more than rounding where its batches come in reverse order, "
                "and could not be run on them once more."
            )
            claim = Claim(text, (first.name, *([self.reversed.name] if self.reversed is not None else [])), (again,))
            return Answer(UNKNOWN, [claim])
        answer = Answer(UNKNOWN, [Claim(text, (first.name, again))], cause="not-deterministic")
        return Locator(self.runs, self.ours, None, plain=True).of_chance(answer, 0)

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
        both = (self.plain, whole)
        aside = sorted(self.tolerances.indeterminate)
        text = f"the same, within rounding: {steps} steps" + (f" ({', '.join(aside[:3])} aside)" if aside else "")
        if at:
            text += f"; the largest difference is {worst[0]:.2g} of {worst[1]:.2g} (allowed: {worst[2]:.2g}), {at}."
        else:
            text += ", to the bit."
        answer = Answer(SAME, [shown(text, *both)], difference=worst[0], tolerance=worst[2])
        if share:
            typical = sorted(share)[len(share) // 2]
            wrong = f"a gradient that was wrong by {typical:.1g} of its norm would have shown"
            answer.notes.append(shown(wrong, *both, *([self.reversed] if self.reversed is not None else [])))
        if spread and self.shards is not None:
            what = words(spread[0])
            turns = f"one process that computes the shards in turn differs, which is about itself: {what}"
            answer.notes.append(shown(turns, self.ours, self.shards))
        if self.shards is None and self.told is not None:
            told = (
                "with each process told that it is the only one, which takes B's place, the run in question is the same"
            )
            answer.notes.append(shown(told, self.ours, self.told))
        return answer


def but_kinks(every: list[list[Difference]], tolerances: Tolerances) -> tuple[list[list[Difference]], int]:
    """(the steps' differences without those steps in which rounding at a kink may have made them; how many these are).
    Where they are half of all steps or more, it was not that."""
    kinks = [bool(found) and tolerances.of_kinks(found) for found in every]
    if 2 * sum(kinks) >= len(every):
        return every, 0
    return [found for found, kink in zip(every, kinks, strict=True) if not kink], sum(kinks)
