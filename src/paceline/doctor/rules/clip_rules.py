"""Rules about clipping: by torch's functions, and by hand.

By hand, clipping shows in the numbers: the gradients that the optimizer uses are a multiple of those after the
backward, and the factor times their norm is the same bound at each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.gradient_rules import multiple_of
from paceline.doctor.rules.recorded_run import Event, RecordedRun, file_line, finding_at, first_of, first_of_each
from paceline.observe.expressions import divided_by_world

UNLIKE = 1e-3  # relative difference above which two factors or norms are different
MIN_REPEATS = 3  # minimum number of repetitions: fewer may be an accident
_MIN_STEPS = 2  # steps with the samples of all ranks


def findings(run: RecordedRun) -> list[Finding]:
    """clip_before_unscale, clip_before_reduce, clip_of_shards, norm_summed_twice."""
    return [
        *first_of(run, _clipped_scaled),
        *first_of(run, _clipped_before, _clipped_under_no_sync, _clipped_alone),
        *first_of_each(run, _clip_of_shards, _norm_summed_twice),
    ]


def _clipped_scaled(run: RecordedRun) -> Iterator[Finding]:
    """clip_before_unscale: the gradients still contain the loss scale."""
    scaled = [e for e in run.events(0, "clip") if e["scale"] not in (None, 1.0)]
    for e in scaled:
        norm = f" of norm {e['norm']:.4g}" if e["norm"] is not None else ""
        evidence = (
            f"gradients{norm}, still multiplied by the loss scale {e['scale']:g}, were clipped to {e['bound']}, "
            f"{len(scaled)} times"
        )
        yield finding_at("clip_before_unscale", e["at"], evidence)


def _clipped_before(run: RecordedRun) -> Iterator[Finding]:
    """clip_before_reduce: a collective reduces gradients that were clipped."""
    clips = [e for e in run.events(0, "clip") if e["changed"]]
    reduced = [e for e in run.events(0, "coll", of="grad") if e.get("clipped")]
    if clips and len(reduced) >= 2 and run.world_size > 1:
        evidence = (
            f"gradients were clipped {len(clips)} times, then reduced over the ranks at {file_line(reduced[0]['at'])}"
        )
        yield finding_at("clip_before_reduce", clips[0]["at"], evidence)


def _clipped_under_no_sync(run: RecordedRun) -> Iterator[Finding]:
    """clip_before_reduce with DDP: gradients are clipped after a backward under no_sync, before DDP reduces them."""
    early = _clipped_early(run) if run.world_size > 1 and not first_of(run, _clipped_scaled) else []
    if len(early) >= MIN_REPEATS:
        evidence = (
            f"gradients were clipped {len(early)} times after a backward under no_sync, before the backward that "
            "reduces the accumulated gradients"
        )
        yield finding_at("clip_before_reduce", early[0]["at"], evidence)


def _clip_of_shards(run: RecordedRun) -> Iterator[Finding]:
    """clip_of_shards: each rank multiplies its gradient shards by a different factor."""
    steps = run.at_common_steps("before", "shrunk")
    unequal = [es for es in steps if any(abs(e["shrunk"] / es[0]["shrunk"] - 1) > UNLIKE for e in es)]
    if len(unequal) >= MIN_REPEATS:
        first = unequal[0]
        shown = " and ".join(f"{e['shrunk']:.4g}" for e in first[:2])
        evidence = (
            f"before {len(unequal)} of {len(steps)} steps the ranks multiplied their gradient shards by different "
            f"factors (at step {first[0]['step'] + 1}: {shown})"
        )
        line = script_lines.gradient_write(run, first[0]["at"])
        yield finding_at("clip_of_shards", first[0]["at"], evidence, line)


def _clipped_early(run: RecordedRun) -> list[Event]:
    """The "clip" events after a backward under no_sync, if a later backward of the same step reduces."""
    found: list[Event] = []
    waiting: list[Event] = []
    local = False
    for e in run.events(0, "backward", "clip", "before"):
        if e["k"] == "backward":
            local, found = bool(e["local"]) and not e["synced"], found + (waiting if e["synced"] else [])
        if e["k"] == "before" or e.get("synced"):
            waiting = []
        local = local and e["k"] != "before"
        waiting += [e] if local and e["k"] == "clip" and e["changed"] else []
    return found


# --- by hand


def _clipped_alone(run: RecordedRun) -> Iterator[Finding]:
    """clip_before_reduce by hand: the used gradient is the mean of the ranks' gradients, each times its own factor, and
    a factor below 1 is the same bound divided by the norm of that rank's gradient."""
    if not run.reduces_by_hand or any(run.events(0, "ddp", "fsdp")):
        return
    bounds: list[float] = []
    clipped = 0
    for events in _sampled(run):
        factors = _factors([e["own"] for e in events], events[0]["grads"])
        if factors is None:
            return
        pairs = [(len(events) * c, e["own_norm"]) for c, e in zip(factors, events)]
        below = [factor * norm for factor, norm in pairs if factor < 1 - UNLIKE]
        if any(abs(factor - 1) > UNLIKE for factor, _ in pairs if factor >= 1 - UNLIKE):
            return
        bounds += below
        clipped += bool(below) and max(f for f, _ in pairs) - min(f for f, _ in pairs) > UNLIKE
    if clipped >= _MIN_STEPS and len(bounds) >= MIN_REPEATS and not _unlike(bounds):
        reduction = next(run.events(0, "coll", of="grad"))
        evidence = (
            f"at {clipped} compared steps each rank's gradient was multiplied by its own factor before the sum, which "
            f"made its norm {bounds[0]:.4g}"
        )
        callers = reduction.get("by") or []
        beside = callers[1] if len(callers) > 1 else reduction["at"]
        line = script_lines.gradient_scaling(run, beside)
        yield finding_at("clip_before_reduce", line or reduction["at"], evidence, beside)


