"""Rules about an optimizer's use of gradients: dropped before a step, or shards treated as whole matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.doctor.findings import Finding
from paceline.doctor.rules import script_lines
from paceline.doctor.rules.recorded_run import Event, RecordedRun, finding_at, first_of_each
from paceline.observe.expressions import accumulates

MIN_STEPS = 3  # steps that come after dropped gradients
MOSTLY = 0.5  # fraction of the steps
MIN_SHARD_STEPS = 2  # steps that compute on shards
MIN_NORMS = 2  # norms of one shape in a step, such as of a weight and its update: a single norm may be only for a log
PROPORTIONAL = 1e-3  # relative deviation of a gradient from a multiple of another gradient


@dataclass
class _Window:
    """The backward passes between two steps of an optimizer, on rank 0."""

    before: Event  # the step's "before" event
    lost: list[Event] = field(default_factory=list)  # passes with gradients that were dropped before any step
    used: list[Event] = field(default_factory=list)  # the other passes
    at: list[object] = field(default_factory=list)  # the line that drops gradients, or []

    @property
    def every(self) -> list[Event]:
        return [*self.lost, *self.used]


def findings(run: RecordedRun) -> list[Finding]:
    """gradients_dropped, matrix_of_shard."""
    return first_of_each(run, _dropped, _matrices_of_shards)


def _dropped(run: RecordedRun) -> Iterator[Finding]:
    """gradients_dropped: a step uses only the gradients of its last micro-batches.

    A script may drop gradients on purpose: after another optimizer used them (a GAN), after the first of two passes
    over a batch, when it skips a step, or when it keeps the gradients elsewhere. So the rule requires, for at least
    half of the steps:

    - All backward passes come from one line, each with a new batch.
    - The step uses exactly the gradients of the passes that were not dropped.
    - The script shows that it accumulates: by no_sync, a divided loss, or the same number of passes at every step.
    """
    for opt in sorted({e["opt"] for e in run.events(0, "dropped")}):
        windows = _windows(run.ranks[0], opt)
        cut = [w for w in windows if w.lost and w.used and _is_one_loop(w)]
        if len(cut) >= max(MIN_STEPS, MOSTLY * len(windows)) and _accumulates(cut) and not _replaced(cut):
            first, lost, every = cut[0], sum(len(w.lost) for w in cut), sum(len(w.every) for w in cut)
            evidence = (
                f"the gradients of {lost} of {every} backward passes were dropped before a step used them; {len(cut)} "
                f"steps used only the last {len(first.used)} of {len(first.every)} passes"
            )
            at = first.at or script_lines.gradient_drop(run) or first.used[-1]["at"]
            yield finding_at("gradients_dropped", at, evidence)


def _windows(events: list[Event], opt: int) -> list[_Window]:
    passes: list[Event] = []  # all backward passes, each with "fresh": was a batch read since the previous pass?
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
    """Do all passes come from one line, each with a new batch or in a loop that names micro-batches?"""
    lines, at = {tuple(e["at"]) for e in window.every}, window.every[0]["at"]
    return len(lines) == 1 and bool(at) and (all(e["fresh"] for e in window.every) or accumulates(*at))


def _accumulates(windows: list[_Window]) -> bool:
    """Does the script mean to accumulate gradients?"""
    lost = [e for w in windows for e in w.lost]
    if all((e["local"] and not e["synced"]) or e.get("form", e["mean"]) == "divided" for e in lost):
        return True
    counts = Counter(len(w.every) for w in windows)
    return counts.most_common(1)[0][1] >= len(windows) - 1  # the first or the last window may be shorter


def _replaced(windows: list[_Window]) -> bool:
    """Did the optimizer get gradients that are not a multiple of those after the last backward? Then the script
    computes its own gradients, as DP-SGD does."""
    pairs = [(w.before["own"], w.before["grads"]) for w in windows if w.before.get("own") and w.before.get("grads")]
    return bool(pairs) and sum(not _proportional(own, given) for own, given in pairs) > MOSTLY * len(pairs)


def _proportional(own: dict[str, list[float]], given: dict[str, list[float]]) -> bool:
    names = [name for name in own if name in given and own[name][0] == given[name][0]]
    a = [v for name in names for v in own[name][2:]]
    b = [v for name in names for v in given[name][2:]]
    return not any(a) or multiple_of(a, b, PROPORTIONAL) is not None


def multiple_of(a: Sequence[float], b: Sequence[float], within: float) -> float | None:
    """The number c with b = c * a, up to this relative deviation; None if there is no such number."""
    square = sum(x * x for x in a)
    factor = sum(x * y for x, y in zip(a, b)) / square if square else 0.0
    rest = sum((y - factor * x) ** 2 for x, y in zip(a, b))
    return factor if square and rest <= within**2 * sum(y * y for y in b) else None


# --- shards


def _matrices_of_shards(run: RecordedRun) -> Iterator[Finding]:
    """matrix_of_shard: in its steps an optimizer multiplies or decomposes matrices of a shard's shape, or takes two
    norms of such matrices, and does not communicate. (Communication may sum the products over the ranks.)"""
    for rank in range(run.processes):
        steps = _steps(run.ranks[rank])
        wrong = [(found, end) for found, end in steps if found and not end["exchanged"]]
        if len(wrong) >= max(MIN_SHARD_STEPS, len(steps)):
            (first, *_), end = wrong[0]
            part, whole = (" x ".join(map(str, shape)) for shape in (first["shape"], first["whole"]))
            what = f"multiplied ({first['op']})" if first["kind"] == "product" else f"took the norm ({first['op']}) of"
            evidence = (
                f"in each of {len(wrong)} inspected steps, {end['optimizer']} {what} rank {rank}'s shard ({part}) of "
                f"{first['weight']} ({whole}), without communication between ranks"
            )
            yield finding_at("matrix_of_shard", first["at"], evidence)


def _steps(events: list[Event]) -> list[tuple[list[Event], Event]]:
    """(operations on shards, the "shards" event) of each inspected step."""
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
