"""Find the line of the script that contains a fault, from traced runs (verify/worker/script_tracer.py). Pure.

Each rank has two traces: L repeats the subject run, and LD reports rank 0 of 1 to the script. If they differ, the
script uses its rank or world size. The fault is then at the first event that differs. Only events of a kind that can
cause the fault are compared.

Otherwise the parts of the batch are compared with the whole batch (LC), or the fault is at a recorded event, such as a
write to a buffer. If no trace shows the line, the source of the script is searched.
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

_WORDS = {  # the key of a cause -> a pattern that matches script lines with this cause
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
    """The fault to locate."""

    cause: str  # the key of its cause
    quantity: str  # the first quantity that differs
    name: str | None  # the parameter or buffer
    step: int  # the step with the difference


@dataclass(frozen=True)
class FaultLine:
    """The line of a fault."""

    place: Place  # the line
    # A related line: the branch that leads to it, or the use of a statistic.
    beside: Place | None = None
    found: Divergence | None = None  # the event at this line
    asks: bool = False  # the line behaves differently when the script sees rank 0 of 1


def find_line(
    fault: Fault, ours: Sequence[ScriptTrace], alone: Sequence[ScriptTrace], cut: Iterable[BatchParts]
) -> FaultLine | None:
    """Find the line of a fault; None if no line was found.

    Args:
        ours, alone: the traces of L and LD, by rank. `alone` is empty if LD has the fault too.
        cut: the losses of the step, in parts and whole; empty if they should not be compared.
    """
    asked = {place_of(e) for t in (*ours, *alone) for e in t.events_of("ask")}
    pairs = list(zip(ours, alone, strict=False))
    found = _first_by_rank_queries(fault, pairs)
    if found is not None:
        return _origin(found, asked)
    if alone:
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
            if also is None and fault.cause in ("mean-of-means", "in-batch-loss"):  # show the loss as the second line
                trace, root = one.whole
                also = root if fault.cause == "mean-of-means" else trace.at(root["of"])
            return FaultLine(mixed.place, place_of(also) if also is not None else None, mixed)
    if by_event is not None:
        return FaultLine(place_of(by_event.event), found=by_event)
    return _line_by_text(fault, ours, asked)


def _origin(found: Divergence, asked: set[Place]) -> FaultLine:
    origin = Slice(RANK, asked).origin(found.place)
    if origin is None:
        # The script passes the rank through an object's attribute, so another line uses the rank.
        place = _first_acting([file for file, _ in sorted(asked)], RANK, asked) or found.place
        return FaultLine(place, found.place if place != found.place else None, found, asks=True)
    place, branch = origin
    beside = branch if branch not in (None, place) else found.place if found.place != place else None
    return FaultLine(place, beside, found, asks=True)


def _first_acting(files: Iterable[str], source: re.Pattern[str], asked: Collection[Place] = ()) -> Place | None:
    """The first line in these files that uses a source, such as the rank or the clock."""
    return next((place for file in dict.fromkeys(files) for place in acting_lines(file, source, asked)), None)


def _first_by_rank_queries(fault: Fault, pairs: Sequence[tuple[ScriptTrace, ScriptTrace]]) -> Divergence | None:
    """The first event that differs between a rank's traces L and LD, among the kinds that can cause the fault."""
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
    """The writes to this tensor; if there are none, the writes to any tensor of its kind."""
    exact = [e for e in trace.events if e.get("target") == f"{kind}:{name}"]
    return ScriptTrace(exact or [e for e in trace.events if str(e.get("target", "")).startswith(f"{kind}:")])


def _at_hook(found: Divergence, trace: ScriptTrace) -> Divergence | None:
    """Assign an op in a backward to its line.

    A hook that is no function of the script (such as torch.clamp in a functools.partial) has no line in the script, so
    its ops are recorded at the line of the backward call. They are assigned to the line that registers the hook. None
    if no hook was registered.
    """
    if found.place not in {place_of(root) for root in trace.events_of("root")}:
        return found
    hooks = [event for event in trace.events_of("hook") if event["name"] in HOOKS_ON_GRADIENTS]
    return Divergence(hooks[-1], found.how) if hooks else None


def _ops(trace: ScriptTrace, step: int, backward: bool) -> ScriptTrace:
    """If `backward`, the ops in the backward of this step. Otherwise the ops before this step, outside any backward."""
    if backward:
        return ScriptTrace([e for e in trace.events_of("op") if e["backward"] and e["step"] == step])
    return ScriptTrace([e for e in trace.events_of("op") if not e["backward"] and e["step"] < step])


def state_line(step: int, ours: Sequence[ScriptTrace]) -> FaultLine | None:
    """Find the statement that updates a Python variable which the script keeps from step to step."""
    files = list(dict.fromkeys(place_of(e)[0] for t in ours for e in t.events))
    places = carried_state(files, [place_of(e) for t in ours for e in t.roots(step)])
    return FaultLine(*places[0]) if places else None


def _own_event(fault: Fault, ours: Sequence[ScriptTrace]) -> Divergence | None:
    """Find the event that the cause describes, in the traces of the subject run alone."""
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
    """The first op with a result that is not finite, from finite inputs."""
    for trace in ours:
        for event in trace.events_of("op"):
            if 1e308 in (event["values"] or ()) and not any(
                1e308 in (one["values"] or ()) for one in trace.inputs(event) if one is not None
            ):
                return Divergence(event, "values")
    return None


def _asking_line_by_text(fault: Fault, ours: Sequence[ScriptTrace], asked: set[Place]) -> FaultLine | None:
    """Search the source for the line that uses the rank, if the script reads its rank but no event differs."""
    for event in (e for trace in ours for e in trace.events_of("loader") if fault.quantity == "examples"):
        origin = Slice(RANK, asked).origin(place_of(event))
        if origin is not None and origin[0] != place_of(event):
            return FaultLine(origin[0], place_of(event), asks=True)
    place = _first_acting([file for file, _ in sorted(asked)], RANK, asked)
    return None if place is None else FaultLine(place, asks=True)


def _line_by_text(fault: Fault, ours: Sequence[ScriptTrace], asked: set[Place]) -> FaultLine | None:
    """Search the traced files for a line that matches the cause (_WORDS), or that uses the rank."""
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
    """Find the line of the first difference between two runs that should be equal."""
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
