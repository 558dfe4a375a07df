"""Which strategy to take, and why: one sentence from the figures. Pure.

1. Only rows that ran count, with the first precision and the first global batch that were asked for; and none that
   was `single` by another name, as of one process.
2. Of these, only rows that train the same model: their losses differ from those of `single` by at most SAME times its
   largest loss, or by at most three times the smallest difference of any row. (Dropout draws other masks on other
   shards, so that every strategy differs somewhat. A strategy that changes the mathematics differs more.)
3. Of these, the fastest row, and every row that is as fast: within NOISE, or within LOOSE and faster in some round.
   (Cases take turns in a round, so that rounds can be compared in pairs.)
4. Of these, the first: `single`, then `ddp`, then the order of the table, since what is simpler has less to go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.compare.cases import BASELINE
from paceline.compare.figures import Row

SAME = 1e-3
NOISE = 0.03
LOOSE = 0.2
LESS_MEMORY = 0.8
_PLAIN = (BASELINE, "ddp")


def recommend(rows: Sequence[Row]) -> tuple[Row, str] | None:
    """(the row to take, the sentence); None where no row has figures."""
    ran = [row for row in rows if row.figures is not None and not row.case.as_single]
    if not ran:
        return None
    first = ran[0].case
    ran = [r for r in ran if (r.case.precision, r.case.global_batch) == (first.precision, first.global_batch)]
    single = next((row for row in ran if row.case.spec.name == BASELINE), None)
    same = _same(ran, single)
    fastest = max(same, key=_speed)
    near = [row for row in same if _near(row, fastest)]
    chosen = min(near, key=lambda row: (_plainness(row), rows.index(row)))
    parts = [_speed_of(chosen, single, near), _fidelity(chosen, single), *_others(chosen, ran, same)]
    return chosen, f"Take {chosen.case.name}: " + "; ".join(filter(None, parts)) + "."


def _speed(row: Row) -> float:
    assert row.figures is not None
    return row.figures.examples_per_second


def _plainness(row: Row) -> int:
    name = row.case.name
    return _PLAIN.index(name) if name in _PLAIN else len(_PLAIN)


def _same(ran: Sequence[Row], single: Row | None) -> list[Row]:
    if single is None or single.figures is None or not single.figures.losses:
        return list(ran)
    scale = max(map(abs, single.figures.losses.values()))
    others = [r.difference for r in ran if r is not single and r.difference is not None and r.difference > 0]
    bound = max(SAME * scale, 3 * min(others, default=0.0))
    return [row for row in ran if row is single or (row.difference is not None and row.difference <= bound)]


def _near(row: Row, fastest: Row) -> bool:
    assert row.figures is not None
    assert fastest.figures is not None
    if _speed(row) >= (1 - NOISE) * _speed(fastest):
        return True
    if _speed(row) < (1 - LOOSE) * _speed(fastest):
        return False
    return any(own > other for own, other in zip(row.figures.rounds, fastest.figures.rounds, strict=True))


def _speed_of(chosen: Row, single: Row | None, near: Sequence[Row]) -> str:
    also = [row.case.name for row in near if row is not chosen]
    tie = f" ({_listed(also)} {'is' if len(also) == 1 else 'are'} as fast within the noise)" if also else ""
    if chosen is single:
        return f"none that trains the same model is faster, with {_speed(chosen):,.0f} examples/s{tie}"
    if single is None:
        return f"it is the fastest, with {_speed(chosen):,.0f} examples/s{tie}"
    factor = _speed(chosen) / _speed(single)
    return (
        f"it computes {_speed(chosen):,.0f} examples/s, {factor:.2f} times as many as single with "
        f"{_speed(single):,.0f}{tie}"
    )


def _fidelity(chosen: Row, single: Row | None) -> str:
    if chosen is single or single is None or chosen.difference is None:
        return ""
    if math.isnan(chosen.difference):
        return "its losses are not finite"
    return f"its losses are those of single to {chosen.difference:.1e}"


def _others(chosen: Row, ran: Sequence[Row], same: Sequence[Row]) -> list[str]:
    """What the choice gives up: speed, at the price of another model; or memory."""
    assert chosen.figures is not None
    found = []
    faster = [row for row in ran if row not in same and _speed(row) > (1 + NOISE) * _speed(chosen)]
    if faster:
        best = max(faster, key=_speed)
        if best.difference is None or math.isnan(best.difference):
            how = "could not be compared"
        else:
            how = f"differ by {best.difference:.1e}, which is another training"
        found.append(f"{best.case.name} is {_speed(best) / _speed(chosen):.2f} times as fast, but its losses {how}")
    memory = max(chosen.figures.memory)
    smaller = [r for r in same if r.figures is not None and max(r.figures.memory) < LESS_MEMORY * memory]
    if smaller:
        least = min(smaller, key=lambda r: max(r.figures.memory) if r.figures is not None else 0)
        assert least.figures is not None
        part = max(least.figures.memory) / memory
        speed = _speed(least) / _speed(chosen)
        found.append(f"if memory is short, {least.case.name} needs {part:.2f} of it at {speed:.2f} of the speed")
    return found


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
