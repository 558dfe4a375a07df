"""Rows of examples that a collate pads to the longest of their batch: one example has other widths in other batches.

A row is recorded as [steps, then for the right and the left side: the number of equal steps at the end, a checksum of
such a step, of the others, and of the whole row] (tensor_digests.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = Sequence[int]
_SIDES = (1, 5)  # where the numbers of a side begin


def unify_padded(ranks: Sequence[list[dict[str, Any]]]) -> None:
    """Give the rows of one example the same digest wherever they are equal but for padding: in the "yield" events of
    all ranks, by loader, index and tensor."""
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
    """Are two rows equal, or would they be with padding of one value, on one side?"""
    for side in _SIDES:
        _, value, real, whole = a[side : side + 4]
        _, value_b, real_b, whole_b = b[side : side + 4]
        if whole in (whole_b, real_b) or real == whole_b or (real and real == real_b and value == value_b):
            return True
    return False


def lengths(yields: Sequence[dict[str, Any]]) -> Iterator[list[tuple[int, int]]]:
    """For each tensor of sequences and each side: (index, number of steps that are no padding) of the rows that were
    read. The padding is the value that most often stands at the end more than once."""
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
