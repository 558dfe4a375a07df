"""Give each process a share of every global batch that fits its speed.

The model does not change: gradients are weighted by examples, whatever the size of a shard. What changes is how long
the processes wait for each other. Every CHECK steps:

1. Each process sends its own time (own_time.py) and its examples of the last steps, and the last position that its
   loaders have planned.
2. All compute the same new cut from that. A process's share is proportional to its speed: examples per second.
3. The new cut applies from the first position that no process has planned.

Time per step may have a part that does not depend on the examples. Then one new cut does not make the times equal, but
the next ones come closer.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.balance.own_time import OwnTime, Reading, seconds
from paceline.comm.mesh import world_group
from paceline.comm.waits import watch
from paceline.data.loader import Loader
from paceline.data.shard_sizes import ShardSizes, Weights, sizes_of
from paceline.errors import SettingError
from paceline.run import Run, RunParts
from paceline.step.observer import StepObserver

CHECK = 10
"""Steps between two comparisons of the processes' times."""

APART = 50
"""The fewest steps between two new cuts."""

WINDOW = 50
"""The largest number of latest steps whose times count."""

FEWEST = 5
"""The smallest number."""

UNSTEADY = 0.3
"""If a process's speed changes by this part from the older half of these steps to the newer one, only the newer half
counts."""

WARM_UP = 3
"""The first steps of a run do not count: they compile kernels and allocate memory."""

TOLERANCE = 0.05
"""Times that differ less, as a part of the longest, are left alone."""

GAIN = 0.02
"""A new cut must shorten the longest time by this part, or it is not made: examples cannot be divided."""

_UNITS = 2**20  # the sum of all weights, about


class _Step(NamedTuple):
    examples: int  # of this process
    total: int  # of all processes
    intervals: list[tuple[Reading, Reading]]


class Balance(StepObserver):
    """Balances a run of several processes. Raises SettingError if its strategy cannot split a batch unequally."""

    def __init__(self, run: Run, parts: RunParts) -> None:
        self._sizes = ShardSizes()
        _split(run, parts, self._sizes)
        self._run, self._parts = run, parts
        self._time = OwnTime(run.device, within_backward=parts.strategy.store.reduces_each)
        self._unwatch = watch(self._time.wait)
        self._waited: dict[str, float] = {}  # loader -> its `waited` at its last yield
        self._window: deque[_Step] = deque(maxlen=WINDOW)
        self._steps = 0
        self._checked, self._changed = 0, -APART  # the step of the last comparison, and of the last new cut
        self._cut: Weights = ()  # of the window's steps
        self._examples = 0  # of this process, in the open step
        self._total = 0  # of all processes, in the open step

    # --- events of the run

    def before_yield(self, loader: Loader) -> None:
        request = loader.current
        if not loader.train or request is None:
            return
        # The first wait of a pass starts workers. It does not depend on the examples.
        waited = loader.waited - self._waited.get(loader.name, loader.waited)
        self._waited[loader.name] = loader.waited
        self._time.begin(loader.fetched_at, waited)
        self._examples += request.examples
        if request.micro == 0:
            self._total += request.total
        cut = self._sizes.at(loader.name, request.epoch, request.step)
        if cut != self._cut:
            self._cut = cut
            self._window.clear()

    def in_backward(self, begins: bool) -> None:
        if begins:
            self._time.begin_backward(self._parts.strategy.store.parameters)
        else:
            self._time.end_backward()

    def before_end(self, loader: Loader, whole: bool) -> None:
        if loader.train:
            self._waited.pop(loader.name, None)
        if loader.train and not whole:
            self._time.end()
            self._examples = self._total = 0

    def after_step(self, acted: bool) -> None:
        if not acted:
            return
        self._steps += 1
        intervals = self._time.end()
        if intervals is not None and self._steps > WARM_UP:
            self._window.append(_Step(self._examples, self._total, intervals))
        self._examples = self._total = 0
        since = self._steps - self._checked
        # Independent replicas compare where they meet anyway, but not less often than a new cut may come.
        if since >= CHECK and (self._parts.strategy.synchronized() or since >= APART):
            self._checked = self._steps
            self._compare()

    def after_close(self) -> None:
        self._unwatch()
        self._time.close()

    # --- a new cut

    def _compare(self) -> None:
        """Compare the processes' times, and change the cut if that helps. Collective."""
        known = [(step.examples, seconds(step.intervals)) for step in self._window]
        steps = steady_part([(examples, took) for examples, took in known if took is not None])
        mesh = self._parts.strategy.mesh
        own = {
            "shard": mesh.shard,
            "steps": len(steps),
            "examples": sum(examples for examples, _ in steps),
            "seconds": sum(took for _, took in steps),
            "total": max((step.total for step in self._window), default=0),
            "planned": [[name, *position] for name, position in self._sizes.planned.items()],
        }
        everyone: list[Any] = world_group().gather(own, "the times of the processes")
        if self._steps - self._changed < APART or not all(other["steps"] for other in everyone):
            return
        examples, took = [0.0] * mesh.shards, [0.0] * mesh.shards
        for other in everyone:  # a shard takes as long as the slowest of its processes
            shard = other["shard"]
            examples[shard] = other["examples"] / other["steps"]
            took[shard] = max(took[shard], other["seconds"] / other["steps"])
        plan = self._parts.strategy.plan
        total = max(other["total"] for other in everyone)  # not the mean: an epoch's last global batch may be short
        units = plan.units(total)
        weights = new_weights(examples, took, units)
        if weights is None:
            return
        planned: dict[str, tuple[int, int]] = {}
        for other in everyone:
            for name, epoch, step in other["planned"]:
                planned[name] = max(planned.get(name, (0, -1)), (epoch, step))
        self._sizes.change(weights, planned)
        self._changed = self._steps
        if self._run.main:
            print(f"paceline: {line(self._steps, examples, took, weights, units, plan.unit)}", file=sys.stderr)


