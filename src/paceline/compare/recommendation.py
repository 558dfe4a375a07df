"""Which strategy to use, and why: one sentence from the figures. Pure.

1. Take the rows that ran in every round with the first requested precision and global batch. Leave out rows that are
   equivalent to `single` because they have one process. With a single round there is no recommendation, because another
   program on the machine can make one trial much slower.
2. Of these, keep only rows that train the same model: their losses differ from those of `single` by at most SAME times
   its largest loss (loss_causes.py). If the model draws random numbers, differences up to three times the smallest
   difference of any row are allowed too. (Dropout draws different masks for different shards, so every strategy
   differs somewhat. A strategy that changes the mathematics differs more.)
3. Of these, keep the fastest row, and every row that is equally fast: within NOISE, or within LOOSE and faster in some
   round. (Cases take turns in a round, so rounds can be compared in pairs.)
4. Of these, choose the first: `single`, then `ddp`, then the order of the table, because simpler strategies have less
   to go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.compare.cases import BASELINE
from paceline.compare.figures import Row
from paceline.compare.loss_causes import is_same
from paceline.trials.spec import DRAWS

LEAST_ROUNDS = 2
NOISE = 0.03
LOOSE = 0.2
LESS_MEMORY = 0.8
_PLAIN = (BASELINE, "ddp")


def recommend(rows: Sequence[Row]) -> tuple[Row, str] | None:
    """(the recommended row, the sentence); None if there is no recommendation (see `why_none`)."""
    measured = [row for row in rows if row.figures is not None]
    if not measured:
        return None
    first = measured[0].case
    measured = [r for r in measured if (r.case.precision, r.case.global_batch) == (first.precision, first.global_batch)]
    single = next((row for row in measured if row.case.spec.name == BASELINE), None)
    ran = [row for row in measured if row.failed is None and not row.case.as_single]
    if not ran or any(row.figures is not None and len(row.figures.rounds) < LEAST_ROUNDS for row in ran):
        return None
    same = _same(ran, single)
    if not same:
        return None
    fastest = max(same, key=_speed)
    near = [row for row in same if _near(row, fastest)]
    chosen = min(near, key=lambda row: (_plainness(row), rows.index(row)))
    parts = [_speed_of(chosen, single, near), _fidelity(chosen, single), *_others(chosen, ran, same)]
    return chosen, f"Use {chosen.case.name}: " + "; ".join(filter(None, parts)) + "."


def why_none(rows: Sequence[Row]) -> str | None:
    """Why there is no recommendation although some rows have figures; None if no row has figures."""
    rounds = [len(row.figures.rounds) for row in rows if row.figures is not None]
    if not rounds:
        return None
    if min(rounds) < LEAST_ROUNDS:
        return "No recommendation: one round does not show the variation of the figures. Use --rounds 3."
    return "No recommendation: no strategy ran in every round and trained the same model as single."


def _speed(row: Row) -> float:
    assert row.figures is not None
    return row.figures.examples_per_second


def _plainness(row: Row) -> int:
    name = row.case.name
    return _PLAIN.index(name) if name in _PLAIN else len(_PLAIN)


def _same(ran: Sequence[Row], single: Row | None) -> list[Row]:
    if single is None or single.figures is None or not single.figures.losses:
        return list(ran)
    base = single.figures
    others = [r.difference for r in ran if r is not single and r.difference is not None and r.difference > 0]
    by_draws = 3 * min(others, default=0.0) if DRAWS in base.traits else 0.0
    return [
        row
        for row in ran
        if row is single or is_same(row.difference, base) or (row.difference is not None and row.difference <= by_draws)
    ]


def _near(row: Row, fastest: Row) -> bool:
    assert row.figures is not None
    assert fastest.figures is not None
    if _speed(row) >= (1 - NOISE) * _speed(fastest):
        return True
    if _speed(row) < (1 - LOOSE) * _speed(fastest):
        return False
    return any(own > other for own, other in zip(row.figures.rounds, fastest.figures.rounds, strict=False))


def _speed_of(chosen: Row, single: Row | None, near: Sequence[Row]) -> str:
    also = [row.case.name for row in near if row is not chosen]
    tie = f" ({_listed(also)} {'is' if len(also) == 1 else 'are'} equally fast within the noise)" if also else ""
    if chosen is single:
        return f"no strategy that trains the same model is faster than its {_speed(chosen):,.0f} examples/s{tie}"
    if single is None:
        return f"it is the fastest, with {_speed(chosen):,.0f} examples/s{tie}"
    factor = _speed(chosen) / _speed(single)
    return f"it computes {_speed(chosen):,.0f} examples/s, {factor:.2f} times the {_speed(single):,.0f} of single{tie}"


def _fidelity(chosen: Row, single: Row | None) -> str:
    if chosen is single or single is None or chosen.difference is None:
        return ""
    if math.isnan(chosen.difference):
        return "its losses are not finite"
    if chosen.cause is not None:
        return f"its losses differ from those of single by {chosen.difference:.1e} ({chosen.cause})"
    return f"its losses match those of single to within {chosen.difference:.1e}"


def _others(chosen: Row, ran: Sequence[Row], same: Sequence[Row]) -> list[str]:
    """Alternatives to the choice: a faster strategy that trains a different model; a strategy with less memory."""
    assert chosen.figures is not None
    found = []
    faster = [row for row in ran if row not in same and _speed(row) > (1 + NOISE) * _speed(chosen)]
    if faster:
        best = max(faster, key=_speed)
        if best.difference is None or math.isnan(best.difference):
            how = "could not be compared"
        else:
            how = f"differ by {best.difference:.1e} ({best.cause or 'it trains differently'})"
        found.append(f"{best.case.name} is {_speed(best) / _speed(chosen):.2f} times as fast, but its losses {how}")
    memory = max(chosen.figures.memory)
    smaller = [r for r in same if r.figures is not None and max(r.figures.memory) < LESS_MEMORY * memory]
    if smaller:
        least = min(smaller, key=lambda r: max(r.figures.memory) if r.figures is not None else 0)
        assert least.figures is not None
        part = max(least.figures.memory) / memory
        speed = _speed(least) / _speed(chosen)
        found.append(f"to save memory, {least.case.name} needs {part:.0%} of the memory, at {speed:.0%} of the speed")
    return found


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
