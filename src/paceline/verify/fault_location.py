"""In which line of the script a fault is: read from traced runs (verify/worker/script_tracer.py). Pure.

Each rank has two traces: one of the run as it was (L), one of the run in which it was told that it is alone (LD). Where
these differ, the script has asked for the rank or for the number of processes. Then the line is that of the first event
that differs, among the kinds of events that bring about such a fault.

Else the parts of the batch are compared with the whole batch (LC); or the line is that of the event itself, such as
the write to a buffer. Where no trace tells, the text of the script is searched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from paceline.observe.script_stack import Place
from paceline.observe.slicing import (
    CLOCK,
    RANK,
    Slice,
    acting_lines,
    calling_line,
    carried_state,
    defining_line,
    matching_line,
)
from paceline.verify.trace_diff import (
    RANDOM,
    BatchParts,
    Divergence,
    Event,
    ScriptTrace,
    first_divergence,
    first_mixing,
    first_unmatched,
    place_of,
)

_WORDS = {  # the key of a cause -> the words of a script that sets it
    "batch-norm-per-shard": r"batch_norm",
    "not-in-the-model": r"requires_grad=True|nn\.Parameter\(|requires_grad_\(",
    "clipped-early": r"clip_grad|\.grad\b",
    "scheduler-steps": r"sched\w*\.step\(|scheduler\.step\(",
    "learning-rate-scaled": r"\blr\b",
}
HOOKS_ON_GRADIENTS = {
    "register_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_post_accumulate_grad_hook",
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """What is looked for."""

    cause: str  # the key of its cause
    quantity: str  # what differs first
    name: str | None  # of the parameter or the buffer
    step: int  # the step in which it differs


@dataclass(frozen=True)
class FaultLine:
    """The line that was found."""

    place: Place  # the line
    # Another line that has to do with it: the branch that decides on it, or where a statistic is used.
    beside: Place | None = None
    found: Divergence | None = None  # the event at this line
    asks: bool = False  # the run does something else there when it is told that it is alone


def find_line(
    fault: Fault, ours: Sequence[ScriptTrace], told: Sequence[ScriptTrace], cut: Iterable[BatchParts]
) -> FaultLine | None:
    """The line of a fault; None where none was found.

    Args:
        ours, told: the traces of L and LD, by rank.
        cut: the losses of the step, where the parts of the batch are to be compared with the whole batch.
    """
    asked = {place_of(e) for t in (*ours, *told) for e in t.events_of("ask")}
    pairs = list(zip(ours, told, strict=False))
    found = _first_by_asking(fault, pairs)
    if found is not None:
        return _origin(found, asked)
    if told:
        return _asking_line_by_text(fault, ours, asked)
    by_event = _own_event(fault, ours)
    if by_event is not None and fault.quantity not in ("loss", "gradient"):
        if fault.quantity == "examples" and (where := _asking_line_by_text(fault, ours, asked)) is not None:
            return where
        place = place_of(by_event.event)
        beside = defining_line(place) if fault.quantity == "buffers" else None
        return FaultLine(place, beside or calling_line(place), by_event)
    for one in cut:
        mixed = first_mixing(one)
        if mixed is not None:
            also = mixed.also
            if also is None and fault.cause in ("mean-of-means", "in-batch-loss"):  # where the loss is, beside
                trace, root = one.whole
                also = root if fault.cause == "mean-of-means" else trace.at(root["of"])
            return FaultLine(mixed.place, place_of(also) if also is not None else None, mixed)
    if by_event is not None:
        return FaultLine(place_of(by_event.event), found=by_event)
    return _line_by_text(fault, ours, asked)


def _origin(found: Divergence, asked: set[Place]) -> FaultLine:
    origin = Slice(RANK, asked).origin(found.place)
    if origin is None:
        # The answer goes through an object's attributes: what the script does with it stands elsewhere.
        place = _first_acting([file for file, _ in sorted(asked)], RANK, asked) or found.place
        return FaultLine(place, found.place if place != found.place else None, found, asks=True)
    place, branch = origin
    beside = branch if branch not in (None, place) else found.place if found.place != place else None
    return FaultLine(place, beside, found, asks=True)


def _first_acting(files: Iterable[str], source: re.Pattern[str], asked: Collection[Place] = ()) -> Place | None:
    """The first line in these files that does something with a source."""
    return next((place for file in dict.fromkeys(files) for place in acting_lines(file, source, asked)), None)


def _first_by_asking(fault: Fault, pairs: Sequence[tuple[ScriptTrace, ScriptTrace]]) -> Divergence | None:
    """The first event of the kinds that bring about such a fault which a rank has only as one of several processes."""
    found = (rule(a, b) for rule in _rules(fault) for a, b in pairs)
    return next((divergence for divergence in found if divergence is not None), None)


Rule = Callable[[ScriptTrace, ScriptTrace], Divergence | None]
Wanted = Callable[[Event], bool]


def _rules(fault: Fault) -> list[Rule]:
    step, name = fault.step, fault.name

    def first_of(*kinds: str, target: str | None = None, only: str | None = None) -> Rule:
        def rule(a: ScriptTrace, b: ScriptTrace) -> Divergence | None:
            if target is not None:
                a, b = _writes_to(a, target, name), _writes_to(b, target, name)
            if only is not None:
                a, b = (ScriptTrace([e for e in trace.events if e["name"] == only]) for trace in (a, b))
            return first_unmatched(a, b, *kinds, step=step)

        return rule

    def or_seed(found: Divergence | None, a: ScriptTrace, b: ScriptTrace) -> Divergence | None:
        drawn = found is not None and found.event["name"] in RANDOM and found.how == "values"
        return (first_unmatched(a, b, "seed", step=step) if drawn else None) or found

    def loss(a: ScriptTrace, b: ScriptTrace) -> Divergence | None:
        found = first_divergence(a, b, step)
        kept = found is not None and found.how == "state"
        return (first_unmatched(a, b, "write", step=step - 1) if kept else None) or or_seed(found, a, b)

    def backward(a: ScriptTrace, b: ScriptTrace) -> Divergence | None:
        found = first_unmatched(_ops(a, step, True), _ops(b, step, True), "op")
        return None if found is None else _at_hook(found, a)

    def fetched(a: ScriptTrace, b: ScriptTrace) -> Divergence | None:
        return or_seed(first_unmatched(_ops(a, step, False), _ops(b, step, False), "op"), a, b)

    options = first_of("option")
    gradient, weights = first_of("write", target="gradient"), first_of("write", target="weights")
    rules: dict[str, list[Rule]] = {
        "initial weights": [weights, first_of("seed"), first_of("write")],
        "weights": [weights, first_of("write", target="state"), options, first_of("write"), gradient],
        "optimizer state": [first_of("write", target="state"), weights, options],
        "learning rate": [first_of("option", only="lr"), options],
        "gradient": [gradient, backward, first_of("hook"), loss],
        "loss": [loss, first_of("set"), first_of("seed")],
        "data": [fetched, first_of("seed"), first_of("set")],
        "examples": [first_of("loader"), first_of("seed")],
        "buffers": [first_of("write", target="buffers"), loss, first_of("write")],
    }
    return rules.get(fault.quantity, [])


def _writes_to(trace: ScriptTrace, kind: str, name: str | None) -> ScriptTrace:
    """The writes to this tensor; where there is none, to any tensor of its kind."""
    exact = [e for e in trace.events if e.get("target") == f"{kind}:{name}"]
    return ScriptTrace(exact or [e for e in trace.events if str(e.get("target", "")).startswith(f"{kind}:")])


def _at_hook(found: Divergence, trace: ScriptTrace) -> Divergence | None:
    """An op in a backward, at the line that it belongs to.

    A hook that is no function of the script's (torch.clamp in a functools.partial, say) has no line of its own, so its
    ops have the line of the backward call. They belong to the line that put the hook there. None where there is none.
    """
    if found.place not in {place_of(root) for root in trace.events_of("root")}:
        return found
    hooks = [event for event in trace.events_of("hook") if event["name"] in HOOKS_ON_GRADIENTS]
    return Divergence(hooks[-1], found.how) if hooks else None


def _ops(trace: ScriptTrace, step: int, backward: bool) -> ScriptTrace:
    """The ops of the backward of that step; or the ops before that step which are in no backward."""
    if backward:
        return ScriptTrace([e for e in trace.events_of("op") if e["backward"] and e["step"] == step])
    return ScriptTrace([e for e in trace.events_of("op") if not e["backward"] and e["step"] < step])


def state_line(step: int, ours: Sequence[ScriptTrace]) -> FaultLine | None:
    """The statement that updates what the script keeps from step to step in Python's own variables."""
    files = list(dict.fromkeys(place_of(e)[0] for t in ours for e in t.events))
    places = carried_state(files, [place_of(e) for t in ours for e in t.roots(step)])
    return FaultLine(*places[0]) if places else None