def split_unequally(run: Run, parts: RunParts) -> None:
    """Split every global batch of a run unequally, in a fixed way. `verify` does so for a run with `balance`.

    Raises SettingError for several processes whose strategy cannot, like Balance. One process has any strategy: it
    computes what the several are compared with.
    """
    sizes = ShardSizes()
    sizes.change(tuple(2 if shard % 2 else 3 for shard in range(parts.strategy.plan.shards)), {})
    if run.world.size > 1:
        _split(run, parts, sizes)
    else:
        parts.strategy.plan = parts.strategy.plan.balanced(sizes)


def _split(run: Run, parts: RunParts, sizes: ShardSizes) -> None:
    if not parts.strategy.split_by(sizes):
        raise SettingError(
            f"balance=True with strategy {run.settings.strategy}: it does not split a global batch by speed. Use "
            "ddp, fsdp, local_sgd or diloco, or leave out balance."
        )


def steady_part(steps: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The latest of a process's steps in which its speed was about the same; empty if they are too few.

    steps: (examples, seconds) of each.
    """
    while len(steps) >= FEWEST:
        half = len(steps) // 2
        speeds = [_speed(part) for part in (steps[:half], steps[half:])]
        if min(speeds) > 0 and max(speeds) - min(speeds) <= UNSTEADY * max(speeds):
            return steps
        steps = steps[half:]
    return []


def _speed(steps: Sequence[tuple[int, float]]) -> float:
    """Examples per second; 0 if unknown."""
    examples, took = sum(count for count, _ in steps), sum(seconds for _, seconds in steps)
    return examples / took if took else 0.0


def new_weights(examples: Sequence[float], took: Sequence[float], units: int) -> Weights | None:
    """The weights of a better cut; None if there is none that is much better.

    examples, took: for each process, its examples and its seconds per step. units: the number of things that the cut
    distributes: all examples of a global batch, or its shards.
    """
    longest = max(took)
    if longest - min(took) <= TOLERANCE * longest:
        return None
    speeds = [count / seconds for count, seconds in zip(examples, took, strict=True)]
    total = sum(speeds)
    weights = tuple(max(1, round(_UNITS * speed / total)) for speed in speeds)
    each = sum(examples) / units
    expected = [each * size / speed for size, speed in zip(sizes_of(units, weights), speeds, strict=True)]
    if max(expected) > (1 - GAIN) * longest:
        return None
    return weights


def line(
    step: int, examples: Sequence[float], took: Sequence[float], weights: Weights, units: int, unit: str = "example"
) -> str:
    """The line that rank 0 prints about a new cut. Arguments: see `new_weights`."""
    total = sum(examples)
    old = ", ".join(f"{count * units / total:.4g}" for count in examples)
    new = ", ".join(map(str, sizes_of(units, weights)))
    times = ", ".join(f"{1e3 * seconds:.3g}" for seconds in took)
    return (
        f"balance, step {step}: {units} {unit}s are now split {new} (were {old}), because the processes took {times} "
        "ms of their own time for a step."
    )
