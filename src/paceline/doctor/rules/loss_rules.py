"""Rules about the terms of a loss: each must be a mean over the global batch, or none."""

from __future__ import annotations

import math

from paceline.doctor.findings import Finding
from paceline.doctor.rules.loss_lines import divides_by_processes, fractions_line, term_line
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at

MIN_STEPS = 3  # backward passes
MOSTLY = 0.5  # of the backward passes
UNEQUAL = 1e-3  # relative difference of numbers that are not equal

Pass = tuple[Event, ...]  # the ranks' "backward" events of one backward pass


def findings(run: RecordedRun) -> list[Finding]:
    """loss_mean_of_means of a further term, term_times_processes, own_fractions."""
    if len(run.peers) < 2 or not any(run.events(0, "ddp", "fsdp")) or any(run.all_events("join")):
        return []
    per_rank = [list(run.events(rank, "backward")) for rank in run.peers]
    hooked = any(e["mean"] != e.get("form", e["mean"]) for e in per_rank[0])
    if len({len(events) for events in per_rank}) > 1 or hooked or any(e["rescaled"] for e in run.events(0, "before")):
        return []
    passes = [now for now in zip(*per_rank) if len({_form(e) for e in now}) == 1 and now[0].get("terms")]
    lines = {tuple(now[0]["at"]) for now in passes}
    by_line = [[now for now in passes if tuple(now[0]["at"]) == line] for line in sorted(lines)]
    found = [f for some in by_line for f in (*_unequal(some), *_times_processes(some), *_own_fractions(some))]
    return list({f.cause: f for f in reversed(found)}.values())[::-1]


def _form(backward: Event) -> tuple[str, ...]:
    return tuple(term["kind"] for term in backward.get("terms") or ())


def _unequal(passes: list[Pass]) -> list[Finding]:
    """loss_mean_of_means: a term after the first is divided by a number of each rank's own."""
    for place in range(1, max((len(now[0]["terms"]) for now in passes), default=0)):
        terms = [[e["terms"][place] for e in now] for now in passes if place < len(now[0]["terms"])]
        counted = [now for now in terms if all((t["count"] or 0) > 0 for t in now)]
        unequal = [now for now in counted if _differ([t["count"] for t in now])]
        weighed = [now for now in unequal if not _differ([t["factor"] / t["count"] for t in now])]
        if weighed or len(unequal) < MIN_STEPS or len(unequal) < MOSTLY * len(counted):
            continue
        shown = " and ".join(f"{t['count']:g}" for t in unequal[0][:2])
        evidence = (
            f"in {len(unequal)} of {len(counted)} backward passes each rank divided term {place + 1} of its loss by a "
            f"number of its own, first by {shown}, and the gradients were averaged as if these were equal"
        )
        backward = passes[0][0]
        line = term_line(backward, place)
        return [finding_at("loss_mean_of_means", line or backward["at"], evidence, backward["at"])]
    return []


def _times_processes(passes: list[Pass]) -> list[Finding]:
    """term_times_processes: the loss is multiplied by the number of processes, as a sum over a rank's targets must be
    that is divided by the number of all ranks' targets; but a further term is a rank's mean already."""
    size = len(passes[0]) if passes else 0
    in_text = bool(passes) and divides_by_processes(passes[0][0])
    places = [
        {n for n, term in enumerate(now[0]["terms"]) if _is_scaled_mean(term, size, in_text)}
        for now in passes
        if any(_is_global(now, n, size) for n in range(len(now[0]["terms"])))
    ]
    common = set.intersection(*places) if places else set()
    if len(places) < MIN_STEPS or len(places) < MOSTLY * len(passes) or not common:
        return []
    place, backward = min(common), passes[0][0]
    evidence = (
        f"in {len(places)} of {len(passes)} backward passes the loss was multiplied by {size}, the number of ranks. "
        f"One term is divided by the targets of all ranks and needs that; term {place + 1} is a mean of each rank, and "
        f"counts {size} times"
    )
    weighed = backward["terms"][place]["kind"] == "weighed"
    line = term_line(backward, place) or (fractions_line(backward) if weighed else None)
    return [finding_at("term_times_processes", line or backward["at"], evidence, backward["at"])]


def _is_global(now: Pass, place: int, size: int) -> bool:
    """Is a term divided by the targets of all ranks, and multiplied by the number of processes?"""
    terms = [e["terms"][place] for e in now]
    if any(t["kind"] != "sum" or not t["count"] or t["own"] is None or not _has(t["outer"], size) for t in terms):
        return False
    equal = not _differ([t["count"] for t in terms])
    return equal and sum(t["own"] for t in terms) <= terms[0]["count"] * (1 + UNEQUAL)


def _is_scaled_mean(term: Event, size: int, in_text: bool) -> bool:
    """Is a term a rank's own mean, times the number of processes, which nothing takes back?

    in_text: does the script divide 1 by the number of processes? Then a coefficient may be that; one of 1/2 may be
    just a coefficient.
    """
    taken_back = _has(term["divided"], size) or (in_text and _has(term["inner"], 1 / size))
    return term["kind"] in ("weighed", "mean") and _has(term["outer"], size) and not taken_back


def _has(factors: list[float], wanted: float) -> bool:
    return any(math.isclose(f, wanted, rel_tol=1e-6) for f in factors)


def _own_fractions(passes: list[Pass]) -> list[Finding]:
    """own_fractions: a term weighs means over a rank's rows by fractions of that rank's rows. Fractions of the global
    batch are the same on all ranks."""
    for place in range(max((len(now[0]["terms"]) for now in passes), default=0)):
        terms = [
            [e["terms"][place]["weights"] for e in now]
            for now in passes
            if place < len(now[0]["terms"]) and now[0]["terms"][place]["weights"]
        ]
        sums = [w[1] for now in terms for w in now]
        unlike = [now for now in terms if len({w[0] for w in now}) > 1]
        if len(unlike) < MIN_STEPS or len(unlike) < MOSTLY * len(terms) or _differ(sums):
            continue
        backward = passes[0][0]
        evidence = (
            f"in {len(unlike)} of {len(terms)} backward passes a term of the loss multiplied means over a rank's rows "
            f"by {terms[0][0][2]} fractions. These differ between ranks, and sum to {sums[0]:.3g} on each: the mean of "
            "such products is not the product of the global means"
        )
        line = fractions_line(backward) or term_line(backward, place)
        return [finding_at("own_fractions", line or backward["at"], evidence, backward["at"])]
    return []


def _differ(values: list[float]) -> bool:
    return max(values) - min(values) > UNEQUAL * max(map(abs, values))
