"""The tolerances of `paceline verify`: the difference between two runs that rounding alone explains.

The tolerances are measured on the runs of the comparison itself. Tensors are compared by the 2-norm of the difference.

Gradients. C2 computes the batches of C again, with three changes. The examples come in reverse order. Each weight is
moved to the next floating-point number up or down. The loss is multiplied by 0.75, and the gradients are divided by
0.75 after the backward. Up to rounding, the results are the same: C2 adds the same numbers in a different order, and
rounds differently in the forward and in the backward. R is the distance between a tensor of C and of C2 (the
root mean square over the steps).

The sum of many rounding errors is close to normally distributed, and so is the difference of A and C. Its variance is
between R^2 and 4 R^2, because each shard is rounded separately and the whole batch only once. The tolerance is
MARGIN = 8 times R, which is at least 4 standard deviations. Rounding exceeds it in one of 16,000 tensors with a single
element, and in far fewer tensors with more elements.

Four cases need a larger tolerance:

- A tensor with few elements may have a small R by chance. So R, relative to the tensor's norm, is at least the median
  over the run's tensors.
- If C2 changes nothing at all, the tolerance follows from the unit roundoff of fp32.
- If a hook or a tensor outside the model would see the scaled loss, the loss is not scaled, and C2 does not show
  rounding to 16 bits. Then R is at least four times the unit roundoff of the precision.
- If the model amplifies rounding until most digits of a gradient are lost, errors are no longer close to normal. R is
  then the maximum over the steps.

Kinks. Rounding that moves the input of a ReLU across zero changes a gradient by more, but this is rare. So a difference
is no fault if it affects only gradients, leaves half of their digits equal, and occurs in fewer than half of the steps.
Real faults recur.

Losses and buffers. C2 shows the effect of a different order of the sums. It does not show how activations are rounded
in batches of a different size. This effect is at most the unit roundoff u of the precision (2^-24 in fp32, 2^-9 in
bf16), relative to the value.

Weights. If a run updates from its own gradients (LBFGS, or a script without an optimizer), the tolerance of a weight is
measured like that of a gradient. Otherwise each run of one process makes its update from the gradients of the subject
run, and weights differ only by the rounding of the update's arithmetic: about ten operations per element, and with
gradient clipping a norm of up to 2^30 elements. OPERATIONS = 64 times the unit roundoff covers both.
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
    """A quantity with a difference above its tolerance."""

    step: int  # the number of the step in the whole run, from 0
    quantity: str  # one of differences.ORDER
    name: str | None  # the parameter or buffer
    difference: float  # the size of the difference; NaN if it has no number
    tolerance: float  # the largest difference that rounding explains
    size: float = float("nan")  # the norm of the reference


class Tolerances:
    """The tolerances, measured on C and C2. If either run is missing, they follow from the unit roundoff alone."""

    def __init__(
        self, whole_batches: RunRecord | None, reversed_batches: RunRecord | None, precision: str, tf32: bool = False
    ) -> None:
        self._unit_roundoff = _TF32 if tf32 and precision == "fp32" else ROUNDOFF[precision]
        # The name of a tensor -> its squared distance between C and C2, for each step.
        self._moved: dict[str, list[float]] = {}
        self._loss = 0.0  # the largest effect of rounding on a loss
        # Relative effect of rounding on weights that a run updates from its own gradients.
        self._updates: list[float] = []
        # Relative effect of rounding on a learning rate that the script computes.
        self._rate = 0.0
        self.enlarged = False  # the model amplifies rounding
        shares: dict[str, list[float]] = {}  # parameter -> the relative distance of its gradients in C and C2
        scaled = reversed_batches is not None and reversed_batches.ranks[0]["steps"][0]["scaled"]
        if whole_batches is not None and reversed_batches is not None:
            for step in range(min(whole_batches.steps, reversed_batches.steps)):
                if not whole_batches.not_finite(step) and not reversed_batches.not_finite(step):
                    self._measure_step(whole_batches, reversed_batches, step, shares)
        # Parameters with gradients that are mostly rounding: in most steps rounding is more than a tenth of the
        # gradient's norm. Their tolerance is relative to the model's largest gradient.
        self.indeterminate = {name for name, found in shares.items() if median(found) > 0.1}
        middle = {name: median(found) for name, found in shares.items()}
        known = [share for name, share in middle.items() if name not in self.indeterminate]
        # R relative to a gradient: the median of the parameters that are not indeterminate.
        self._typical = max(median(known) if known else 0.0, ROUNDOFF["fp32"] if scaled else 4 * self._unit_roundoff)
        self._of_all = median(middle.values()) if middle else 0.0

    def _measure_step(
        self, whole_batches: RunRecord, reversed_batches: RunRecord, step: int, shares: dict[str, list[float]]
    ) -> None:
        """Add the effects of rounding that C2 shows in one step."""
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
        """R of a tensor: its distance between C and C2."""
        found = self._moved.get(name, [])
        if self.enlarged:
            return max(found, default=0.0) ** 0.5
        return (sum(found) / len(found)) ** 0.5 if found else 0.0

    @property
    def rounding_only(self) -> bool:
        """Whether most gradients agree in at least half of their digits in C and C2, as after mere rounding."""
        return self._of_all <= self._unit_roundoff**0.5

    def may_be_kinks(self, found: Sequence[Difference]) -> bool:
        """Whether rounding at a kink may explain these differences of a step, if they are rare."""
        return all(d.quantity == "gradient" and d.difference <= self._unit_roundoff**0.5 * d.size for d in found)

    def gradient(self, name: str, reference: Mapping[str, Tensor]) -> float:
        """The tolerance of the gradient of a parameter. reference: gradients by name."""
        size = norm(reference[name]) if name in reference else 0.0
        if name in self.indeterminate or not size:
            size = max(map(norm, reference.values()), default=0.0)
        return MARGIN * max(self._moved_by_rounding(name), self._typical * size)

    def buffer(self, name: str, reference: Tensor) -> float:
        """The tolerance of a buffer."""
        return MARGIN * max(self._moved_by_rounding(name), self._unit_roundoff * norm(reference))

    def update(self, name: str, reference: Tensor) -> float:
        """The tolerance of weights that each run updated from its own gradients."""
        typical = median(self._updates) if self._updates else 0.0
        return MARGIN * max(self._moved_by_rounding(f"after {name}"), typical * norm(reference))

    def noise(self, names: Iterable[str], reference: Mapping[str, Tensor]) -> float:
        """The norm of the effect of rounding on these gradients together."""
        return sum((self.gradient(name, reference) / MARGIN) ** 2 for name in names) ** 0.5

    def learning_rate(self, reference: float) -> float:
        """The tolerance of a learning rate."""
        return max(2.0**-40, MARGIN * self._rate) * abs(reference)  # 2^-40 covers float64 rounding

    def loss(self, reference: float) -> float:
        """The tolerance of a loss."""
        return MARGIN * max(self._loss, self._unit_roundoff * abs(reference))


def norm(tensor: Tensor) -> float:
    """The 2-norm, in float64."""
    return float(tensor.double().norm())
