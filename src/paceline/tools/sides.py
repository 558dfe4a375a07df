"""What one side of `paceline verify` has left, and how two of them differ.

Tolerances are taken from this very run. What is compared of a tensor is the 2-norm of its difference.

Gradients. C2 computes the batches of C with their examples in reverse order, from weights that are each the next
floating-point number up or down, and with losses times 0.75, which is taken out of the gradients again: the same
numbers, as far as they are known, added up in another order and rounded elsewhere, on the way through the model and all
the way back. R is what this moves a tensor by (root mean square over the steps). Rounding errors of many terms are
near to normal. So is the difference of A and C; it has the variance of R, or up to four times as much, since each
shard is rounded by itself where the whole batch is once. Normal numbers reach MARGIN = 8 times R, which is 4 of their
standard deviations at least, in one of 16,000 tensors with a single element, and of more elements in far fewer. A
tensor whose R is small by chance, having few elements, is given no less than the run's tensors have in the middle, in
relation to its norm. Where nothing moves at all, fp32's own rounding is left. Where the loss cannot be scaled, since a
hook or a tensor beside the model would see it, the rounding of 16 bits does not show, and four of theirs are taken.
In a model that enlarges rounding until most of a gradient's digits are lost, errors are not near to normal any more:
R is then the largest of the steps.

Kinks. Rounding that takes the input of a ReLU over zero moves a gradient by more, and rarely. So a difference of
gradients alone, by which they keep half of their digits, in fewer than half of the steps, is no fault: faults return.

Losses and buffers. C2 moves them by another order of their sums. What it does not show, the rounding of activations in
batches of another size, is at most the unit roundoff u of the precision (2^-24 in fp32, 2^-9 in bf16) in relation to
the number.

Weights that a side updates from its own gradients (LBFGS, or a script without an optimizer) are judged by how far C2
moves them. Else sides of one process make each update from the gradient of the run in question. So weights differ by
the rounding of the update's own arithmetic alone: some ten operations on each element, and a norm of up to 2^30
elements where gradients are clipped. OPERATIONS = 64 covers both.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

MARGIN = 8.0
OPERATIONS = 64.0
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9, "bf16-params": 2.0**-9, "fp16": 2.0**-12}
_TF32 = 2.0**-11
ORDER = ("initial weights", "examples", "data", "loss", "gradient", "learning rate", "weights", "buffers")


@dataclass(frozen=True)
class Difference:
    """step: from 0, in the whole run. quantity: one of ORDER. size: of what it differs from."""

    step: int
    quantity: str
    name: str | None
    difference: float
    tolerance: float
    size: float = float("nan")


class Side:
    """The records of one run. folder: where its ranks have written; its last part is the run's name. first: of its
    ranks.

    Raises FileNotFoundError where one has not written.
    """

    def __init__(self, folder: str, processes: int, first: int = 0) -> None:
        self.folder, self.name = folder, os.path.basename(folder)
        records: list[dict[str, Any]] = []
        for rank in range(first, first + processes):
            with open(os.path.join(folder, f"rank-{rank}.json")) as file:
                records.append(json.load(file))
        self.ranks = [record for record in records if record["steps"]] or records  # servers make none

    @cached_property
    def steps(self) -> int:
        return min((len(record["steps"]) for record in self.ranks if record["steps"]), default=0)

    def of(self, step: int) -> list[dict[str, Any]]:
        return [record["steps"][step] for record in self.ranks if len(record["steps"]) > step]

    def tensors(self, name: str) -> dict[str, Tensor]:
        path = os.path.join(self.folder, f"{name}.safetensors")
        return _tensors(path) if os.path.exists(path) else {}

    def gradients(self, step: int, update: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for record in self.ranks:
            found = {**self.tensors(f"grad-{step}-{update}-r{record['rank']}"), **found}
        return {name: grad.double() for name, grad in found.items()}

    def parts(self, step: int) -> list[dict[str, Tensor]]:
        """The gradients of each yield, where one process has computed all shards in turns."""
        sums = [self.tensors(f"part-{step}-{micro}") for micro in range(1, self.of(step)[0]["yields"])]
        before: dict[str, Tensor] = {}
        parts = []
        for found in [*sums, self.tensors(f"grad-{step}-0-r0")]:
            parts.append({k: v.double() - before[k].double() if k in before else v.double() for k, v in found.items()})
            before = found
        return parts

    def updates(self, step: int) -> int:
        return max((record["updates"] for record in self.of(step)), default=0)

    def own(self, step: int) -> bool:
        """Whether updates follow from each side's own gradients, and not from those of the run in question."""
        return any(record.get("own") for record in self.of(step))

    def yields(self, step: int) -> int:
        return max((record["yields"] for record in self.of(step)), default=0)

    def parts_of(self, step: int) -> list[int]:
        """Examples in each yield, of one process."""
        return [len(values) for *_, values in self.of(step)[0]["ids"]]

    def values(self, step: int) -> dict[tuple[str, int], str]:
        """(loader, index) -> digest, of the examples of a step."""
        found: dict[tuple[str, int], str] = {}
        for rank in self.of(step):
            for (loader, *_, indices), (*_, digests) in zip(rank["ids"], rank["data"], strict=True):
                found |= {(loader, index): digest for index, digest in zip(indices, digests, strict=True)}
        return found

    def seen(self, step: int, key: str) -> Counter[Any]:
        """Examples of a step, each as often as it was computed; several ranks may hold the same part of a batch."""
        found: dict[Any, Any] = {}
        for rank in self.of(step):
            for *place, values in rank[key]:
                found[tuple(place)] = (place[0], values)
        return Counter((loader, value) for loader, values in found.values() for value in values)

    def losses(self, step: int) -> dict[str, float]:
        """By backward call, over all ranks."""
        sums: dict[str, list[float]] = {}
        for rank in self.of(step):
            for call, (total, weight) in rank["losses"].items():
                pair = sums.setdefault(call, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + total, pair[1] + weight
        return {call: total / weight for call, (total, weight) in sums.items() if weight}

    def apart(self, step: int) -> dict[tuple[int, ...], float]:
        """(shard, micro-batch, backward call, term) -> loss."""
        return {tuple(place): loss for rank in self.of(step) for *place, loss in rank["apart"]}

    def lrs(self, step: int) -> list[float]:
        return next((list(rank["lrs"]) for rank in self.of(step) if rank["lrs"]), [])

    def options(self, step: int) -> list[dict[str, Any]]:
        """What the optimizers' groups are set to at the updates of a step."""
        return next((list(rank["options"]) for rank in self.of(step) if rank.get("options")), [])

    def modules(self, step: int) -> list[list[str]]:
        """Layers in the order of their first call, of each rank that had examples."""
        return [rank["modules"] for rank in self.of(step) if rank["data"]]

    def outside(self, step: int) -> set[str]:
        return {name for rank in self.of(step) for name in rank["outside"]}

    def not_finite(self, step: int) -> list[str]:
        return [name for rank in self.of(step) for name in rank["not_finite"]]

    def first_weights(self) -> dict[str, Tensor]:
        """With which the script began, before it took over any."""
        return self.tensors("initial") or self.start(0)

    def start(self, step: int) -> dict[str, Tensor]:
        """The models' state from which the run in question made this step."""
        return self.tensors(f"start-{step}")

    @cached_property
    def drew(self) -> bool:
        return any(step["drew"] for record in self.ranks for step in record["steps"])

    @cached_property
    def parameters(self) -> list[str]:
        return list(dict.fromkeys(name for record in self.ranks for name in record["parameters"]))

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Of parameters and buffers."""
        return {name: dtype for record in self.ranks for name, dtype in record.get("dtypes", {}).items()}

    def roundoff(self, name: str) -> float:
        """Of a parameter's, or a buffer's, numbers; 0 where they are whole."""
        dtype = getattr(torch, self.dtypes.get(name, "float32"))
        return torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0

    @cached_property
    def weights(self) -> set[str]:
        """All names of parameters: one that several layers share has several."""
        return {*self.parameters, *(name for record in self.ranks for name in record["tied"])}

    def others(self, step: int) -> set[str]:
        """States of NumPy's and Python's generators after what was computed."""
        return {state for rank in self.of(step) for state in rank["others"]}

    @cached_property
    def gathers(self) -> bool:
        """Whether its losses may depend on what all processes were asked for."""
        return any(step["gathered"] for record in self.ranks for step in record["steps"])


@lru_cache(maxsize=64)
def _tensors(path: str) -> dict[str, Tensor]:
    return load_file(path)


class Tolerances:
    """From `whole`, C, and `reversed_`, C2; None: from rounding alone.

    indeterminate: parameters whose gradient is rounding and little else: in most steps R is more than a tenth of it.
    They are judged by the model's largest gradient. typical: R in relation to a gradient; the median of the others.
    """

    def __init__(self, whole: Side | None, reversed_: Side | None, precision: str, tf32: bool = False) -> None:
        self._u = _TF32 if tf32 and precision == "fp32" else ROUNDOFF[precision]
        self._moved: dict[str, list[float]] = {}  # R^2 of each step
        self._loss = 0.0
        self._updates: list[float] = []  # by which rounding moves weights that follow from a side's own gradients
        self._rate = 0.0  # by which rounding moves a learning rate, in relation to it: where a script computes it
        self.enlarged = False  # the model enlarges rounding
        shares: dict[str, list[float]] = {}
        scaled = reversed_ is not None and reversed_.ranks[0]["steps"][0]["scaled"]
        for step in range(min(whole.steps, reversed_.steps) if whole is not None and reversed_ is not None else 0):
            assert whole is not None
            assert reversed_ is not None
            if not whole.not_finite(step) and not reversed_.not_finite(step):
                self._look(whole, reversed_, step, shares)
        self.indeterminate = {name for name, found in shares.items() if median(found) > 0.1}
        middle = {name: median(found) for name, found in shares.items()}
        known = [share for name, share in middle.items() if name not in self.indeterminate]
        self._typical = max(median(known) if known else 0.0, ROUNDOFF["fp32"] if scaled else 4 * self._u)
        self._of_all = median(middle.values()) if middle else 0.0

    def _look(self, whole: Side, reversed_: Side, step: int, shares: dict[str, list[float]]) -> None:
        ours, theirs = whole.losses(step), reversed_.losses(step)
        self._loss = max([self._loss, *(abs(ours[c] - theirs[c]) for c in ours.keys() & theirs.keys())])
        rates = zip(whole.lrs(step), reversed_.lrs(step), strict=False)
        self._rate = max([self._rate, *(abs(a - b) / abs(a) for a, b in rates if a)])
        for update in range(whole.updates(step)):
            first, second = whole.gradients(step, update), reversed_.gradients(step, update)
            for name in first.keys() & second.keys():
                if first[name].shape == second[name].shape and (size := norm(first[name])):
                    moved = norm(first[name] - second[name])
                    self._moved.setdefault(name, []).append(moved**2)
                    shares.setdefault(name, []).append(moved / size)
        first, second = (side.tensors(f"after-{step}-{whole.updates(step) - 1}") for side in (whole, reversed_))
        self._look_at_buffers(first, second, whole.weights)
        for name in first.keys() & second.keys() & whole.weights if whole.own(step) else ():
            moved, size = norm(first[name].double() - second[name].double()), norm(first[name])
            self._moved.setdefault(f"after {name}", []).append(moved**2)
            self._updates.append(moved / size if size else 0.0)
        self._look_at_buffers(whole.tensors(f"own-{step}"), reversed_.tensors(f"own-{step}"), whole.weights)

    def _look_at_buffers(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], weights: set[str]) -> None:
        for name in first.keys() & second.keys() - weights:
            self._moved.setdefault(name, []).append(norm(first[name].double() - second[name].double()) ** 2)

    def _r(self, name: str) -> float:
        found = self._moved.get(name, [])
        if self.enlarged:
            return max(found, default=0.0) ** 0.5
        return (sum(found) / len(found)) ** 0.5 if found else 0.0

    @property
    def rounding_only(self) -> bool:
        """Whether C2 leaves most gradients half of their digits, as rounding does."""
        return self._of_all <= self._u**0.5

    def of_kinks(self, found: Sequence[Difference]) -> bool:
        """Whether these differences of a step may be of rounding at a kink, if they are rare."""
        return all(d.quantity == "gradient" and d.difference <= self._u**0.5 * d.size for d in found)

    def gradient(self, name: str, reference: Mapping[str, Tensor]) -> float:
        size = norm(reference[name]) if name in reference else 0.0
        if name in self.indeterminate or not size:
            size = max(map(norm, reference.values()), default=0.0)
        return MARGIN * max(self._r(name), self._typical * size)

    def buffer(self, name: str, reference: Tensor) -> float:
        return MARGIN * max(self._r(name), self._u * norm(reference))

    def update(self, name: str, reference: Tensor) -> float:
        """Of weights that each side has updated from its own gradients."""
        typical = median(self._updates) if self._updates else 0.0
        return MARGIN * max(self._r(f"after {name}"), typical * norm(reference))

    def noise(self, names: Iterable[str], reference: Mapping[str, Tensor]) -> float:
        """Of these gradients together: how far rounding moves them."""
        return sum((self.gradient(name, reference) / MARGIN) ** 2 for name in names) ** 0.5

    def of_rate(self, reference: float) -> float:
        return max(2.0**-40, MARGIN * self._rate) * abs(reference)  # float64, by other ways

    def of_loss(self, reference: float) -> float:
        return MARGIN * max(self._loss, self._u * abs(reference))


def norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def differences(ours: Side, theirs: Side, leader: Side, tolerances: Tolerances, step: int) -> Iterator[Difference]:
    """In one step, in ORDER. leader: the run in question, whose states the step started from, and whose weights are
    compared; `ours` may be the same with dropout off. theirs: a side of whole batches."""
    yield from before(theirs, leader, tolerances, step)
    rates = [
        Difference(step, "learning rate", None, abs(a - b), tolerances.of_rate(b))
        for a, b in zip(ours.lrs(step), theirs.lrs(step), strict=False)
        if not abs(a - b) <= tolerances.of_rate(b)
    ]
    # Of two updates in a step the second's gradient follows from the first's rate, and its gradient, which a run with
    # dropout off has by itself.
    part = leader.updates(step) > 1 and (bool(rates) or ours is not leader)
    yield from computed(ours, theirs, tolerances, step, first=part)
    yield from rates
    yield from _after(ours, theirs, leader, tolerances, step)


def before(theirs: Side, leader: Side, tolerances: Tolerances, step: int) -> Iterator[Difference]:
    """What lies before the step: how the model began; what was changed since the last update."""
    start: dict[str, Tensor] | None = None
    if not step:
        start, own = leader.first_weights(), theirs.first_weights()
        for name in start:
            if name in own and own[name].shape == start[name].shape and not torch.equal(own[name], start[name]):
                yield Difference(0, "initial weights", name, norm(own[name].double() - start[name].double()), 0.0)
        return
    names = leader.outside(step) | theirs.outside(step)
    if not names:
        return
    start, own = leader.start(step), theirs.tensors(f"own-{step}")
    for name in sorted(names & start.keys()):
        kind = "weights" if name in leader.weights else "buffers"
        if name not in own or name not in leader.outside(step):
            yield Difference(step, kind, name, float("nan"), 0.0)
            continue
        apart = norm(own[name].double() - start[name].double())
        allowed = OPERATIONS * leader.roundoff(name) * norm(start[name])
        if kind == "buffers":
            allowed = max(allowed, tolerances.buffer(name, start[name]))
        if not apart <= allowed:
            yield Difference(step, kind, name, apart, allowed)


def computed(ours: Side, theirs: Side, tolerances: Tolerances, step: int, first: bool = False) -> Iterator[Difference]:
    """Examples, data, losses and gradients. first: of those that are of the step's first update, without losses."""
    for key, quantity in (("ids", "examples"), ("data", "data")):
        have, want = ours.seen(step, key), theirs.seen(step, key)
        if have != want:
            yield Difference(step, quantity, None, float((have - want).total() + (want - have).total()), 0.0)
    bad, other_bad = ours.not_finite(step), theirs.not_finite(step)
    if bad and other_bad:
        return  # an overflow that one process has too
    mine, other = ours.losses(step), theirs.losses(step)
    for call in sorted(mine.keys() & other.keys()) if not first else ():
        apart, allowed = abs(mine[call] - other[call]), tolerances.of_loss(other[call])
        if not apart <= allowed:
            yield Difference(step, "loss", None, apart, allowed)
    order = {name: number for number, name in enumerate(forward_order(ours, step))}
    for update in range(1 if first else min(ours.updates(step), theirs.updates(step))):
        a, b = ours.gradients(step, update), theirs.gradients(step, update)
        for name in sorted(
            a.keys() & b.keys() if first else a.keys() | b.keys(), key=lambda n: order.get(n, len(order))
        ):
            a_or_b = a.get(name, b.get(name))
            assert a_or_b is not None
            one, two = a.get(name, torch.zeros_like(a_or_b)), b.get(name, torch.zeros_like(a_or_b))
            apart = norm(one - two) if one.shape == two.shape else math.nan
            allowed = tolerances.gradient(name, b)
            if not apart <= allowed:
                yield Difference(step, "gradient", name, apart, allowed, norm(two))


def _after(ours: Side, theirs: Side, leader: Side, tolerances: Tolerances, step: int) -> Iterator[Difference]:
    update = min(leader.updates(step), theirs.updates(step)) - 1
    start, second = leader.start(step), theirs.tensors(f"after-{step}-{update}")
    weights, buffers = leader.tensors(f"after-{step}-{update}"), ours.tensors(f"after-{step}-{update}")
    for name in weights:
        if name not in second or weights[name].shape != second[name].shape or name not in start:
            continue
        is_weight = name in leader.weights
        if not is_weight and ours is not leader and update:
            continue  # filled in part after an update that was not the same
        a, b = (weights if is_weight else buffers)[name].double(), second[name].double()
        apart, moved = norm(a - b), norm(b - start[name].double())
        allowed = OPERATIONS * leader.roundoff(name) * (norm(b) + moved)
        if is_weight and leader.own(step):
            allowed = max(allowed, tolerances.update(name, b))
        allowed = allowed if is_weight else max(allowed, tolerances.buffer(name, b))
        if not apart <= allowed:
            yield Difference(step, "weights" if is_weight else "buffers", name, apart, allowed)


def forward_order(side: Side, step: int) -> list[str]:
    """Parameters: by their layer's first call in that step, then as the model has them."""
    called = next(iter(side.modules(step)), [])
    places = {name: place for place, name in enumerate(called)}
    return sorted(side.parameters, key=lambda name: places.get(name.rpartition(".")[0], len(places)))
