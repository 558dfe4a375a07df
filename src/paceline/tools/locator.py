"""Further runs of a fault that was found, with the lines of the script watched: which line it is, and what that says.

L is the run in question once more; LD the same, with each process told that it is the only one; LC one process with
whole batches. What differs between L and LD is there because the script asks for its rank or for the number of
processes. Where it asks and nothing differs, its asking is healthy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paceline.tools.answers import SINGLE, one, side_of
from paceline.tools.causes import STATE, STATE_REMEDY
from paceline.tools.claims import Claim, missing, names
from paceline.tools.evidence import Evidence
from paceline.tools.lines import RANDOM, cuts, traces
from paceline.tools.places import Sought, Where, locate, of_state, unsteady
from paceline.tools.ranks import of_the_ranks
from paceline.tools.runs import Answer, Runs
from paceline.tools.sides import ROUNDOFF, Difference, Side, Tolerances, differences
from paceline.tools.source import text

_BY_PARTS = {"mean-of-means", "in-batch-loss", "sum-for-mean", "mean-for-sum", "depends-on-shard-size", "unknown"}
_BACKWARD = {"register_hook", "register_full_backward_hook", "register_full_backward_pre_hook"}
_NOWHERE = {"by-design", "unused-parameters", "not-finite"}


class Locator:
    """ours: A. whole: C, where it is with C that there is a difference. plain: with dropout off."""

    def __init__(self, runs: Runs, ours: Side, whole: Side | None, *, plain: bool) -> None:
        self._runs, self._ours, self._whole, self._plain = runs, ours, whole, plain
        self._lines: Side | None = None
        self._told: Side | None = None
        self._asks = False
        self._tried = False
        self._why: str | None = None

    def _watched(self, step: int) -> None:
        """Makes L and LD, once."""
        if self._tried or not self._runs.lines:
            return
        self._tried = True
        processes = self._runs.start.processes
        how: dict[str, Any] = {"lines": step, "steps": step + 1} | ({"plain": True} if self._plain else {})
        self._why = self._runs.run("L", **how)  # it may end in the error that the run in question ended in
        self._lines = side_of(self._runs, "L", processes)
        if processes > 1:
            self._runs.run("LD", told=True, **how)
            self._told = side_of(self._runs, "LD", processes)
        for side in (self._lines, self._told):
            if side is not None and traces(side):  # also where the ranks were unlike before the first step
                self._runs.left.add(side.name)

    def asked(self, known: Evidence, tolerances: Tolerances) -> Evidence:
        """With what shows whether the difference is there because the script asks."""
        step = known.step
        self._watched(step)
        lines, told = self._lines, self._told
        if lines is None or told is None or min(lines.steps, told.steps) <= step:
            return known
        reference = known.plain if self._plain else known.ours
        again = [d for k in range(step + 1) for d in differences(reference, lines, known.ours, tolerances, k)]
        apart = [d for k in range(step + 1) for d in differences(reference, told, known.ours, tolerances, k)]
        same = [(d.step, d.quantity) for d in again]
        apart = [d for d in apart if (d.step, d.quantity) not in same]
        self._asks = bool(apart)
        if apart and known.shards is None and known.told is None and not known.cut:
            known = replace(known, spread=apart)
        return replace(known, told=told, asked=apart)

    def add(self, answer: Answer, found: Sequence[Difference]) -> Answer:
        """The answer with its line, and with another cause where the line shows that."""
        first = found[0]
        if answer.cause in _NOWHERE:
            return answer
        self._watched(first.step)
        lines = self._lines
        if lines is None:
            if self._why is not None:
                answer.notes.append(missing(f"its lines could not be watched: {self._why}", "L"))
            return answer
        if self._told is not None and of_the_ranks(self._ours) is not None:
            self._asks = of_the_ranks(self._told) is None
        if (hooked := self._hooked(answer, found, lines)) is not None:
            return hooked
        sought = Sought(answer.cause or "unknown", first.quantity, first.name, first.step)
        told = traces(self._told) if self._told is not None and self._asks else []
        parts, of_parts = [], None
        if not self._asks and self._whole is not None and first.quantity in ("loss", "gradient", "buffers", "data"):
            how = {"lines": first.step, "steps": first.step + 1}
            of_parts, _ = one(self._runs, "LC", SINGLE, plain=True, whole=True, **how)
            if of_parts is not None:
                within = 64 * ROUNDOFF[lines.ranks[0]["precision"]] ** (
                    1 if lines.ranks[0]["precision"] == "fp32" else 0.8
                )
                parts = list(cuts(lines, of_parts, first.step, within))
        where = locate(sought, traces(lines), told, parts)
        if where is None and answer.cause == "state-outside":
            where = of_state(first.step, traces(lines))
        if where is None:
            return answer
        sides = [lines, *([self._told] if told and self._told is not None else [])]
        sides += [of_parts] if of_parts is not None else []
        self._refine(answer, where, sides)
        if answer.cause == "state-outside" and (state := of_state(first.step, traces(lines))) is not None:
            where = Where(state.place, state.beside or (where.place if where.place != state.place else None))
        return _with_place(answer, where, sides)

    def _hooked(self, answer: Answer, found: Sequence[Difference], lines: Side) -> Answer | None:
        """Of losses that are alike, and gradients that are not, where the script has put a hook on a gradient."""
        may_be = {*_BY_PARTS, "state-outside", "control-by-rank"}  # a hook sees gradients times the weight of a part
        if found[0].quantity != "gradient" or answer.cause not in may_be or self._asks or answer.line is not None:
            return None
        hooks = [e for trace in traces(lines) for e in trace.of("hook") if e["name"] in _BACKWARD]
        hooks = [e for e in hooks if e["step"] <= found[0].step]
        if not hooks:
            return None
        where = Where((hooks[-1]["file"], hooks[-1]["line"]))
        sentence = (
            "the losses are alike and the gradients are not, and the script has put a hook on a gradient: it acts on "
            "what each part of the batch gives, before that is combined"
        )
        remedy = "Change gradients after the last backward of a global batch, when .grad is the mean over it."
        _say(answer, "clipped-early", sentence, remedy, [lines])
        return _with_place(answer, where, [lines])

    def of_chance(self, answer: Answer, step: int) -> Answer:
        """Of a program that is not the same twice: two runs of one process, and where they become unlike."""
        if not self._runs.lines:
            return answer
        how = {"plain": True, "whole": True, "lines": step, "steps": step + 1}
        first, _ = one(self._runs, "LC", SINGLE, **how)
        second, _ = one(self._runs, "LC2", SINGLE, **how)
        if first is None or second is None:
            return answer
        where = unsteady(traces(first), traces(second), step)
        if where is None:
            sought = Sought("not-deterministic", answer.quantity or "loss", answer.parameter, step)
            where = locate(sought, traces(first), [], [])
        return answer if where is None else _with_place(answer, where, [first, second])

    def _refine(self, answer: Answer, where: Where, sides: Sequence[Side]) -> None:
        found = where.found
        if found is None:
            return
        kind, name = found.event["kind"], found.event["name"]
        drawn = kind == "seed" or (kind == "op" and name in RANDOM and found.how == "values")
        if where.asks and answer.cause == "control-by-rank" and drawn and answer.quantity in ("data", "loss"):
            _say(answer, "other-random-numbers", "random numbers are drawn by the rank, or by the number of processes",
                 "Draw from torch's default generator, as it is seeded: for each shard of each step, and each example.",
                 sides)  # fmt: skip
        elif where.asks and answer.cause in ("other-random-numbers", *_BY_PARTS) and not drawn:
            sentence = "a setting, or a number, of the script depends on the rank or on the number of processes"
            _say(answer, "control-by-rank", sentence, "Set it alike on every rank and for every number.", sides)
        elif not where.asks and answer.cause in (*_BY_PARTS, "control-by-rank") and found.how == "state":
            _say(answer, "state-outside", STATE, STATE_REMEDY, sides)
        elif not where.asks and answer.cause in _BY_PARTS and found.how == "numbers":
            given, whole = found.numbers
            sentence = (
                f"an op is given {_numbers(given)} with a part of the batch, and {_numbers(whole)} with the whole: the "
                "script computes with the size of what it is given, or with how many parts there were"
            )
            remedy = "Count in updates, and leave sizes out: Paceline weighs each part by its examples."
            _say(answer, "depends-on-shard-size", sentence, remedy, sides)


def _say(answer: Answer, cause: str, sentence: str, remedy: str, sides: Sequence[Side]) -> None:
    answer.cause, answer.remedy = cause, remedy
    kept = [claim for claim in answer.claims if not claim.text.startswith(("\nCause:", "\nRemedy:"))]
    answer.claims = [*kept, Claim(f"\nCause: {sentence}.", names(sides)), Claim(f"\nRemedy: {remedy}")]


def _numbers(given: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in given[:3]) or "nothing"


def _with_place(answer: Answer, where: Where, sides: Sequence[Side]) -> Answer:
    file, answer.line = where.place
    answer.file, answer.source = _short(file), text(where.place)
    said = f"\nAt {answer.file}:{answer.line}: {answer.source}"
    if where.beside is not None and where.beside != where.place:
        answer.beside = f"{_short(where.beside[0])}:{where.beside[1]}"
        said += f"\n  with {answer.beside}: {text(where.beside)}"
    at = next((i for i, claim in enumerate(answer.claims) if claim.text.startswith("\nRemedy:")), len(answer.claims))
    answer.claims.insert(at, Claim(said, names(sides)))
    return answer


def _short(file: str) -> str:
    """From the current directory, where it lies below it."""
    near = os.path.relpath(file)
    return file if near.startswith("..") else near