def _own_event(fault: Fault, ours: Sequence[ScriptTrace]) -> Divergence | None:
    """The event that does what the cause says, in the run in question alone."""
    events = [e for trace in ours for e in trace.events]

    def of(*kinds: str, **fields: object) -> Wanted:
        return lambda e: e["k"] in kinds and all(e.get(name) == value for name, value in fields.items())

    def writes(kind: str) -> list[Wanted]:
        def to_kind(e: Event) -> bool:
            return e["k"] == "write" and str(e.get("target")).startswith(f"{kind}:") and e["step"] >= 0

        return [lambda e: to_kind(e) and e["target"] == f"{kind}:{fault.name}", to_kind]

    backward, lr = of("op", backward=True), of("option", name="lr")
    late = str(fault.name).rpartition(".")[2]
    by_cause: dict[str, list[Wanted]] = {
        "buffer-not-synchronised": writes("buffers"),
        "clipped-early": [*writes("gradient"), of("hook"), backward],
        "registered-late": [lambda e: e["k"] == "parameter" and e["name"].endswith(late)],
    }
    by_quantity: dict[str, list[Wanted]] = {
        "buffers": writes("buffers"),
        "weights": [*writes("weights"), *writes("state")],
        "optimizer state": [*writes("weights"), *writes("state")],
        "initial weights": [of("seed"), lambda e: str(e.get("target")).startswith("weights:")],
        "learning rate": [lambda e: lr(e) and e["step"] >= 0, lr],
        "examples": [of("loader")],
        "gradient": [*writes("gradient"), backward],
    }
    if fault.cause == "overflow-on-some-ranks" and fault.quantity != "buffers":
        return _first_overflow(ours)
    quantity = "buffers" if fault.quantity == "buffers" else ""
    for wanted in by_quantity.get(quantity) or by_cause.get(fault.cause) or by_quantity.get(fault.quantity, []):
        found = [e for e in events if wanted(e)]
        near = [e for e in found if e["step"] >= fault.step - 1]
        if found:
            first = Divergence((near or found)[0], "values")
            return _at_hook(first, ScriptTrace(events)) if wanted is backward else first
    return None


