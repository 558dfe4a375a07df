"""Find ranks that are slower than the others, and the phase in which they are slower. Pure.

Ranks that synchronize in each step wait for the slowest rank. So a step takes equally long on all ranks, and a waiting
rank may seem to compute. The order of the phases shows which rank is late:

1. A cycle runs from the end of one backward, where all ranks synchronize, to the end of the next: update, evaluation,
   checkpoint, data, forward, backward. Time that a rank waits in exchanges is left out.
2. At the end of each phase, a rank is behind if it has used more time in this cycle than each of the others. If it
   falls further behind in a phase, it delays the others in that phase. If the others catch up in a phase, no rank is
   late in it: they may have waited.
3. A rank is reported for a phase if it delays the others by more than LEAST_PART of a step, and by more than LEAST_MS,
   in at least MOST_STEPS of the steps. If exchanges were recorded, the others must also have waited in them for at
   least half of this delay.

Independent replicas do not wait for each other. In each phase, a replica is compared with the medians of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.timeline.span_file import Phase

LEAST_PART = 0.1  # fraction of the median step: smaller delays are noise
LEAST_MS = 0.5  # milliseconds: smaller delays are noise, even in short steps
MOST_STEPS = 0.75  # fraction of the steps that must have such a delay
LEAST_STEPS = 5  # with fewer steps, no rank is reported
_FIRST_STEPS = 2  # leave out the first steps if enough remain: in these, kernels are chosen and workers start

_ORDER = (
    Phase.UPDATE,
    Phase.EVALUATION,
    Phase.CHECKPOINT,
    Phase.DATA,
    Phase.FORWARD,
    Phase.FORWARD_AND_BACKWARD,
    Phase.BACKWARD,
)
_BEFORE_DATA = 3  # the phases of _ORDER before DATA belong to the previous step
_IN_A_STEP = (
    Phase.DATA,
    Phase.FORWARD,
    Phase.FORWARD_AND_BACKWARD,
    Phase.BACKWARD,
    Phase.COMMUNICATION,
    Phase.UPDATE,
)

StepKey = tuple[int, int]
"""(epoch, step of the epoch)."""
Phases = dict[Phase, float]
"""Phase -> the milliseconds that a step spent in it."""


class Ranks(NamedTuple):
    """The records of all ranks."""

    steps: dict[int, dict[StepKey, Phases]]  # rank -> (epoch, step) -> phases
    in_step: bool  # whether all ranks synchronize in each step
    alike: bool  # whether all ranks compute the same parts of a step, on different examples
    on_host: bool  # whether the ranks compute on an accelerator: the times are then only those of the host


class Straggler(NamedTuple):
    """A rank that was slower than the others."""

    rank: int
    phase: Phase  # the phase in which it was slower
    delay_ms: float  # median over the steps: how much longer it took than the slowest of the others
    waited_ms: float | None  # median over the steps: how long the others waited for it; None for independent replicas


def report(ranks: Ranks) -> list[str]:
    """Lines for the user: the phases of a step, and the slow ranks."""
    if not ranks.steps:
        return []
    lines = [f"median times per step: {_phases_in_words(ranks)}"]
    if len(ranks.steps) < 2:
        return lines
    if not ranks.alike:
        return [*lines, "the ranks compute different parts of a step, so they are not compared"]
    if len(_common(ranks)) < LEAST_STEPS:
        return [*lines, f"fewer than {LEAST_STEPS} steps were recorded on all ranks, too few to compare them"]
    found = stragglers(ranks)
    length = step_ms(ranks)
    for one in found:
        text = f"rank {one.rank} was slower than the others in {one.phase.label}, by {one.delay_ms:.1f} ms in a step"
        text += f" of {length:.1f} ms"
        if one.waited_ms is not None:
            text += f"; the others waited {one.waited_ms:.1f} ms for it in each step"
        lines.append(text)
    if not found:
        lines.append("no rank was slower than the others")
    if ranks.on_host:
        lines.append("these times were measured on the hosts, and may not show a slow device")
    return lines


def _phases_in_words(ranks: Ranks) -> str:
    """For each phase, the rank that took longest, and the median over the ranks."""
    words = []
    for phase in (*_IN_A_STEP, Phase.EVALUATION, Phase.CHECKPOINT):
        medians = {rank: _median(steps, phase) for rank, steps in ranks.steps.items()}
        slowest = max(medians, key=lambda rank: medians[rank])
        if medians[slowest] < 0.005:  # rounds to 0.00
            continue
        if len(medians) == 1:
            words.append(f"{phase.label} {medians[slowest]:.2f} ms")
        else:
            usual = median(medians.values())
            words.append(f"{phase.label} {medians[slowest]:.2f} ms on rank {slowest} ({usual:.2f} ms over all ranks)")
    return ", ".join(words)


def median(values: Iterable[float]) -> float:
    """The median. (Importing the statistics module would take longer than importing this whole package.)"""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _median(steps: dict[StepKey, Phases], phase: Phase) -> float:
    return median(phases[phase] for phases in steps.values())


def step_ms(ranks: Ranks) -> float:
    """The median duration of a step in milliseconds, without the time between its phases."""
    each = [
        median(sum(phases[phase] for phase in _IN_A_STEP) for phases in steps.values())
        for steps in ranks.steps.values()
    ]
    return median(each)


def _common(ranks: Ranks) -> list[StepKey]:
    """The steps to compare: the steps that all ranks have recorded, without the first few if enough remain."""
    first, *others = ranks.steps.values()
    keys = [key for key in first if all(key in other for other in others)] if ranks.in_step else list(first)
    return keys[_FIRST_STEPS:] if len(keys) >= LEAST_STEPS + _FIRST_STEPS else keys


def stragglers(ranks: Ranks) -> list[Straggler]:
    """Find the ranks that were slower than the others, the slowest first."""
    least = max(LEAST_PART * step_ms(ranks), LEAST_MS)
    found = _late(ranks, least) if ranks.in_step else _longer(ranks, least)
    return sorted(found, key=lambda one: -one.delay_ms)


def _late(ranks: Ranks, least: float) -> list[Straggler]:
    """Find slow ranks among ranks that synchronize in each step."""
    keys = _common(ranks)
    delays: dict[tuple[int, Phase], list[float]] = {(rank, phase): [] for rank in ranks.steps for phase in _ORDER}
    waits: dict[int, list[float]] = {rank: [] for rank in ranks.steps}  # how much longer the others waited in exchanges
    for before, key in pairwise(keys):
        cycles = {rank: _cycle(steps[before], steps[key]) for rank, steps in ranks.steps.items()}
        exchanged = {rank: steps[key][Phase.COMMUNICATION] for rank, steps in ranks.steps.items()}
        taken = dict.fromkeys(cycles, 0.0)  # the time that each rank has used in this cycle
        behind = dict.fromkeys(cycles, 0.0)
        for number, phase in enumerate(_ORDER):
            for rank, cycle in cycles.items():
                taken[rank] += cycle[number]
            for rank in cycles:
                late = max(0.0, taken[rank] - max(other for one, other in taken.items() if one != rank))
                delays[rank, phase].append(late - behind[rank])
                behind[rank] = late
        for rank in cycles:
            waits[rank].append(min(time for one, time in exchanged.items() if one != rank) - exchanged[rank])
    # If a rank has recorded no time in exchanges, its waiting is part of another phase, and is unknown.
    known = all(_median(steps, Phase.COMMUNICATION) > 0 for steps in ranks.steps.values())
    found = []
    for (rank, phase), each in delays.items():
        if not _in_most(each, least):
            continue
        delay = median(each)
        waited = median(waits[rank]) if known else delay
        if waited >= delay / 2:
            found.append(Straggler(rank, phase, delay, waited))
    return found


def _cycle(before: Phases, step: Phases) -> list[float]:
    """The phases from the end of one backward to the end of the next."""
    return [(before if number < _BEFORE_DATA else step)[phase] for number, phase in enumerate(_ORDER)]


def _longer(ranks: Ranks, least: float) -> list[Straggler]:
    """Find slow ranks among independent replicas."""
    found = []
    for rank, steps in ranks.steps.items():
        for phase in _ORDER:
            others = max(_median(other, phase) for one, other in ranks.steps.items() if one != rank)
            more = [phases[phase] - others for phases in steps.values()]
            if _in_most(more, least):
                found.append(Straggler(rank, phase, median(more), None))
    return found


def _in_most(delays: Sequence[float], least: float) -> bool:
    return bool(delays) and sum(delay > least for delay in delays) >= MOST_STEPS * len(delays)