def _norm_summed_twice(run: RecordedRun) -> Iterator[Finding]:
    """norm_summed_twice: the ranks sum the squared norms of gradients that are already equal, and clip by the sum."""
    if any(run.events(0, "clip")) or any(run.events(0, "fsdp")):
        return
    sums = _sums_before_steps(run.ranks[0])
    found: list[tuple[Event, Event]] = []
    for events in _sampled(run):
        first, size = events[0], len(events)
        square = first["own_norm"] ** 2
        twice = [s for s in sums.get((first["opt"], first["step"]), ()) if not _unlike([s["result"][0], size * square])]
        factor = _multiple(first["own"], first["grads"])
        replicas = not _unlike([e["own_norm"] for e in events]) and all(e["own"] == first["own"] for e in events)
        if twice and replicas and factor is not None and factor < 1 - UNLIKE:
            found.append((first, twice[0]))
    if len(found) >= _MIN_STEPS and not divided_by_world(*found[0][1]["at"]):
        before, total = found[0]
        evidence = (
            f"at {len(found)} compared steps the squared norm of the gradients, which were already equal on all ranks, "
            f"was summed over the ranks ({total['result'][0]:.4g} instead of {before['own_norm'] ** 2:.4g}), and the "
            "gradients were clipped"
        )
        yield finding_at("norm_summed_twice", total["at"], evidence, before["at"])


def _sampled(run: RecordedRun) -> list[list[Event]]:
    """The peers' "before" events with samples of the gradients, for the steps at which no gradient is scaled."""
    steps = run.at_common_steps("before", "own") if len(run.peers) > 1 else []

    def is_known(e: Event) -> bool:
        norm = e.get("own_norm") or 0.0
        return bool(e.get("grads")) and norm > 0 and math.isfinite(norm) and e.get("scale", 1.0) == 1.0

    return [events for events in steps if all(map(is_known, events))]


def _sums_before_steps(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """(optimizer, step) -> the sums of one number between the last backward and this step."""
    found: dict[tuple[int, int], list[Event]] = {}
    since: list[Event] = []
    for e in events:
        if e["k"] == "backward":
            since = []
        elif e["k"] == "coll" and e.get("by") == "SUM" and len(e.get("result") or ()) == 1 and e["at"]:
            since.append(e)
        elif e["k"] == "before":
            found[e["opt"], e["step"]] = since
            since = []
    return found


def _values(samples: dict[str, list[float]]) -> list[float]:
    return [v for values in samples.values() for v in values[2:]]


def _multiple(own: dict[str, list[float]], used: dict[str, list[float]]) -> float | None:
    return multiple_of(_values(own), _values(used), UNLIKE) if own.keys() == used.keys() else None


def _factors(own: Sequence[dict[str, list[float]]], used: dict[str, list[float]]) -> list[float] | None:
    """The numbers c with used = sum of c_r * own_r; None if there are none, or they are not determined."""
    if any(one.keys() != used.keys() for one in own):
        return None
    columns, wanted = np.array([_values(one) for one in own]).T, np.array(_values(used))
    if not np.isfinite(columns).all() or not np.isfinite(wanted).all():
        return None
    found, _, rank, _ = np.linalg.lstsq(columns, wanted, rcond=1e-6)
    rest = np.linalg.norm(columns @ found - wanted)
    return found.tolist() if rank == len(own) and rest <= UNLIKE * np.linalg.norm(wanted) else None


def _unlike(numbers: Sequence[float]) -> bool:
    return max(numbers) - min(numbers) > UNLIKE * max(map(abs, numbers))
