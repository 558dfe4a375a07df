"""Why the losses of a case differ from those of `single`. Pure."""

from __future__ import annotations

from paceline.compare.cases import Case
from paceline.compare.figures import Figures, Row
from paceline.trials.spec import BATCH_NORM_PER_SHARD, DRAWS, NOT_IN_STEP

SAME = 1e-3  # losses are equal if they differ by at most this fraction of the largest loss


def is_same(difference: float | None, base: Figures) -> bool:
    """Whether losses that differ from those of `base` by `difference` are equal within rounding. False for NaN."""
    return difference is not None and difference <= SAME * max(map(abs, base.losses.values()), default=0.0)


def cause_of_difference(row: Row, reference: Case, base: Figures) -> str | None:
    """Why the losses of a row differ from those of the reference; None if they do not, or were not compared.

    Independent replicas always make them differ, so this cause comes first.
    """
    if row.figures is None or row.difference is None or is_same(row.difference, base):
        return None
    traits = row.figures.traits
    if NOT_IN_STEP in traits:
        return "it changes the training by design: its replicas do not combine every gradient before each update"
    if row.case.precision != reference.precision:
        return f"it computes in {row.case.precision}, and {reference.name} in {reference.precision}"
    if DRAWS in base.traits:
        return (
            "the model or the loss draws random numbers (such as dropout), which differ between shards; paceline "
            "verify compares with dropout off"
        )
    if BATCH_NORM_PER_SHARD in traits:
        return "batch_norm=shard: each shard is normalised by its local statistics"
    return f"unknown; paceline verify --strategy {row.case.spec} finds the cause and its line"
