"""Rules about optimizers that compute of a shard what is meant of the whole weight."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.doctor.findings import Finding
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of

MIN_STEPS = 2  # steps
MIN_NORMS = 2  # norms of one shape in a step, as of a weight and its update: one alone may only be looked at


def findings(run: RecordedRun) -> list[Finding]:
    """matrix_of_shard: in its steps an optimizer multiplies or decomposes matrices of a shard's shape, or takes two
    norms of them, and exchanges nothing. (Products of shards may be summed over the ranks.)"""
    return first_of(run, _matrices_of_shards)


def _matrices_of_shards(run: RecordedRun) -> Iterator[Finding]:
    for rank in range(run.processes):
        steps = _steps(run.ranks[rank])
        wrong = [(found, end) for found, end in steps if found and not end["exchanged"]]
        if len(wrong) >= max(MIN_STEPS, len(steps)):
            (first, *_), end = wrong[0]
            part, whole = (" x ".join(map(str, shape)) for shape in (first["shape"], first["whole"]))
            what = f"multiplied ({first['op']})" if first["kind"] == "product" else f"took the norm ({first['op']}) of"
            evidence = (
                f"in each of {len(wrong)} steps that were looked into, {end['optimizer']} {what} rank {rank}'s shard, "
                f"{part}, of a weight of {whole} ({first['weight']}), and exchanged nothing"
            )
            yield finding_at("matrix_of_shard", first["at"], evidence)


def _steps(events: list[Event]) -> list[tuple[list[Event], Event]]:
    """(what was computed of shards, the "shards" event) for the steps that were looked into."""
    found: list[tuple[list[Event], Event]] = []
    pending: list[Event] = []
    for e in events:
        if e["k"] == "of_shard":
            pending.append(e)
        elif e["k"] == "shards":
            products = [one for one in pending if one["kind"] == "product"]
            norms = [one for one in pending if one["kind"] == "norm"]
            twice = [one for one in norms if sum(o["shape"] == one["shape"] for o in norms) >= MIN_NORMS]
            found.append((products or twice, e))
            pending = []
    return found
