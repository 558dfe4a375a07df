"""Compare rows of examples that a collate function pads to the longest example of the batch.

The width of such a row depends on its batch. A row is recorded (observe/digests.py) as its number of steps, followed by
four numbers for the right side and four for the left side: number of equal steps at the end, checksum of one such step,
checksum of the other steps, checksum of the whole row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = Sequence[int]
_SIDES = (1, 5)  # the offset of each side's numbers


def unify_padded(ranks: Sequence[list[dict[str, Any]]]) -> None:
    """Give the rows of one example the same digest if they are equal except for padding. Changes the "yield" events of
    all ranks in place. Compares rows of the same loader, index and tensor."""
    known: dict[tuple[str, int, int], list[tuple[int, Row]]] = {}
    for e in (e for events in ranks for e in events if e["k"] == "yield" and e.get("padded") and e.get("idx")):
        for leaf, rows in enumerate(e["padded"]):
            for place, index in enumerate(e["idx"][: len(rows or ())]):
                before = known.setdefault((e["loader"], leaf, index), [])
                same = next((digest for digest, row in before if equal_but_padding(row, rows[place])), None)
                if same is None:
                    before.append((e["rows"][leaf][place], rows[place]))
                else:
                    e["rows"][leaf][place] = same


def equal_but_padding(a: Row, b: Row) -> bool:
    """Are two rows equal, or equal after padding with one value on one side?"""
    for side in _SIDES:
        _, value, real, whole = a[side : side + 4]
        _, value_b, real_b, whole_b = b[side : side + 4]
        if whole in (whole_b, real_b) or real == whole_b or (real and real == real_b and value == value_b):
            return True
    return False


def lengths(yields: Sequence[dict[str, Any]]) -> Iterator[list[tuple[int, int]]]:
    """For each tensor of sequences and each side: (index, number of steps without padding) of the rows that were read.
    The padding is the value that most often repeats at the end of a row."""
    leaves = max((len(y.get("padded") or ()) for y in yields), default=0)
    for leaf in range(leaves):
        rows = [
            (index, row)
            for y in yields
            if y.get("padded") and y.get("idx")
            for index, row in zip(y["idx"], y["padded"][leaf] or ())
        ]
        for side in _SIDES:
            repeated = Counter(row[side + 1] for _, row in rows if row[side] > 1)
            if repeated:
                padding = repeated.most_common(1)[0][0]
                yield [(index, row[0] - row[side] * (row[side + 1] == padding)) for index, row in rows]
