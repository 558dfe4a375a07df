"""Chooses the layer calls at which a pipeline splits a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from paceline.errors import ModelError, SettingError


def boundaries(names: Sequence[str], stages: int, cut: str, sizes: Sequence[float]) -> list[int]:
    """The number of each stage's first unit, from 0, followed by the number of units. names, sizes: of all units, which
    are the parts between possible cuts. cut: "2,4", or names of units; if empty, the largest sum of `sizes` in a stage
    is minimized. Raises SettingError or ModelError."""
    if len(names) < stages:
        raise ModelError(
            f"strategy pipeline: the model has {len(names)} layers that can be in different stages "
            f"({', '.join(names[:8])}), too few for {stages} stages. Set stages, or start fewer processes."
        )
    if cut:
        starts = [_number(names, part.strip()) for part in cut.split(",")]
        whole = [0, *starts, len(names)]
        if len(starts) != stages - 1 or any(a >= b for a, b in pairwise(whole)):
            raise SettingError(
                f"strategy pipeline: cut={cut!r}: {stages} stages need {stages - 1} split point(s), in order: "
                f"numbers from 1 to {len(names) - 1}, or names of: {', '.join(names)}."
            )
        return whole
    return balanced(sizes, stages)


def _number(names: Sequence[str], text: str) -> int:
    by_number = names == [str(number) for number in range(len(names))]  # the names in an nn.Sequential
    if text in names and not (text.isdigit() and by_number):
        return names.index(text)
    return int(text) if text.isdigit() else -1


def balanced(sizes: Sequence[float], stages: int) -> list[int]:
    """Split `sizes` in order into nonempty parts such that the largest sum of a part is minimal."""
    count, before = len(sizes), [0.0, *accumulate(sizes)]
    # best[n]: (largest sum, starts of the parts) for the first n sizes, split into `part` parts after each round
    best: list[tuple[float, list[int]]] = [(before[n] if n else float("inf"), [0]) for n in range(count + 1)]
    for part in range(2, stages + 1):
        best = [
            min(
                ((max(best[m][0], before[n] - before[m]), [*best[m][1], m]) for m in range(part - 1, n)),
                default=(float("inf"), []),
                key=lambda found: found[0],
            )
            for n in range(count + 1)
        ]
    return [*best[count][1], count]