def _first_overflow(ours: Sequence[ScriptTrace]) -> Divergence | None:
    """The first op with a result that is not finite and inputs that are."""
    for trace in ours:
        for event in trace.events_of("op"):
            if 1e308 in (event["values"] or ()) and not any(
                1e308 in (one["values"] or ()) for one in trace.inputs(event) if one is not None
            ):
                return Divergence(event, "values")
    return None


def _asking_line_by_text(fault: Fault, ours: Sequence[ScriptTrace], asked: set[Place]) -> FaultLine | None:
    """The script asks for the rank, and no event differs: the line that does something with the answer, by the text."""
    for event in (e for trace in ours for e in trace.events_of("loader") if fault.quantity == "examples"):
        origin = Slice(RANK, asked).origin(place_of(event))
        if origin is not None and origin[0] != place_of(event):
            return FaultLine(origin[0], place_of(event), asks=True)
    place = _first_acting([file for file, _ in sorted(asked)], RANK, asked)
    return None if place is None else FaultLine(place, asks=True)


def _line_by_text(fault: Fault, ours: Sequence[ScriptTrace], asked: set[Place]) -> FaultLine | None:
    """A line of the traced files that contains the words of the cause, or does something with a rank."""
    files = list(dict.fromkeys([*(place_of(e)[0] for t in ours for e in t.events), *(file for file, _ in asked)]))
    place = matching_line(files, re.compile(_WORDS[fault.cause])) if fault.cause in _WORDS else None
    if fault.cause == "not-deterministic":
        place = _first_acting(files, CLOCK)
    elif place is None and asked:
        place = _first_acting(files, RANK, asked)
    if place is None and fault.cause != "not-deterministic" and fault.quantity == "loss":
        root = next((e for t in ours for e in t.roots(fault.step)), None)
        place = None if root is None else _loss_line(root, ours)
    return None if place is None else FaultLine(place)


def _loss_line(root: Event, ours: Sequence[ScriptTrace]) -> Place:
    trace = next(t for t in ours if any(e is root for e in t.events))
    event = trace.at(root["of"]) or root
    return place_of(event)


def chance_line(first: Sequence[ScriptTrace], second: Sequence[ScriptTrace], step: int) -> FaultLine | None:
    """Where two runs that ought to be alike diverge."""
    for a, b in zip(first, second, strict=False):
        for found in (
            first_unmatched(a, b, "seed", step=step),
            first_unmatched(a, b, "op", "write", step=-1),
            first_divergence(a, b, step),
            first_unmatched(a, b, "op", "write", step=step),
        ):
            if found is not None:
                origin = Slice(CLOCK).origin(found.place)
                place, branch = origin if origin is not None else (found.place, None)
                return FaultLine(place, branch or (found.place if found.place != place else None), found)
    return None
