"""Where two runs begin to differ, in the lines of the script: read from what trial/lines.py has kept. Pure.

A loss is followed back, in both runs at once, from the backward call through the tensors that it was made from, to the
first op that gives something else though what goes in is the same (`apart`). Of runs with the same shards that is
the same numbers; of a batch that is cut and one that is whole (`mixing`) it is, for each example, the same numbers, and
of what is one number for a batch, the mean of the parts' numbers, or their sum.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.tools.sides import Side

Event = Mapping[str, Any]
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
class Found:
    """An event at which runs begin to differ, and one that goes with it: where a statistic is used, say. how: "values",
    "numbers" (what is given beside tensors), "path" (an op that only one has), "state" (something that was made
    before), "mean" (no mean, nor sum, of the parts'), "rows" (examples have other values)."""

    event: Event
    how: str
    also: Event | None = None
    numbers: tuple[Sequence[float], Sequence[float]] = ((), ())
    inputs: Sequence[Event] = ()

    @property
    def place(self) -> tuple[str, int]:
        return self.event["file"], self.event["line"]


@dataclass
class Trace:
    """The events of one rank of a run, in order."""

    events: list[Event]
    path: str = ""
    _lines: set[tuple[str, int]] = field(default_factory=set)

    def of(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["kind"] in kinds]

    def roots(self, step: int) -> list[Event]:
        return [event for event in self.of("root") if event["step"] == step]

    def at(self, number: int | None) -> Event | None:
        return None if number is None or not 0 <= number < len(self.events) else self.events[number]

    def inputs(self, event: Event) -> list[Event | None]:
        return [self.at(number) for number in event.get("inputs", ())]

    def ancestors(self, event: Event | None) -> set[int]:
        found: set[int] = set()
        left = [event] if event is not None else []
        while left:
            for one in self.inputs(left.pop()):
                if one is not None and id(one) not in found:
                    found.add(id(one))
                    left.append(one)
        return found


def traces(side: Side) -> list[Trace]:
    """By rank."""
    found = []
    for record in side.ranks:
        path = os.path.join(side.folder, f"lines-{record['rank']}.json")
        if os.path.exists(path):
            with open(path) as file:
                found.append(Trace(json.load(file), path))
    return found


def same(a: Sequence[float], b: Sequence[float], within: float = 1e-9) -> bool:
    if len(a) != len(b):
        return False
    scale = max((abs(x) for x in (*a, *b)), default=0.0)
    return all(abs(x - y) <= within * scale for x, y in zip(a, b, strict=True))


def unlike(ours: Trace, theirs: Trace, *kinds: str, step: int | None = None) -> Found | None:
    """The first of these events that one run has and the other has not, in their order."""
    mine = [e for e in ours.of(*kinds) if step is None or e["step"] <= step]
    other = [e for e in theirs.of(*kinds) if step is None or e["step"] <= step]
    for a, b in zip(mine, other, strict=False):
        if _key(a) != _key(b):
            remaining = {_key(one) for one in other}
            return Found(a if _key(a) not in remaining else b, "path")
        if a.get("kind") != "ask" and not _alike(a, b):
            return Found(a, "values", numbers=(a.get("numbers", ()), b.get("numbers", ())))
    longer = mine[len(other) :] or other[len(mine) :]
    return Found(longer[0], "path") if longer else None


def _key(event: Event) -> tuple[Any, ...]:
    return event["kind"], event["file"], event["line"], event["name"], event.get("target")


def _alike(a: Event, b: Event) -> bool:
    x, y = a.get("values") or [], b.get("values") or []
    if any(not isinstance(value, (int, float)) for value in (*x, *y)):
        return list(x) == list(y)
    return same(x, y) and same(a.get("numbers", ()), b.get("numbers", ()))


def apart(ours: Trace, theirs: Trace, step: int) -> Found | None:
    """Where the losses of that step become unlike, of runs that compute the same shards."""
    mine, other = ours.roots(step), theirs.roots(step)
    for a, b in zip(mine, other, strict=False):
        if not _alike(a, b):
            found = _apart(ours, ours.at(a["of"]), theirs, theirs.at(b["of"]), set())
            return found or Found(a, "values")
    longer = mine[len(other) :] or other[len(mine) :]
    return Found(longer[0], "path") if longer else None


def _apart(ours: Trace, a: Event | None, theirs: Trace, b: Event | None, been: set[int]) -> Found | None:
    if a is None or b is None:
        event = a or b
        return None if event is None else Found(event, "path")
    if id(a) in been:
        return None
    been.add(id(a))
    if _alike(a, b):
        return None
    if _key(a) != _key(b) or len(a["inputs"]) != len(b["inputs"]):
        lines = {_key(one) for one in theirs.events}
        return Found(a if _key(a) not in lines or _key(b) in {_key(one) for one in ours.events} else b, "path")
    for one, two in zip(ours.inputs(a), theirs.inputs(b), strict=True):
        if (one is None) != (two is None):
            continue
        if one is not None and two is not None and (found := _apart(ours, one, theirs, two, been)) is not None:
            return found
    numbers = (a["numbers"], b["numbers"])
    outer = [x and x["values"] for x in a["outer"]], [y and y["values"] for y in b["outer"]]
    kept = any(x is not None and y is not None and not same(x, y) for x, y in zip(*outer, strict=True))
    return Found(a, "state" if kept else "values" if same(*numbers) else "numbers", numbers=numbers)


@dataclass(frozen=True)
class Cut:
    """The same batch in parts, of several ranks or yields, and whole. parts: (trace, the part's loss); examples: the
    indices of each part; whole: of the whole batch, in its order. within: how far numbers may be apart, by rounding."""

    parts: Sequence[tuple[Trace, Event]]
    examples: Sequence[Sequence[int]]
    whole: tuple[Trace, Event]
    order: Sequence[int]
    within: float


def cuts(ours: Side, whole: Side, step: int, within: float) -> Iterator[Cut]:
    """Of each backward call of a yield, where all parts have as many."""
    theirs = traces(whole)
    if not theirs or step >= whole.steps:
        return
    ids = [indices for *_, indices in whole.of(step)[0]["ids"]]
    parts: list[tuple[Trace, list[Event]]] = []
    examples: list[list[int]] = []
    for trace, record in zip(traces(ours), ours.of(step), strict=False):
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
        yield Cut([(t, own[call]) for t, own in parts], examples, (theirs[0], root), ids[0], within)


def mixing(cut: Cut) -> Found | None:
    """Where a part's numbers are not those of its examples in the whole batch any more."""
    trace, root = cut.whole
    nodes = [t.at(own["of"]) for t, own in cut.parts]
    event = trace.at(root["of"])
    if event is None or any(node is None for node in nodes):
        return None
    if "mean" in _kinds(cut, nodes, event):
        return None
    return _mixing(cut, nodes, event, set()) or Found(event, "mean")


def _mixing(cut: Cut, nodes: Sequence[Any], event: Event, been: set[int]) -> Found | None:
    """event, and the parts' nodes, are no means; where does that begin?"""
    if id(event) in been:
        return None
    been.add(id(event))
    trace = cut.whole[0]
    if any(_key(node) != _key(event) or len(node["inputs"]) != len(event["inputs"]) for node in nodes):
        return Found(event, "path")
    kinds, below = _kinds(cut, nodes, event), []
    for place, one in enumerate(trace.inputs(event)):
        theirs = [t.inputs(node)[place] for (t, _), node in zip(cut.parts, nodes, strict=True)]
        if one is None or any(node is None for node in theirs):
            continue
        below.append((one, theirs, _kinds(cut, theirs, one)))
    for one, theirs, own in below:
        if not own and (found := _mixing(cut, theirs, one, been)) is not None:
            return found
    numbers = next((n["numbers"] for n in nodes if not same(n["numbers"], event["numbers"])), event["numbers"])
    differing = event["name"] in _ARITHMETIC and not same(numbers, event["numbers"])
    if kinds == {"sum"} and not any("mean" in own for *_, own in below):
        for one, theirs, own in below:
            if own == {"sum"} and (found := _mixing(cut, theirs, one, been)) is not None:
                return found
    made = [one for one, _, _ in below]
    statistic = next(
        (one for one, _, own in below if one["shape"] != "rows" and own and event["shape"] == "rows"), None
    )
    how = "numbers" if differing else "rows" if event["shape"] == "rows" else "mean"
    for place, outer in enumerate(event["outer"]):
        of_parts = [node["outer"][place] for node in nodes]
        if outer is not None and all(of_part is not None for of_part in of_parts):
            # What is kept has its own size; a part of what the loader gave, of nodes or tokens, is smaller.
            kept = outer["shape"] != "rows" and all(
                of_part["shape"] != "rows" and of_part["size"] == outer["size"] for of_part in of_parts
            )
            if kept and "same" not in _kinds(cut, of_parts, outer):
                return Found(event, "state", inputs=[one for one, _, _ in below])
    if statistic is not None and not differing:
        return Found(statistic, how, event, inputs=made)
    return Found(event, how, numbers=(numbers, event["numbers"]), inputs=made)


def _kinds(cut: Cut, nodes: Sequence[Any], event: Event) -> set[str]:
    """As what the parts' numbers make the whole's: "rows", "mean", "sum", "same"; none: not at all."""
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
