"""Where in the script a cause is: which of the events that were watched (trial/lines.py) it is, by what differs. Pure.

Of each rank there are two runs: one as it was (L), one in which it was told that it is alone (LD). Where what they do
is unlike, the script has asked for the rank or for the number of processes, and the first unlike event of the kind that
the fault is of is where that acts. Else the batch's parts are compared with the whole (LC), or the place is
that of the event itself: the line that writes the buffer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.tools.lines import RANDOM, Cut, Event, Found, Trace, apart, mixing, unlike
from paceline.tools.source import CLOCK, RANK, Place, Slice, acting, called_at, kept, made_of, matching

_WORDS = {  # what a script says where the cause is one of its settings
    "batch-norm-per-shard": r"batch_norm",
    "not-in-the-model": r"requires_grad=True|nn\.Parameter\(|requires_grad_\(",
    "clipped-early": r"clip_grad|\.grad\b",
    "scheduler-steps": r"sched\w*\.step\(|scheduler\.step\(",
    "learning-rate-scaled": r"\blr\b",
}


@dataclass(frozen=True)
class Sought:
    """cause: its name. quantity: that differs first; name: of the parameter or buffer; step: in which."""

    cause: str
    quantity: str
    name: str | None
    step: int


@dataclass(frozen=True)
class Where:
    """place: the line. beside: another that has to do with it: the branch that decides, or what uses a statistic.
    found: the event. asks: the runs that are told to be alone do something else there."""

    place: Place
    beside: Place | None = None
    found: Found | None = None
    asks: bool = False


def locate(sought: Sought, ours: Sequence[Trace], told: Sequence[Trace], cut: Iterable[Cut]) -> Where | None:
    """ours, told: by rank. cut: of the step, where the batch's parts are to be compared with the whole."""
    asked = {(e["file"], e["line"]) for t in (*ours, *told) for e in t.of("ask")}
    pairs = list(zip(ours, told, strict=False))
    found = _asking(sought, pairs)
    if found is not None:
        return _origin(found, asked)
    if told:
        return _asked_in_words(sought, ours, asked)
    by_event = _itself(sought, ours)
    if by_event is not None and sought.quantity not in ("loss", "gradient"):
        if sought.quantity == "examples" and (where := _asked_in_words(sought, ours, asked)) is not None:
            return where
        place = _place(by_event.event)
        beside = made_of(place) if sought.quantity == "buffers" else None
        return Where(place, beside or called_at(place), by_event)
    for one in cut:
        mixed = mixing(one)
        if mixed is not None:
            also = mixed.also
            if also is None and sought.cause in ("mean-of-means", "in-batch-loss"):  # where the loss is, beside
                trace, root = one.whole
                also = root if sought.cause == "mean-of-means" else trace.at(root["of"])
            return Where(mixed.place, _place(also) if also is not None else None, mixed)
    if by_event is not None:
        return Where(_place(by_event.event), found=by_event)
    return _by_words(sought, ours, asked)


def _place(event: Event) -> Place:
    return event["file"], event["line"]


def _origin(found: Found, asked: set[Place]) -> Where:
    origin = Slice(RANK, asked).origin(found.place)
    if (
        origin is None
    ):  # the way is through an object's attributes: what the script does with the answer stands elsewhere
        places = [
            place for file in dict.fromkeys(file for file, _ in sorted(asked)) for place in acting(file, RANK, asked)
        ]
        if places:
            return Where(places[0], found.place if found.place != places[0] else None, found, asks=True)
        return Where(found.place, found=found, asks=True)
    place, branch = origin
    beside = branch if branch not in (None, place) else found.place if found.place != place else None
    return Where(place, beside, found, asks=True)


def _asking(sought: Sought, pairs: Sequence[tuple[Trace, Trace]]) -> Found | None:
    """The first event, of the kinds that bring about such a difference, that a rank has only as one of several."""
    for rule in _rules(sought):
        for a, b in pairs:
            if (found := rule(a, b)) is not None:
                return found
    return None


