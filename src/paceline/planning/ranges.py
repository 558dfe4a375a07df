"""Range: a low, a middle and a high value, for results with an interval."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """Three values in ascending order. The middle is the estimate."""

    low: float
    middle: float
    high: float

    @classmethod
    def exact(cls, value: float) -> Range:
        return cls(value, value, value)

    def plus(self, other: Range) -> Range:
        return Range(self.low + other.low, self.middle + other.middle, self.high + other.high)

    def times(self, factor: float) -> Range:
        """Each value multiplied by `factor`, which is not negative."""
        return Range(self.low * factor, self.middle * factor, self.high * factor)


ZERO = Range.exact(0.0)
