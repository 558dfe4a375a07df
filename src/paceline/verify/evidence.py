"""The evidence for the cause of a difference: runs, their differences, and linear relations between gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.verify.differences import ORDER
from paceline.verify.run_record import RunRecord
from paceline.verify.tolerances import Difference

# A gradient counts as a multiple of another gradient if at most this fraction of its norm remains after subtraction.
PARALLEL = 1e-2
# A linear combination of the parts' gradients explains the whole gradient if its error is at most this fraction of the
# error of their plain sum.
BESIDE = 0.1
# The weights of a mean, found from gradients, may differ from 1 by MEAN, or by ERRORS standard errors.
MEAN = 5e-3
ERRORS = 6.0


@dataclass(frozen=True)
class Cause:
    """The cause of a difference between runs."""

    key: str  # its name in `--json`
    sentence: str  # the cause and its evidence
    remedy: str  # the fix
    name: str | None = None  # the parameter or buffer, if the cause is about one
    shown_by: tuple[RunRecord, ...] = ()  # the runs that show it


@dataclass(frozen=True)
class Evidence:
    """The runs of one comparison, and their differences in the first step that has any."""

    subject: RunRecord  # A, the subject run
    without_dropout: RunRecord  # A with dropout off: A0; A if nothing was drawn
    same_shards: RunRecord | None  # B, one process that computes the same shards
    whole_batches: RunRecord | None  # C, one process that computes whole batches
    again_whole: RunRecord | None  # C2, a second run of whole batches
    # Differences of `without_dropout` and C in the first step that has any: caused by splitting the batch.
    by_splitting: Sequence[Difference]
    # Differences of A and B in the first step that has any: caused by distributing the shards.
    by_distributing: Sequence[Difference]
    shard_count: int  # shards per global batch
    # Gradients of the parts of the batch, each weighted by its examples, with dropout off.
    part_gradients: Sequence[Mapping[str, Tensor]] | None = None
    part_examples: Sequence[int] = ()  # the number of examples in each part
    counted: bool = False  # whether the loss comes with a count
    # Differences of `without_dropout` and the same run with each shard on another rank.
    by_rotating: Sequence[Difference] = ()
    gradient_noise: float = 0.0  # the norm of the effect of rounding on the whole batch's gradient, in `update`
    # The first update of the step with different gradients; `part_gradients` and `gradient_noise` belong to it.
    update: int = 0
    rank_0_of_1: RunRecord | None = None  # D or LD: A, with rank 0 of 1 reported to each process
    by_rank_queries: Sequence[
        Difference
    ] = ()  # differences of A and `rank_0_of_1`: caused by the rank or the world size
    part_runs: tuple[RunRecord, ...] = ()  # the runs that made `part_gradients`
    rotated_runs: tuple[RunRecord, ...] = ()  # the runs that made `by_rotating`
    noisy: bool = False  # whole batches cannot be compared, because the script draws different numbers for them

    @property
    def step(self) -> int:
        """The first step with a difference."""
        return (self.by_splitting or self.by_distributing)[0].step

    @property
    def quantity(self) -> str:
        """The first quantity that differs."""
        return min(
            (d.quantity for d in (*self.by_splitting, *self.by_distributing) if d.step == self.step), key=ORDER.index
        )

    @property
    def compared(self) -> tuple[RunRecord, ...]:
        """The two runs that show the first difference."""
        if self.by_splitting:
            return tuple(run for run in (self.without_dropout, self.whole_batches) if run is not None)
        return tuple(run for run in (self.subject, self.same_shards or self.rank_0_of_1) if run is not None)

    @property
    def reference(self) -> RunRecord:
        """The run to compare with: C, else B, else the run in which each process sees rank 0 of 1."""
        found = self.whole_batches or self.same_shards or self.rank_0_of_1
        assert found is not None
        return found


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def scalar_multiple(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], noise: float = 0.0) -> float | None:
    """Find the number r with ours = r * theirs; None if there is no such r.

    noise: the norm of the effect of rounding on the gradients.
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
    """Solve whole = sum of x_i * parts_i by least squares. Return (x, the standard error of the mean of x).

    Returns None if no x explains the whole, or if there are too few parts or numbers. The residual may be up to 3 times
    the noise, or up to BESIDE times the distance between the plain sum of the parts and the whole.

    noise: the norm of the effect of rounding on the gradients.
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
