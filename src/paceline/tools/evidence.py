"""What the causes of `paceline verify` are found from: the sides of a question, and how their gradients are related."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.tools.sides import ORDER, Difference, Side

PARALLEL = 1e-2  # of a gradient's norm may lie beside the line, or the plane, that explains it
BESIDE = 0.1  # of what the parts' sum misses of the whole may lie beside the plane that explains it
MEAN = 5e-3  # by which the weights of a mean, found from gradients, may miss 1, or by so many standard errors:
ERRORS = 6.0


@dataclass(frozen=True)
class Cause:
    """key: its name in `--json`. sentence: with its evidence. remedy. name: a parameter or buffer, where it is one.
    sides: the runs that show it."""

    key: str
    sentence: str
    remedy: str
    name: str | None = None
    sides: tuple[Side, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """ours: A; plain; shards: B; whole: C. parts: gradients of the parts of the batch, each weighed by its examples,
    with dropout off; examples: of each. counted: whether the loss says how many things it is over. turned: how plain
    differs from itself where each rank computes another's shard. cut: the first step's differences of plain and C;
    spread: of A and B. again: another run of whole batches. n: shards. update: of the step's updates
    the first whose gradients differ; parts and noise (of the whole batch's gradient) are those of its. told: A,
    each process told that it is alone; asked: how A differs from it. of_parts, of_turned: the runs that parts and
    turned are from. noisy: whole batches cannot be compared with, for what the script draws."""

    ours: Side
    plain: Side
    shards: Side | None
    whole: Side | None
    again: Side | None
    cut: Sequence[Difference]
    spread: Sequence[Difference]
    n: int
    parts: Sequence[Mapping[str, Tensor]] | None = None
    examples: Sequence[int] = ()
    counted: bool = False
    turned: Sequence[Difference] = ()
    noise: float = 0.0
    update: int = 0
    told: Side | None = None
    asked: Sequence[Difference] = ()
    of_parts: tuple[Side, ...] = ()
    of_turned: tuple[Side, ...] = ()
    noisy: bool = False

    @property
    def step(self) -> int:
        return (self.cut or self.spread)[0].step

    @property
    def first(self) -> str:
        """The quantity that differs first."""
        return min((d.quantity for d in (*self.cut, *self.spread) if d.step == self.step), key=ORDER.index)

    @property
    def compared(self) -> tuple[Side, ...]:
        """Those whose first difference it is."""
        if self.cut:
            return tuple(side for side in (self.plain, self.whole) if side is not None)
        return tuple(side for side in (self.ours, self.shards or self.told) if side is not None)

    @property
    def reference(self) -> Side:
        found = self.whole or self.shards or self.told
        assert found is not None
        return found


def _joined(side: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([side[name].flatten() for name in names])


def multiple(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], noise: float = 0.0) -> float | None:
    """r where ours = r theirs, but for noise: a norm."""
    names = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    if not names:
        return None
    a, b = _joined(ours, names), _joined(theirs, names)
    if not (a.isfinite().all() and b.isfinite().all()) or not b.norm() or not a.norm():
        return None
    ratio = float(a @ b / (b @ b))
    return ratio if float((a - ratio * b).norm()) < max(PARALLEL * float(a.norm()), 3 * noise) else None


def span(
    whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]], noise: float = 0.0
) -> tuple[list[float], float] | None:
    """(x, the standard error of the sum of x_i parts / parts) where whole = sum of x_i parts_i, with more numbers than
    parts. What lies beside that is compared with what is to be explained: how far the sum of the parts misses the
    whole; and with noise, a norm."""
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
