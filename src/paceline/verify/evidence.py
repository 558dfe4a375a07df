"""What the cause of a difference is found from: runs, their differences, and linear relations between gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.verify.differences import ORDER
from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import Difference

PARALLEL = 1e-2  # the share of a gradient's norm that the multiple of another gradient may leave unexplained
# The sum of the parts misses the whole by some norm. A linear combination of the parts may leave this share of that
# norm unexplained.
BESIDE = 0.1
# The weights of a mean, found from gradients, may miss 1 by MEAN, or by ERRORS standard errors.
MEAN = 5e-3
ERRORS = 6.0


@dataclass(frozen=True)
class Cause:
    """Why runs differ."""

    key: str  # its name in `--json`
    sentence: str  # what it is, with the evidence
    remedy: str  # what to do about it
    name: str | None = None  # a parameter or a buffer, where the cause is about one
    shown_by: tuple[RunRecord, ...] = ()  # the runs that show it


@dataclass(frozen=True)
class Evidence:
    """The runs of one question, and how they differ in the first step that has a difference."""

    subject: RunRecord  # A, the run in question
    without_dropout: RunRecord  # A with dropout off: A0, or A itself where nothing was drawn
    same_shards: RunRecord | None  # B, one process that computes the same shards
    whole_batches: RunRecord | None  # C, one process that computes whole batches
    again_whole: RunRecord | None  # another run of whole batches
    # Differences of `without_dropout` and C in their first step with any: cutting the batch makes them.
    by_cutting: Sequence[Difference]
    # Differences of A and B in their first step with any: distributing the shards makes them.
    by_distributing: Sequence[Difference]
    shard_count: int  # how many shards a global batch has
    # Gradients of the parts of the batch, each weighed by its examples, with dropout off.
    part_gradients: Sequence[Mapping[str, Tensor]] | None = None
    part_examples: Sequence[int] = ()  # how many examples each part has
    counted: bool = False  # whether the loss says over how many things it is (a count)
    # How `without_dropout` differs from itself where each rank computes another rank's shard.
    by_rotating: Sequence[Difference] = ()
    gradient_noise: float = 0.0  # the norm by which rounding moves the whole batch's gradient, in `update`
    # The first update of the step whose gradients differ; `part_gradients` and `gradient_noise` belong to that update.
    update: int = 0
    told_alone: RunRecord | None = None  # D, or LD: A, with each process told that it is alone
    by_asking: Sequence[Difference] = ()  # how A differs from `told_alone`: asking for the rank makes these differences
    part_runs: tuple[RunRecord, ...] = ()  # the runs that `part_gradients` are from
    rotated_runs: tuple[RunRecord, ...] = ()  # the runs that `by_rotating` is from
    noisy: bool = False  # whole batches cannot be compared with, since the script draws other numbers for them

    @property
    def step(self) -> int:
        """The step that this is about."""
        return (self.by_cutting or self.by_distributing)[0].step

    @property
    def quantity(self) -> str:
        """The quantity that differs first."""
        return min(
            (d.quantity for d in (*self.by_cutting, *self.by_distributing) if d.step == self.step), key=ORDER.index
        )

    @property
    def compared(self) -> tuple[RunRecord, ...]:
        """The two runs whose first difference it is."""
        if self.by_cutting:
            return tuple(run for run in (self.without_dropout, self.whole_batches) if run is not None)
        return tuple(run for run in (self.subject, self.same_shards or self.told_alone) if run is not None)

    @property
    def reference(self) -> RunRecord:
        """A run of one process, or one in which each process is told that it is alone."""
        found = self.whole_batches or self.same_shards or self.told_alone
        assert found is not None
        return found


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def scalar_multiple(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], noise: float = 0.0) -> float | None:
    """r where ours = r * theirs. None where no r explains ours.

    noise: the norm by which rounding moves the gradients.
    """
    names = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    if not names:
        return None
    a, b = _joined(ours, names), _joined(theirs, names)
    if not (a.isfinite().all() and b.isfinite().all()) or not b.norm() or not a.norm():
        return None
    ratio = float(a @ b / (b @ b))
    return ratio if float((a - ratio * b).norm()) < max(PARALLEL * float(a.norm()), 3 * noise) else None


def linear_combination(
    whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], noise: float = 0.0
) -> tuple[list[float], float] | None:
    """(x, the standard error of the mean of x) where whole = sum of x_i * parts_i, by least squares.

    None where no x explains the whole, or where there are not more numbers than parts. What x leaves unexplained is
    compared with what there is to explain, which is how far the plain sum of the parts misses the whole; and with the
    noise.

    noise: the norm by which rounding moves the gradients.
    """
    names = [name for name in whole if all(part[name].shape == whole[name].shape for part in parts if name in part)]
    if len(parts) < 2 or not names:
        return None
    rows = [torch.cat([part[n].flatten() if n in part else 0 * whole[n].flatten() for n in names]) for part in parts]
    columns, target = torch.stack(rows, 1).double(), _joined(whole, names).double()
    if len(target) <= len(parts) + 1 or not (columns.isfinite().all() and target.isfinite().all()):
        return None
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution  # a part may have no gradient
    rest = float((columns @ found - target[:, None]).norm())
    missing = float((target - columns.sum(1)).norm())
    if rest > max(BESIDE * missing, 3 * noise):
        return None
    spread = torch.linalg.pinv(columns.T @ columns).sum().clamp(min=0) ** 0.5
    return found.flatten().tolist(), float(spread) / len(parts) * rest / len(target) ** 0.5
