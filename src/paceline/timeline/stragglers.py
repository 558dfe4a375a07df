"""Which rank was slower than the others, and in which phase. Pure.

Ranks that make their steps together wait for the slowest in each of them, so that all steps take equally long, and a
rank that waits may seem to compute. Which one is late is told by the order of the phases:

Phase 1, a step begins where the backward of the one before it has ended, since there all ranks have met: with the
    update and a checkpoint, then data and forward, up to the end of the backward. What a rank waits in exchanges is
    left out.
Phase 2, after each phase a rank is behind by so much as it has taken longer than the latest of the others. A phase in
    which it falls behind, or farther behind, is where it delays them. One that lets others catch up delays nobody:
    they may have waited in it.
Phase 3, a rank is named for a phase in which it delays the others by more than LEAST_PART of a step and LEAST_MS, in at
    least MOST_STEPS of the steps; and, where the ranks' exchanges were recorded, if the others have waited in those for
    at least half of that.

Replicas that train apart wait for nobody: there the medians of each phase are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from paceline.timeline.span_file import Phase

LEAST_PART = 0.1  # of a step's median length: a smaller delay is noise
LEAST_MS = 0.5  # likewise, in milliseconds
MOST_STEPS = 0.75  # of the steps, in which the delay is as large
LEAST_STEPS = 5  # in fewer nobody is named
_FIRST_STEPS = 2  # of a run, which are left out where there are enough: kernels are chosen, workers start

_ORDER = (
    Phase.UPDATE,
    Phase.EVALUATION,
    Phase.CHECKPOINT,
    Phase.DATA,
    Phase.FORWARD,
    Phase.FORWARD_AND_BACKWARD,
    Phase.BACKWARD,
)
_BEFORE_DATA = 3  # the first of them belong to the step before
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
"""Milliseconds of a step in each phase."""


class Ranks(NamedTuple):
    """What the ranks have recorded."""

    steps: dict[int, dict[StepKey, Phases]]  # rank -> (epoch, step) -> phases
    in_step: bool  # whether all ranks meet in each step
    alike: bool  # whether all ranks compute the same parts of a step, of other examples
    on_host: bool  # whether they compute on an accelerator, of which the host's times tell only a part


class Straggler(NamedTuple):
    """A rank that was slower than the others."""

    rank: int
    phase: Phase  # in which it was
    delay_ms: float  # median over the steps: how much longer it took than the slowest of the others
    waited_ms: float | None  # median over the steps: what each other rank waited for it; None where nobody waits


def report(ranks: Ranks) -> list[str]:
    """Lines for the user: the phases of a step, and who was slow."""
    if not ranks.steps:
        return []
    lines = [f"median of a step: {_phases_in_words(ranks)}"]
    if len(ranks.steps) < 2:
        return lines
    if not ranks.alike:
        return [*lines, "the ranks compute different parts of a step, so none is called slower than the others"]
    if len(_common(ranks)) < LEAST_STEPS:
        return [*lines, f"fewer than {LEAST_STEPS} steps of all ranks: too few to say whether one was slower"]
    found = stragglers(ranks)
    length = step_ms(ranks)
    for one in found:
        text = f"rank {one.rank} was slower than the others in {one.phase.label}: by {one.delay_ms:.1f} ms of a step"
        text += f" of {length:.1f} ms"
        if one.waited_ms is not None:
            text += f"; the others waited {one.waited_ms:.1f} ms for it in each step"
        lines.append(text)
    if not found:
        lines.append("no rank was slower than the others")
    if ranks.on_host:
        lines.append("these are times of the hosts: a device that is slow by itself may not show in them")
    return lines


def _phases_in_words(ranks: Ranks) -> str:
    """For each phase the rank that took longest, and the median over the ranks."""
    words = []
    for phase in (*_IN_A_STEP, Phase.EVALUATION, Phase.CHECKPOINT):
        medians = {rank: _median(steps, phase) for rank, steps in ranks.steps.items()}
        slowest = max(medians, key=lambda rank: medians[rank])
        if medians[slowest] < 0.005:  # what a phase shows in two digits
            continue
        if len(medians) == 1:
            words.append(f"{phase.label} {medians[slowest]:.2f} ms")
        else:
            usual = median(medians.values())
            words.append(f"{phase.label} {medians[slowest]:.2f} ms on rank {slowest} ({usual:.2f} over the ranks)")
    return ", ".join(words)


def median(values: Iterable[float]) -> float:
    """As statistics.median, whose module takes longer to load than all of this one."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _median(steps: dict[StepKey, Phases], phase: Phase) -> float:
    return median(phases[phase] for phases in steps.values())


def step_ms(ranks: Ranks) -> float:
    """The median length of a step, without what stands between its phases."""
    each = [
        median(sum(phases[phase] for phase in _IN_A_STEP) for phases in steps.values())
        for steps in ranks.steps.values()
    ]
    return median(each)


def _common(ranks: Ranks) -> list[StepKey]:
    """The steps that are compared: those of all ranks; without the first ones, where enough are left."""
    first, *others = ranks.steps.values()
    keys = [key for key in first if all(key in other for other in others)] if ranks.in_step else list(first)
    return keys[_FIRST_STEPS:] if len(keys) >= LEAST_STEPS + _FIRST_STEPS else keys


def stragglers(ranks: Ranks) -> list[Straggler]:
    """The ranks that were slower, the worst first."""
    least = max(LEAST_PART * step_ms(ranks), LEAST_MS)
    found = _late(ranks, least) if ranks.in_step else _longer(ranks, least)
    return sorted(found, key=lambda one: -one.delay_ms)


def _late(ranks: Ranks, least: float) -> list[Straggler]:
    """Of ranks that meet in each step."""
    keys = _common(ranks)
    delays: dict[tuple[int, Phase], list[float]] = {(rank, phase): [] for rank in ranks.steps for phase in _ORDER}
    waits: dict[int, list[float]] = {rank: [] for rank in ranks.steps}  # what the others waited, more than this rank
    for before, key in pairwise(keys):
        cycles = {rank: _cycle(steps[before], steps[key]) for rank, steps in ranks.steps.items()}
        exchanged = {rank: steps[key][Phase.COMMUNICATION] for rank, steps in ranks.steps.items()}
        taken = dict.fromkeys(cycles, 0.0)  # by each rank since the step began
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
    # Where a rank has no time in exchanges it is hidden in another phase, and tells nothing.
    told = all(_median(steps, Phase.COMMUNICATION) > 0 for steps in ranks.steps.values())
    found = []
    for (rank, phase), each in delays.items():
        if not _in_most(each, least):
            continue
        delay = median(each)
        waited = median(waits[rank]) if told else delay
        if waited >= delay / 2:
            found.append(Straggler(rank, phase, delay, waited))
    return found


def _cycle(before: Phases, step: Phases) -> list[float]:
    """The phases from the end of one backward to the end of the next."""
    return [(before if number < _BEFORE_DATA else step)[phase] for number, phase in enumerate(_ORDER)]


def _longer(ranks: Ranks, least: float) -> list[Straggler]:
    """Of ranks that train apart."""
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
