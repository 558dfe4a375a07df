"""How far rounding alone may take two runs of `paceline verify` apart.

The tolerances are measured on the runs of the question itself. What is compared of a tensor is the 2-norm of its
difference.

Gradients. C2 computes the batches of C once more: with their examples in reverse order, from weights each of which is
the next floating-point number up or down, and with losses times 0.75, a factor that is taken out of the gradients
again. As far as these numbers are known, they are the same numbers, added up in another order and rounded elsewhere,
on the way through the model and all the way back. R is how far this moves a tensor (the root mean square over the
steps).

Rounding errors of many terms are near to normal. So is the difference of A and C. Its variance is that of R, or up to
four times as much, since each shard is rounded by itself where the whole batch is rounded once. The tolerance is MARGIN
= 8 times R, which is at least 4 standard deviations. A normal number goes beyond it in one of 16,000 tensors with a
single element, and in far fewer tensors of more elements.

Four cases need more. A tensor of few elements may have a small R by chance: its tolerance is no less than the run's
tensors have in the middle, in relation to the norm. Where nothing moves at all, the rounding of fp32 is left. Where the
loss cannot be scaled, since a hook or a tensor beside the model would see it, the rounding of 16 bits does not show,
and four times its unit roundoff is taken. In a model that enlarges rounding until most of a gradient's digits are lost,
errors are not near to normal any more: R is then the largest of the steps.

Kinks. Rounding that takes the input of a ReLU over zero moves a gradient by more, and rarely. So a difference is no
fault if it is one of gradients alone, by which they keep half of their digits, in fewer than half of the steps: faults
return.

Losses and buffers. C2 moves them by another order of their sums. What C2 does not show is the rounding of activations
in batches of another size. It is at most the unit roundoff u of the precision (2^-24 in fp32, 2^-9 in bf16) in relation
to the number.

Weights. Where a run updates from its own gradients (LBFGS, or a script without an optimizer), weights are judged by how
far C2 moves them. Else each run of one process makes its update from the gradient of the run in question, and weights
differ by the rounding of the update's own arithmetic alone: some ten operations on each element, and a norm of up to
2^30 elements where gradients are clipped. OPERATIONS = 64 covers both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from paceline.verify.run_record import RunRecord

MARGIN = 8.0
OPERATIONS = 64.0
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-9, "bf16-params": 2.0**-9, "fp16": 2.0**-12}
_TF32 = 2.0**-11


@dataclass(frozen=True)
class Difference:
    """A quantity that is further apart than its tolerance."""

    step: int  # in the whole run, from 0
    quantity: str  # one of differences.ORDER
    name: str | None  # the parameter or the buffer
    difference: float  # how far it is apart; NaN where that has no number
    tolerance: float  # how far it may be apart
    size: float = float("nan")  # the norm of what it differs from


class Tolerances:
    """Tolerances from C and C2. Where one of them is missing: from unit roundoff alone."""

    def __init__(
        self, whole_batches: RunRecord | None, reversed_batches: RunRecord | None, precision: str, tf32: bool = False
    ) -> None:
        self._unit_roundoff = _TF32 if tf32 and precision == "fp32" else ROUNDOFF[precision]
        # By the name of a tensor: R^2 of each step.
        self._moved: dict[str, list[float]] = {}
        self._loss = 0.0  # the most by which rounding moves a loss
        # How far rounding moves weights that a run updates from its own gradients, in relation to them.
        self._updates: list[float] = []
        # How far rounding moves a learning rate that the script computes, in relation to it.
        self._rate = 0.0
        self.enlarged = False  # the model enlarges rounding
        shares: dict[str, list[float]] = {}  # by parameter: what C2 moves its gradient by, in relation to it
        scaled = reversed_batches is not None and reversed_batches.ranks[0]["steps"][0]["scaled"]
        if whole_batches is not None and reversed_batches is not None:
            for step in range(min(whole_batches.steps, reversed_batches.steps)):
                if not whole_batches.not_finite(step) and not reversed_batches.not_finite(step):
                    self._measure_step(whole_batches, reversed_batches, step, shares)
        # Parameters whose gradient is rounding and little else: in most steps R is more than a tenth of it. They are
        # judged by the model's largest gradient.
        self.indeterminate = {name for name, found in shares.items() if median(found) > 0.1}
        middle = {name: median(found) for name, found in shares.items()}
        known = [share for name, share in middle.items() if name not in self.indeterminate]
        # R in relation to a gradient: the median of the parameters that are not indeterminate.
        self._typical = max(median(known) if known else 0.0, ROUNDOFF["fp32"] if scaled else 4 * self._unit_roundoff)
        self._of_all = median(middle.values()) if middle else 0.0

    def _measure_step(
        self, whole_batches: RunRecord, reversed_batches: RunRecord, step: int, shares: dict[str, list[float]]
    ) -> None:
        """Add what C2 moves in one step."""
        ours, theirs = whole_batches.losses(step), reversed_batches.losses(step)
        self._loss = max([self._loss, *(abs(ours[c] - theirs[c]) for c in ours.keys() & theirs.keys())])
        rates = zip(whole_batches.learning_rates(step), reversed_batches.learning_rates(step), strict=False)
        self._rate = max([self._rate, *(abs(a - b) / abs(a) for a, b in rates if a)])
        for update in range(whole_batches.updates(step)):
            first, second = whole_batches.gradients(step, update), reversed_batches.gradients(step, update)
            for name in first.keys() & second.keys():
                if first[name].shape == second[name].shape and (size := norm(first[name])):
                    moved = norm(first[name] - second[name])
                    self._moved.setdefault(name, []).append(moved**2)
                    shares.setdefault(name, []).append(moved / size)
        first, second = (
            run.tensors(f"after-{step}-{whole_batches.updates(step) - 1}") for run in (whole_batches, reversed_batches)
        )
        self._measure_buffers(first, second, whole_batches.weights)
        for name in (
            first.keys() & second.keys() & whole_batches.weights if whole_batches.updates_own_gradients(step) else ()
        ):
            moved, size = norm(first[name].double() - second[name].double()), norm(first[name])
            self._moved.setdefault(f"after {name}", []).append(moved**2)
            self._updates.append(moved / size if size else 0.0)
        self._measure_buffers(
            whole_batches.tensors(f"own-{step}"), reversed_batches.tensors(f"own-{step}"), whole_batches.weights
        )

    def _measure_buffers(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor], weights: set[str]) -> None:
        for name in first.keys() & second.keys() - weights:
            self._moved.setdefault(name, []).append(norm(first[name].double() - second[name].double()) ** 2)

    def _moved_by_rounding(self, name: str) -> float:
        """R of a tensor: how far C2 moves it."""
        found = self._moved.get(name, [])
        if self.enlarged:
            return max(found, default=0.0) ** 0.5
        return (sum(found) / len(found)) ** 0.5 if found else 0.0

    @property
    def rounding_only(self) -> bool:
        """Whether C2 leaves most gradients half of their digits, as rounding does."""
        return self._of_all <= self._unit_roundoff**0.5

    def may_be_kinks(self, found: Sequence[Difference]) -> bool:
        """Whether these differences of a step may come from rounding at a kink, if they are rare."""
        return all(d.quantity == "gradient" and d.difference <= self._unit_roundoff**0.5 * d.size for d in found)

    def gradient(self, name: str, reference: Mapping[str, Tensor]) -> float:
        """For the gradient of a parameter, whose reference is among these gradients."""
        size = norm(reference[name]) if name in reference else 0.0
        if name in self.indeterminate or not size:
            size = max(map(norm, reference.values()), default=0.0)
        return MARGIN * max(self._moved_by_rounding(name), self._typical * size)

    def buffer(self, name: str, reference: Tensor) -> float:
        """For a buffer."""
        return MARGIN * max(self._moved_by_rounding(name), self._unit_roundoff * norm(reference))

    def update(self, name: str, reference: Tensor) -> float:
        """For weights that each run has updated from its own gradients."""
        typical = median(self._updates) if self._updates else 0.0
        return MARGIN * max(self._moved_by_rounding(f"after {name}"), typical * norm(reference))

    def noise(self, names: Iterable[str], reference: Mapping[str, Tensor]) -> float:
        """The norm by which rounding moves these gradients together."""
        return sum((self.gradient(name, reference) / MARGIN) ** 2 for name in names) ** 0.5

    def learning_rate(self, reference: float) -> float:
        """For a learning rate."""
        return max(2.0**-40, MARGIN * self._rate) * abs(reference)  # float64, by other ways

    def loss(self, reference: float) -> float:
        """For a loss."""
        return MARGIN * max(self._loss, self._unit_roundoff * abs(reference))


def norm(tensor: Tensor) -> float:
    """The 2-norm, in float64."""
    return float(tensor.double().norm())
