"""Rules about what an optimizer makes of gradients: some are computed and never used, or used as shards of matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of_each
from paceline.observe.expressions import accumulates

MIN_STEPS = 3  # steps before which gradients are dropped
MOSTLY = 0.5  # of the steps
MIN_SHARD_STEPS = 2  # steps that compute of shards
MIN_NORMS = 2  # norms of one shape in a step, as of a weight and its update: one alone may only be looked at
PROPORTIONAL = 1e-3  # relative deviation of a gradient from a multiple of another one


@dataclass
class _Window:
    """The backward passes between two steps of an optimizer, on rank 0."""

    before: Event  # the step's "before" event
    lost: list[Event] = field(default_factory=list)  # the passes whose gradients were dropped, and no optimizer used
    used: list[Event] = field(default_factory=list)  # the others
    at: list[object] = field(default_factory=list)  # the line that drops them, or []

    @property
    def every(self) -> list[Event]:
        return [*self.lost, *self.used]


def findings(run: RecordedRun) -> list[Finding]:
    """gradients_dropped, matrix_of_shard."""
    return first_of_each(run, _dropped, _matrices_of_shards)


def _dropped(run: RecordedRun) -> Iterator[Finding]:
    """gradients_dropped: of the micro-batches of a step the gradients of the last one alone are left.

    Gradients may be dropped on purpose: those that another optimizer has used (a GAN), of a first pass of two over a
    batch, of a step that is skipped, or gradients that the script keeps elsewhere. So the dropped and the used passes
    must come from the same line and each have a batch of its own, at most steps alike, and the step must be given just
    what the used passes made. That the script accumulates must show: in no_sync, in a divided loss, or in the same
    number of passes at every step.
    """
    for opt in sorted({e["opt"] for e in run.events(0, "dropped")}):
        windows = _windows(run.ranks[0], opt)
        cut = [w for w in windows if w.lost and w.used and _is_one_loop(w)]
        if len(cut) >= max(MIN_STEPS, MOSTLY * len(windows)) and _accumulates(cut) and not _replaced(cut):
            first, lost, every = cut[0], sum(len(w.lost) for w in cut), sum(len(w.every) for w in cut)
            evidence = (
                f"the gradients of {lost} of {every} backward passes were dropped before a step used them; at each of "
                f"{len(cut)} steps those of the last {len(first.used)} of {len(first.every)} were left"
            )
            at = first.at or script_lines.gradient_drop(run) or first.used[-1]["at"]
            yield finding_at("gradients_dropped", at, evidence)


def _windows(events: list[Event], opt: int) -> list[_Window]:
    passes: list[Event] = []  # all backward passes, each with "fresh": was a batch read since the one before?
    found: list[_Window] = []
    elsewhere = {n for e in events if e["k"] == "before" and e["opt"] != opt for n in e.get("uses") or ()}
    lost: list[int] = []
    at: list[object] = []
    fresh = False
    for e in events:
        if e["k"] == "yield":
            fresh = True
        elif e["k"] == "backward":
            passes.append({**e, "fresh": fresh})
            fresh = False
        elif e["k"] == "dropped" and e["opt"] == opt:
            lost += [n for n in e["passes"] if n not in elsewhere]
            at = at or e["at"]
        elif e["k"] == "before" and e["opt"] == opt:
            numbers = [[n for n in part if n <= len(passes)] for part in (lost, e.get("uses") or [])]
            gone, used = ([passes[n - 1] for n in part] for part in numbers)
            found.append(_Window(e, gone, used, at))
            lost, at = [], []
    return found


def _is_one_loop(window: _Window) -> bool:
    """Do all passes come from one line, each with a batch of its own, or in a loop over micro-batches by its words?"""
    lines, at = {tuple(e["at"]) for e in window.every}, window.every[0]["at"]
    return len(lines) == 1 and bool(at) and (all(e["fresh"] for e in window.every) or accumulates(*at))


def _accumulates(windows: list[_Window]) -> bool:
    """Does the script mean to accumulate gradients?"""
    lost = [e for w in windows for e in w.lost]
    if all((e["local"] and not e["synced"]) or e.get("form", e["mean"]) == "divided" for e in lost):
        return True
    counts = Counter(len(w.every) for w in windows)
    return counts.most_common(1)[0][1] >= len(windows) - 1  # the first window, or an epoch's last one, may be shorter


def _replaced(windows: list[_Window]) -> bool:
    """Was the optimizer given something else than a multiple of what the last backward left? Then the script has kept
    the gradients itself, as DP-SGD does."""
    pairs = [(w.before["own"], w.before["grads"]) for w in windows if w.before.get("own") and w.before.get("grads")]
    return bool(pairs) and sum(not _proportional(own, given) for own, given in pairs) > MOSTLY * len(pairs)


def _proportional(own: dict[str, list[float]], given: dict[str, list[float]]) -> bool:
    names = [name for name in own if name in given and own[name][0] == given[name][0]]
    a = [v for name in names for v in own[name][2:]]
    b = [v for name in names for v in given[name][2:]]
    return not any(a) or multiple_of(a, b, PROPORTIONAL) is not None


def multiple_of(a: Sequence[float], b: Sequence[float], within: float) -> float | None:
    """c where b = c * a, but for this relative deviation; None where there is no such number."""
    square = sum(x * x for x in a)
    factor = sum(x * y for x, y in zip(a, b)) / square if square else 0.0
    rest = sum((y - factor * x) ** 2 for x, y in zip(a, b))
    return factor if square and rest <= within**2 * sum(y * y for y in b) else None


# --- shards


def _matrices_of_shards(run: RecordedRun) -> Iterator[Finding]:
    """matrix_of_shard: in its steps an optimizer multiplies or decomposes matrices of a shard's shape, or takes two
    norms of them, and exchanges nothing. (Products of shards may be summed over the ranks.)"""
    for rank in range(run.processes):
        steps = _steps(run.ranks[rank])
        wrong = [(found, end) for found, end in steps if found and not end["exchanged"]]
        if len(wrong) >= max(MIN_SHARD_STEPS, len(steps)):
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