Rule = Callable[[Trace, Trace], Found | None]


def _rules(sought: Sought) -> list[Rule]:
    step, name = sought.step, sought.name

    def of(*kinds: str, target: str | None = None, before: bool = False) -> Rule:
        def rule(a: Trace, b: Trace) -> Found | None:
            if target is not None:
                a, b = _targeting(a, target, name), _targeting(b, target, name)
            return unlike(a, b, *kinds, step=step - 1 if before else step)

        return rule

    def loss(a: Trace, b: Trace) -> Found | None:
        found = apart(a, b, step)
        if found is not None and found.event["name"] in RANDOM and found.how == "values":
            return unlike(a, b, "seed", step=step) or found
        if found is not None and found.how == "state":
            return unlike(a, b, "write", step=step - 1) or found
        return found

    def backward(a: Trace, b: Trace) -> Found | None:
        return unlike(_only(a, step, True), _only(b, step, True), "op")

    def fetched(a: Trace, b: Trace) -> Found | None:
        found = unlike(_only(a, step, False), _only(b, step, False), "op")
        if found is not None and found.event["name"] in RANDOM and found.how == "values":
            return unlike(a, b, "seed", step=step) or found
        return found

    def lr(a: Trace, b: Trace) -> Found | None:
        return unlike(_named(a, ("lr",)), _named(b, ("lr",)), "option", step=step)

    options = of("option")
    gradient, weights = of("write", target="gradient"), of("write", target="weights")
    rules: dict[str, list[Rule]] = {
        "initial weights": [weights, of("seed"), of("write")],
        "weights": [weights, of("write", target="state"), options, of("write"), gradient],
        "optimizer state": [of("write", target="state"), weights, options],
        "learning rate": [lr, options],
        "gradient": [gradient, backward, of("hook"), loss],
        "loss": [loss, of("set"), of("seed")],
        "data": [fetched, of("seed"), of("set")],
        "examples": [of("loader"), of("seed")],
        "buffers": [of("write", target="buffers"), loss, of("write")],
    }
    return rules.get(sought.quantity, [])


def _targeting(trace: Trace, kind: str, name: str | None) -> Trace:
    exact = [e for e in trace.events if e.get("target") == f"{kind}:{name}"]
    return Trace(exact or [e for e in trace.events if str(e.get("target", "")).startswith(f"{kind}:")])


def _only(trace: Trace, step: int, backward: bool) -> Trace:
    """Ops of the backward of that step; or those that are no part of a step's forward and backward, before it."""
    if backward:
        return Trace([e for e in trace.of("op") if e["backward"] and e["step"] == step])
    return Trace([e for e in trace.of("op") if not e["backward"] and e["step"] < step])


def _named(trace: Trace, names: tuple[str, ...]) -> Trace:
    return Trace([e for e in trace.events if e["name"] in names])


def of_state(step: int, ours: Sequence[Trace]) -> Where | None:
    """What the script goes on with from step to step, in Python's own variables: the statement that updates it."""
    files = list(dict.fromkeys(e["file"] for t in ours for e in t.events))
    places = kept(files, [_place(e) for t in ours for e in t.roots(step)])
    return Where(*places[0]) if places else None


