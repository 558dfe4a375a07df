"""What the causes of `paceline verify` are found from: the sides of a question, and how their gradients are related."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.tools.sides import ORDER, Difference, Side

PARALLEL = 1e-2  # of a gradient's norm may lie beside the line, or the plane, that explains it
MEAN = 5e-2  # by which the weights of a mean, found from gradients, may miss 1


@dataclass(frozen=True)
class Cause:
    """key: its name in `--json`. sentence: with its evidence. remedy. name: a parameter or buffer, where it is one."""

    key: str
    sentence: str
    remedy: str
    name: str | None = None


@dataclass(frozen=True)
class Evidence:
    """ours: A; plain; shards: B; whole: C; parts: B with dropout off. cut: the first step's differences of plain and
    C; spread: of A and B. again: another run of whole batches. n: shards."""

    ours: Side
    plain: Side
    shards: Side | None
    whole: Side | None
    parts: Side | None
    again: Side | None
    cut: Sequence[Difference]
    spread: Sequence[Difference]
    n: int

    @property
    def step(self) -> int:
        return (self.cut or self.spread)[0].step

    @property
    def first(self) -> str:
        """The quantity that differs first."""
        return min((d.quantity for d in (*self.cut, *self.spread) if d.step == self.step), key=ORDER.index)

    @property
    def reference(self) -> Side:
        found = self.whole or self.shards
        assert found is not None
        return found


def _joined(side: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([side[name].flatten() for name in names])


def multiple(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float | None:
    """r where ours = r theirs."""
    names = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    if not names:
        return None
    a, b = _joined(ours, names), _joined(theirs, names)
    if not (a.isfinite().all() and b.isfinite().all()) or not b.norm() or not a.norm():
        return None
    ratio = float(a @ b / (b @ b))
    return ratio if float((a - ratio * b).norm()) < PARALLEL * float(a.norm()) else None


def span(whole: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> list[float] | None:
    """x where whole = sum of x_i parts_i, with more numbers than parts."""
    names = [name for name in whole if all(name in part and part[name].shape == whole[name].shape for part in parts)]
    if len(parts) < 2 or not names:
        return None
    columns, target = torch.stack([_joined(part, names) for part in parts], 1), _joined(whole, names)
    if len(target) <= len(parts) + 1 or not (columns.isfinite().all() and target.isfinite().all()):
        return None
    found = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution  # a part may have no gradient
    rest = float((columns @ found - target[:, None]).norm())
    return found.flatten().tolist() if rest < PARALLEL * float(target.norm()) else None
