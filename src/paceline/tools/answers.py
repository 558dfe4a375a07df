"""Answers of `paceline verify`: in words, and of runs that cannot be compared step by step."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.config import StrategySpec
from paceline.tools.causes import overflow
from paceline.tools.claims import Claim, missing, names, shown
from paceline.tools.evidence import Cause
from paceline.tools.ranks import of_failed_ranks
from paceline.tools.runs import DIFFERENT, UNKNOWN, Answer, Runs
from paceline.tools.sides import Difference, Side

DATA = {"examples", "data"}
SINGLE = StrategySpec("single")
_ERRORS = {  # with which a run refuses a fault by itself
    "UnusedParameterError": "unused-parameters",
    "NonFiniteError": "not-finite",
    "that the prepared models did not have": "registered-late",
    "weights differ between ranks before the first step": "initialisation-by-rank",
    "it picks a part for each rank": "examples-overlap-or-miss",
}


def of_a_failure(runs: Runs, why: str) -> Answer:
    sides = [side for rank in range(runs.start.processes) if (side := _rank(runs, rank)) is not None]
    cause = of_failed_ranks([record for side in sides for record in side.ranks])
    if cause is not None:
        step = sides[0].steps
        runs.left.add("A")
        answer = different([Difference(step, "gradient", cause.name, float("nan"), 0.0)], cause, step, sides[:1])
        answer.notes.append(shown(f"the run ended with: {why}", sides[0]))
        return answer
    if "NonFiniteError" in why and (overflown := _of_an_overflow(runs, why)) is not None:
        return overflown
    key = next((key for words, key in _ERRORS.items() if words in why), None)
    return Answer(UNKNOWN, [Claim(f"could not tell: the run in question failed: {why}")], cause=key)


def _of_an_overflow(runs: Runs, why: str) -> Answer | None:
    """Where one process makes the step in which the run in question ended, from the same state."""
    begun = len(glob.glob(os.path.join(glob.escape(runs.folder("A")), "state-*.safetensors")))
    whole, _ = one(runs, "C", SINGLE, plain=True, whole=True)
    if whole is None or not begun or whole.steps < begun or whole.not_finite(begun - 1):
        return None
    found = Difference(begun - 1, "gradient", None, float("nan"), 0.0)
    runs.left.add("A")
    answer = different([found], overflow("a loss, or a gradient,", whole), begun, [whole])
    answer.notes.append(Claim(f"the run ended with: {why}", ("A",)))
    return answer


def of_replicas_apart(runs: Runs, ours: Side) -> Answer:
    """Their steps cannot be compared one by one: where both runs are after the last one, beginning alike, is."""
    whole, why = one(runs, "C", SINGLE, plain=True, whole=True)
    name = ours.ranks[0]["strategy"]
    text = (
        f"different by design: {name} changes the mathematics on purpose: its replicas train apart between exchanges."
    )
    answer = Answer(DIFFERENT, [shown(text, ours)], cause="by-design", steps=ours.steps)
    answer.remedy = "Take ddp or another strategy that is exact, if the model has to be that of one process."
    if whole is None:
        answer.notes.append(missing(f"how far it is from one process is not known: {why}", "C"))
        return answer
    start, mine, theirs = ours.start(0), ours.tensors("end"), whole.tensors("end")
    common = [key for key in ours.parameters if key in start and key in mine and key in theirs]
    if common:
        apart = sum(float((mine[k].double() - theirs[k].double()).square().sum()) for k in common) ** 0.5
        moved = sum(float((theirs[k].double() - start[k].double()).square().sum()) for k in common) ** 0.5
        answer.quantity, answer.difference = "weights", apart / moved if moved else float("nan")
        way = (
            f"After {ours.steps} steps from the same weights it is {100 * apart / max(moved, 1e-300):.3g}% of the way "
            "that one process has gone beside it (2-norm of all weights together)."
        )
        answer.claims.append(shown(way, ours, whole))
    return answer


def _rank(runs: Runs, rank: int) -> Side | None:
    try:
        return Side(runs.folder("A"), 1, rank)
    except FileNotFoundError:
        return None


def one(runs: Runs, name: str, strategy: StrategySpec, **how: Any) -> tuple[Side | None, str | None]:
    """A run of one process; or why there is none."""
    failed = runs.run(name, strategy, **how)
    side = side_of(runs, name, 1) if failed is None else None
    if side is not None and side.steps:
        return side, None
    return None, failed or "it made no step"


def side_of(runs: Runs, name: str, processes: int) -> Side | None:
    """What a run has left; it then counts as made."""
    try:
        side = Side(runs.folder(name), processes)
    except FileNotFoundError:
        return None
    if side.steps:
        runs.left.add(name)
    return side


def words(d: Difference) -> str:
    what = f"the {d.quantity}" + (f" of {d.name}" if d.name else "")
    if d.difference != d.difference:
        return f"First in step {d.step + 1}: {what}."
    if d.quantity in DATA:
        return f"First in step {d.step + 1}: {what}; {d.difference:.0f} are in one run and not in the other."
    return f"First in step {d.step + 1}: {what}, by {d.difference:.3g} (allowed: {d.tolerance:.2g})."


def answered(code: int, claims: list[Claim], found: Sequence[Difference], cause: str) -> Answer:
    first = found[0]
    return Answer(
        code,
        claims,
        step=first.step,
        quantity=first.quantity,
        parameter=first.name,
        difference=first.difference,
        tolerance=first.tolerance,
        cause=cause,
        differences=[asdict(d) for d in found[:50]],
    )


def different(found: Sequence[Difference], cause: Cause | None, steps: int, sides: Sequence[Side]) -> Answer:
    """sides: those that differ, or the one whose ranks do."""
    claims = [shown(f"different. {words(found[0])}", *sides)]
    if cause is not None:
        claims += [
            Claim(f"\nCause: {cause.sentence}.", names(cause.sides or sides)),
            Claim(f"\nRemedy: {cause.remedy}"),
        ]
    else:
        claims.append(shown("\nCause: none of those that are known leaves such records.", *sides))
    answer = answered(DIFFERENT, claims, found, cause.key if cause is not None else "unknown")
    answer.remedy, answer.steps = cause.remedy if cause is not None else None, steps
    return answer