def _itself(sought: Sought, ours: Sequence[Trace]) -> Found | None:
    """The event that does what the cause says, in the run in question alone."""
    events = [e for trace in ours for e in trace.events]

    def first(wanted: Callable[[Event], bool]) -> Found | None:
        found = [e for e in events if wanted(e)]
        near = [e for e in found if e["step"] >= sought.step - 1]
        return Found((near or found)[0], "values") if found else None

    def writes(kind: str) -> Found | None:
        exact = f"{kind}:{sought.name}"
        found = first(lambda e: e["kind"] == "write" and e.get("target") == exact and e["step"] >= 0)
        return found or first(
            lambda e: e["kind"] == "write" and str(e.get("target")).startswith(f"{kind}:") and e["step"] >= 0
        )

    if sought.cause == "buffer-not-synchronised" or sought.quantity == "buffers":
        return writes("buffers")
    if sought.cause == "clipped-early":
        return writes("gradient") or first(lambda e: e["kind"] == "hook") or first(lambda e: e.get("backward") is True)
    if sought.cause == "overflow-on-some-ranks":
        return _overflow(ours)
    if sought.cause == "registered-late":
        return first(lambda e: e["kind"] == "parameter" and e["name"].endswith(str(sought.name).rpartition(".")[2]))
    if sought.quantity in ("weights", "optimizer state"):
        return writes("weights") or writes("state")
    if sought.quantity == "initial weights":
        return first(lambda e: e["kind"] == "seed") or first(lambda e: str(e.get("target")).startswith("weights:"))
    if sought.quantity == "learning rate":
        moved = first(lambda e: e["kind"] == "option" and e["name"] == "lr" and e["step"] >= 0)
        return moved or first(lambda e: e["kind"] == "option" and e["name"] == "lr")
    if sought.quantity == "examples":
        return first(lambda e: e["kind"] == "loader")
    if sought.quantity == "gradient":
        return writes("gradient") or first(lambda e: e.get("backward") is True)
    return None


def _overflow(ours: Sequence[Trace]) -> Found | None:
    for trace in ours:
        for event in trace.of("op"):
            if 1e308 in (event["values"] or ()) and not any(
                1e308 in (one["values"] or ()) for one in trace.inputs(event) if one is not None
            ):
                return Found(event, "values")
    return None


def _asked_in_words(sought: Sought, ours: Sequence[Trace], asked: set[Place]) -> Where | None:
    """The script asks, and nothing that was watched is unlike: from what its text does with the answer."""
    files = list(dict.fromkeys(file for file, _ in sorted(asked)))
    if sought.quantity == "examples":
        for event in (e for trace in ours for e in trace.of("loader")):
            if (origin := Slice(RANK, asked).origin(_place(event))) is not None and origin[0] != _place(event):
                return Where(origin[0], _place(event), asks=True)
    for file in files:
        if places := acting(file, RANK, asked):
            return Where(places[0], asks=True)
    return None


def _by_words(sought: Sought, ours: Sequence[Trace], asked: set[Place]) -> Where | None:
    """From the text of the files that were seen: by what it says, or by what it does with a rank."""
    files = list(dict.fromkeys([*(e["file"] for t in ours for e in t.events), *(file for file, _ in asked)]))
    if sought.cause in _WORDS and (place := matching(files, re.compile(_WORDS[sought.cause]))) is not None:
        return Where(place)
    if sought.cause == "not-deterministic":
        for file in files:
            if places := acting(file, CLOCK):
                return Where(places[0])
        return None
    if asked:
        for file in files:
            if places := acting(file, RANK, asked):
                return Where(places[0])
    if sought.quantity == "loss" and (root := next((e for t in ours for e in t.roots(sought.step)), None)) is not None:
        return Where(_of_the_loss(root, ours))
    return None


def _of_the_loss(root: Event, ours: Sequence[Trace]) -> Place:
    trace = next(t for t in ours if any(e is root for e in t.events))
    event = trace.at(root["of"]) or root
    return _place(event)


def unsteady(first: Sequence[Trace], second: Sequence[Trace], step: int) -> Where | None:
    """Of two runs that ought to be alike: where they become unlike."""
    for a, b in zip(first, second, strict=False):
        for found in (
            unlike(a, b, "seed", step=step),
            unlike(a, b, "op", "write", step=-1),
            apart(a, b, step),
            unlike(a, b, "op", "write", step=step),
        ):
            if found is not None:
                origin = Slice(CLOCK).origin(found.place)
                place, branch = origin if origin is not None else (found.place, None)
                return Where(place, branch or (found.place if found.place != place else None), found)
    return None
