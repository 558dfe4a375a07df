"""Find the first difference between the traces of two runs. Pure.

The traces come from verify/worker/script_tracer.py. A loss is followed back in both runs at once, from the backward
call through the ops that made the loss, to the first op with different results from equal inputs.

- For runs with the same shards (`first_divergence`), inputs are equal if their recorded values are equal.
- For a split batch and the whole batch (`first_mixing`), inputs are equal if each example has the same values in both.
  A single value for the whole batch is equal if it is the mean or the sum of the parts' values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.observe.records import read_records
from paceline.observe.script_stack import Place
from paceline.verify.run_record import RunRecord

Event = Mapping[str, Any]  # "k": its kind, "at": [file, line], and more (verify/worker/script_tracer.py)
_ARITHMETIC = {
    "mul", "div", "add", "sub", "true_divide", "rsub", "__rmul__", "__mul__", "__truediv__", "__rtruediv__", "__add__",
    "__radd__", "__sub__", "__rsub__", "mul_", "div_", "add_", "sub_", "pow", "__pow__", "clamp", "clamp_", "__rdiv__",
    "multiply", "divide", "lerp", "lerp_", "leaky_relu", "softmax", "log_softmax", "fill_", "full", "tensor",
    "arange", "linspace",
}  # fmt: skip
RANDOM = {
    "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "normal", "bernoulli",
    "multinomial", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "trunc_normal_", "kaiming_uniform_",
    "scaled_dot_product_attention", "gumbel_softmax", "rrelu",
}  # fmt: skip


@dataclass(frozen=True)
class Divergence:
    """The first event that differs between runs."""

    event: Event  # the event
    # What differs. "values": the values of the result. "numbers": the arguments that are numbers. "path": only one run
    # has this event. "state": an input that was made before this yield. "mean": the whole batch's value is neither the
    # mean nor the sum of the parts' values. "rows": the values of some examples.
    how: str
    also: Event | None = None  # a related event, such as the use of a statistic
    numbers: tuple[Sequence[float], Sequence[float]] = ((), ())  # the number arguments, in both runs
    inputs: Sequence[Event] = ()  # the events that made its inputs

    @property
    def place(self) -> Place:
        """The line of the event."""
        return place_of(self.event)


def place_of(event: Event) -> Place:
    file, line = event["at"]
    return file, line


@dataclass
class ScriptTrace:
    """The events of one rank of a run, in order."""

    events: Sequence[Event]  # in order

    def events_of(self, *kinds: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event["k"] in kinds]

    def roots(self, step: int) -> list[Event]:
        """The losses that were passed to backward calls in a step."""
        return [event for event in self.events_of("root") if event["step"] == step]

    def at(self, number: int | None) -> Event | None:
        """The event with this number; None if there is none."""
        return None if number is None or not 0 <= number < len(self.events) else self.events[number]

    def inputs(self, event: Event) -> list[Event | None]:
        """The events that made the inputs of an op; None for an input that was not made by a recorded op."""
        return [self.at(number) for number in event.get("inputs", ())]


def load_traces(run: RunRecord) -> list[ScriptTrace]:
    """The traces of a run, by rank."""
    paths = [os.path.join(run.folder, f"lines-{record['rank']}.json") for record in run.ranks]
    return [ScriptTrace(read_records(path)) for path in paths if os.path.exists(path)]


def nearly_equal(a: Sequence[float], b: Sequence[float], within: float = 1e-9) -> bool:
    """Whether two sequences are equal up to `within`, relative to their largest number."""
    if len(a) != len(b):
        return False
    scale = max((abs(x) for x in (*a, *b)), default=0.0)
    return all(abs(x - y) <= within * scale for x, y in zip(a, b, strict=True))


def first_unmatched(ours: ScriptTrace, theirs: ScriptTrace, *kinds: str, step: int | None = None) -> Divergence | None:
    """The first event of these kinds that only one run has, or that has different values."""
    mine = [e for e in ours.events_of(*kinds) if step is None or e["step"] <= step]
    other = [e for e in theirs.events_of(*kinds) if step is None or e["step"] <= step]
    for a, b in zip(mine, other, strict=False):
        if _identity(a) != _identity(b):
            remaining = {_identity(one) for one in other}
            return Divergence(a if _identity(a) not in remaining else b, "path")
        if a["k"] != "ask" and not _alike(a, b):
            return Divergence(a, "values", numbers=(a.get("numbers", ()), b.get("numbers", ())))
    longer = mine[len(other) :] or other[len(mine) :]
    return Divergence(longer[0], "path") if longer else None


def _identity(event: Event) -> tuple[Any, ...]:
    return event["k"], *event["at"], event["name"], event.get("target")


def _alike(a: Event, b: Event) -> bool:
    x, y = a.get("values") or [], b.get("values") or []
    if any(not isinstance(value, (int, float)) for value in (*x, *y)):
        return list(x) == list(y)
    return nearly_equal(x, y) and nearly_equal(a.get("numbers", ()), b.get("numbers", ()))


def first_divergence(ours: ScriptTrace, theirs: ScriptTrace, step: int) -> Divergence | None:
    """The first difference in the losses of a step, for runs that compute the same shards."""
    mine, other = ours.roots(step), theirs.roots(step)
    for a, b in zip(mine, other, strict=False):
        if not _alike(a, b):
            found = _first_divergence(ours, ours.at(a["of"]), theirs, theirs.at(b["of"]), set())
            return found or Divergence(a, "values")
    longer = mine[len(other) :] or other[len(mine) :]
    return Divergence(longer[0], "path") if longer else None


def _first_divergence(
    ours: ScriptTrace, a: Event | None, theirs: ScriptTrace, b: Event | None, been: set[int]
) -> Divergence | None:
    if a is None or b is None:
        event = a or b
        return None if event is None else Divergence(event, "path")
    if id(a) in been:
        return None
    been.add(id(a))
    if _alike(a, b):
        return None
    if _identity(a) != _identity(b) or len(a["inputs"]) != len(b["inputs"]):
        lines = {_identity(one) for one in theirs.events}
        return Divergence(
            a if _identity(a) not in lines or _identity(b) in {_identity(one) for one in ours.events} else b, "path"
        )
    for one, two in zip(ours.inputs(a), theirs.inputs(b), strict=True):
        if (one is None) != (two is None):
            continue
        if (
            one is not None
            and two is not None
            and (found := _first_divergence(ours, one, theirs, two, been)) is not None
        ):
            return found
    numbers = (a["numbers"], b["numbers"])
    outer = [x and x["values"] for x in a["outer"]], [y and y["values"] for y in b["outer"]]
    kept = any(x is not None and y is not None and not nearly_equal(x, y) for x, y in zip(*outer, strict=True))
    return Divergence(a, "state" if kept else "values" if nearly_equal(*numbers) else "numbers", numbers=numbers)


@dataclass(frozen=True)
class BatchParts:
    """One loss of a batch, computed twice: in parts (on several ranks or in several yields), and whole."""

    parts: Sequence[tuple[ScriptTrace, Event]]  # (trace, the part's loss), for each part
    examples: Sequence[Sequence[int]]  # the indices of the examples in each part
    whole: tuple[ScriptTrace, Event]  # (trace, the loss) of the whole batch
    order: Sequence[int]  # the indices of the examples of the whole batch, in its order
    within: float  # the relative difference that rounding explains


def batch_parts(ours: RunRecord, whole: RunRecord, step: int, within: float) -> Iterator[BatchParts]:
    """Yield the loss of each backward call, in parts and whole. Stop at a call that a part does not make."""
    theirs = load_traces(whole)
    if not theirs or step >= whole.steps:
        return
    ids = [indices for *_, indices in whole.step_records(step)[0]["ids"]]
    parts: list[tuple[ScriptTrace, list[Event]]] = []
    examples: list[list[int]] = []
    for trace, record in zip(load_traces(ours), ours.step_records(step), strict=False):
        by_yield: dict[int, list[Event]] = {}
        for root in trace.roots(step):
            by_yield.setdefault(root["yield"], []).append(root)
        for number, (*_, indices) in enumerate(record["ids"]):
            parts.append((trace, by_yield.get(number, [])))
            examples.append(list(indices))
    roots = theirs[0].roots(step)
    for call, root in enumerate(roots):
        if len(ids) != 1 or any(len(own) <= call for _, own in parts) or not parts:
            return
        yield BatchParts([(t, own[call]) for t, own in parts], examples, (theirs[0], root), ids[0], within)


def first_mixing(cut: BatchParts) -> Divergence | None:
    """Find the first op that gives the examples of a part different values than in the whole batch."""
    trace, root = cut.whole
    nodes = [t.at(own["of"]) for t, own in cut.parts]
    event = trace.at(root["of"])
    if event is None or any(node is None for node in nodes):
        return None
    if "mean" in _relations(cut, nodes, event):
        return None
    return _first_mixing(cut, nodes, event, set()) or Divergence(event, "mean")


def _first_mixing(cut: BatchParts, nodes: Sequence[Any], event: Event, been: set[int]) -> Divergence | None:
    """Find the first op, up to `event`, with values that do not follow from the parts. nodes: `event` in each part."""
    if id(event) in been:
        return None
    been.add(id(event))
    trace = cut.whole[0]
    if any(_identity(node) != _identity(event) or len(node["inputs"]) != len(event["inputs"]) for node in nodes):
        return Divergence(event, "path")
    kinds, below = _relations(cut, nodes, event), []
    for place, one in enumerate(trace.inputs(event)):
        theirs = [t.inputs(node)[place] for (t, _), node in zip(cut.parts, nodes, strict=True)]
        if one is None or any(node is None for node in theirs):
            continue
        below.append((one, theirs, _relations(cut, theirs, one)))
    for one, theirs, own in below:
        if not own and (found := _first_mixing(cut, theirs, one, been)) is not None:
            return found
    numbers = next((n["numbers"] for n in nodes if not nearly_equal(n["numbers"], event["numbers"])), event["numbers"])
    differing = event["name"] in _ARITHMETIC and not nearly_equal(numbers, event["numbers"])
    if kinds == {"sum"} and not any("mean" in own for *_, own in below):
        for one, theirs, own in below:
            if own == {"sum"} and (found := _first_mixing(cut, theirs, one, been)) is not None:
                return found
    made = [one for one, _, _ in below]
    statistic = next(
        (one for one, _, own in below if one["shape"] != "rows" and own and event["shape"] == "rows"), None
    )
    how = "numbers" if differing else "rows" if event["shape"] == "rows" else "mean"
    for place, outer in enumerate(event["outer"]):
        of_parts = [node["outer"][place] for node in nodes]
        if outer is not None and all(of_part is not None for of_part in of_parts):
            # State has the same size in each part and in the whole batch. A part of the loader's data is smaller.
            kept = outer["shape"] != "rows" and all(
                of_part["shape"] != "rows" and of_part["size"] == outer["size"] for of_part in of_parts
            )
            if kept and "same" not in _relations(cut, of_parts, outer):
                return Divergence(event, "state", inputs=[one for one, _, _ in below])
    if statistic is not None and not differing:
        return Divergence(statistic, how, event, inputs=made)
    return Divergence(event, how, numbers=(numbers, event["numbers"]), inputs=made)


def _relations(cut: BatchParts, nodes: Sequence[Any], event: Event) -> set[str]:
    """How the whole batch's values follow from the parts' values: some of "rows", "mean", "sum", "same"."""
    values = [node["values"] for node in nodes]
    if event["shape"] == "none" or any(node["shape"] == "none" for node in nodes):
        return {"rows", "mean", "sum", "same"}
    if event["shape"] == "rows" and len(event["values"]) == len(cut.order):
        whole = dict(zip(cut.order, event["values"], strict=True))
        parts: dict[int, float] = {}
        for own, indices in zip(values, cut.examples, strict=True):
            if len(own) != len(indices):
                return set()
            parts |= dict(zip(indices, own, strict=True))
        scale = max((abs(x) for x in whole.values()), default=0.0)
        alike = parts.keys() == whole.keys() and all(abs(parts[k] - whole[k]) <= cut.within * scale for k in whole)
        return {"rows"} if alike else set()
    if len(event["values"]) != 1 or any(len(own) != 1 for own in values):
        return set()
    (x,), numbers = event["values"], [own[0] for own in values]
    total = sum(len(indices) for indices in cut.examples) or 1
    scale = cut.within * max(abs(x), *(abs(n) for n in numbers), 1e-30)
    found = set()
    mean = sum(n * len(indices) for n, indices in zip(numbers, cut.examples, strict=True)) / total
    if abs(mean - x) <= scale:
        found.add("mean")
    if abs(sum(numbers) - x) <= scale:
        found.add("sum")
    if all(abs(n - x) <= scale for n in numbers):
        found.add("same")
    return found
