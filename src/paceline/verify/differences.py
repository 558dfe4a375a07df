"""The differences of two runs of `paceline verify` in a step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import OPERATIONS, Difference, Tolerances, norm

# The quantities of a step, in causal order.
ORDER = ("initial weights", "examples", "data", "loss", "gradient", "learning rate", "weights", "buffers")


def differences(
    ours: RunRecord, theirs: RunRecord, leader: RunRecord, tolerances: Tolerances, step: int
) -> Iterator[Difference]:
    """All differences of one step, in ORDER.

    Args:
        ours: the subject run, or the subject with dropout off.
        theirs: the run to compare with.
        leader: the subject run. `theirs` starts the step from the state that this run recorded, and the updated weights
            of `theirs` and `leader` are compared.
    """
    yield from differences_before(theirs, leader, tolerances, step)
    rates = [
        Difference(step, "learning rate", None, abs(a - b), tolerances.learning_rate(b))
        for a, b in zip(ours.learning_rates(step), theirs.learning_rates(step), strict=False)
        if not abs(a - b) <= tolerances.learning_rate(b)
    ]
    # The gradient of a step's second update depends on the learning rate and the gradient of the first update. With
    # dropout off, the gradient of the first update is different.
    part = leader.updates(step) > 1 and (bool(rates) or ours is not leader)
    yield from differences_computed(ours, theirs, tolerances, step, first=part)
    yield from rates
    yield from _differences_after(ours, theirs, leader, tolerances, step)


def differences_before(theirs: RunRecord, leader: RunRecord, tolerances: Tolerances, step: int) -> Iterator[Difference]:
    """Differences that arose before the step: in the initial weights, or by changes since the last update."""
    start: dict[str, Tensor] | None = None
    if not step:
        start, own = leader.initial_weights(), theirs.initial_weights()
        for name in start:
            if name in own and own[name].shape == start[name].shape and not torch.equal(own[name], start[name]):
                yield Difference(0, "initial weights", name, norm(own[name].double() - start[name].double()), 0.0)
        return
    names = leader.changed_outside(step) | theirs.changed_outside(step)
    if not names:
        return
    start, own = leader.start_state(step), theirs.tensors(f"own-{step}")
    for name in sorted(names & start.keys()):
        kind = "weights" if name in leader.weights else "buffers"
        if name not in own or name not in leader.changed_outside(step):
            yield Difference(step, kind, name, float("nan"), 0.0)
            continue
        error = norm(own[name].double() - start[name].double())
        allowed = OPERATIONS * leader.roundoff(name) * norm(start[name])
        if kind == "buffers":
            allowed = max(allowed, tolerances.buffer(name, start[name]))
        if not error <= allowed:
            yield Difference(step, kind, name, error, allowed)


def differences_computed(
    ours: RunRecord, theirs: RunRecord, tolerances: Tolerances, step: int, first: bool = False
) -> Iterator[Difference]:
    """Differences of examples, data, losses and gradients.

    first: compare only the values of the first update of the step, and no losses.
    """
    for key, quantity in (("ids", "examples"), ("data", "data")):
        have, want = ours.example_counts(step, key), theirs.example_counts(step, key)
        if have != want:
            yield Difference(step, quantity, None, float((have - want).total() + (want - have).total()), 0.0)
    bad, other_bad = ours.not_finite(step), theirs.not_finite(step)
    if bad and other_bad:
        return  # both runs overflow
    mine, other = ours.losses(step), theirs.losses(step)
    for call in sorted(mine.keys() & other.keys()) if not first else ():
        error, allowed = abs(mine[call] - other[call]), tolerances.loss(other[call])
        if not error <= allowed:
            yield Difference(step, "loss", None, error, allowed)
    order = {name: number for number, name in enumerate(forward_order(ours, step))}
    for update in range(1 if first else min(ours.updates(step), theirs.updates(step))):
        a, b = ours.gradients(step, update), theirs.gradients(step, update)
        for name in sorted(
            a.keys() & b.keys() if first else a.keys() | b.keys(), key=lambda n: order.get(n, len(order))
        ):
            a_or_b = a.get(name, b.get(name))
            assert a_or_b is not None
            one, two = a.get(name, torch.zeros_like(a_or_b)), b.get(name, torch.zeros_like(a_or_b))
            error = norm(one - two) if one.shape == two.shape else math.nan
            allowed = tolerances.gradient(name, b)
            if not error <= allowed:
                yield Difference(step, "gradient", name, error, allowed, norm(two))


def _differences_after(
    ours: RunRecord, theirs: RunRecord, leader: RunRecord, tolerances: Tolerances, step: int
) -> Iterator[Difference]:
    """Differences of weights and buffers after the last update of the step."""
    update = min(leader.updates(step), theirs.updates(step)) - 1
    start, second = leader.start_state(step), theirs.tensors(f"after-{step}-{update}")
    weights, buffers = leader.tensors(f"after-{step}-{update}"), ours.tensors(f"after-{step}-{update}")
    for name in weights:
        if name not in second or weights[name].shape != second[name].shape or name not in start:
            continue
        is_weight = name in leader.weights
        if not is_weight and ours is not leader and update:
            continue  # the buffer also depends on an earlier update that differed
        a, b = (weights if is_weight else buffers)[name].double(), second[name].double()
        error, moved = norm(a - b), norm(b - start[name].double())
        allowed = OPERATIONS * leader.roundoff(name) * (norm(b) + moved)
        if is_weight and leader.updates_own_gradients(step):
            allowed = max(allowed, tolerances.update(name, b))
        allowed = allowed if is_weight else max(allowed, tolerances.buffer(name, b))
        if not is_weight and not error <= allowed and _is_sum_of_ranks(ours, theirs, step, name, allowed):
            continue
        if not error <= allowed:
            yield Difference(step, "weights" if is_weight else "buffers", name, error, allowed)


def _is_sum_of_ranks(ours: RunRecord, theirs: RunRecord, step: int, name: str, allowed: float) -> bool:
    """Whether the ranks together have changed a buffer as one process has: each counts its own examples.

    Only plain_recorder.py records these changes. If a rank's own count matters, later gradients show it.
    """
    want = theirs.moved_buffers(step)[0].get(name)
    parts = [moved[name] for moved in ours.moved_buffers(step) if name in moved]
    if want is None or len(parts) < len(ours.ranks):
        return False
    return norm(torch.stack(parts).sum(0) - want) <= allowed


def forward_order(run: RunRecord, step: int) -> list[str]:
    """The names of parameters, in the order of their layers' first calls in this step. Uncalled layers come last."""
    called = next(iter(run.called_layers(step)), [])
    places = {name: place for place, name in enumerate(called)}
    return sorted(run.parameters, key=lambda name: places.get(name.rpartition(".")[0], len(places)))
