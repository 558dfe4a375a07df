"""The results of the user's closure in a pipeline: weighted on the last stage, and then broadcast to all stages.

A Total is divided by the count over the whole global batch, which is not known when the first backward begins. So if a
closure returns a Total, the last stage first runs the closure with zeros as the model's output, only to get the counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.mesh import Mesh, current
from paceline.comm.scalars import scalar, wide_dtype
from paceline.data.bundle import Piece
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Work


class _Kind(NamedTuple):
    """The kind of a closure's result."""

    counted: tuple[bool, ...]  # for each term, whether it has a count
    dtype: torch.dtype  # of the values


Share = tuple[Piece, float, float]
"""(micro-batch, weight of a mean over its examples, loss scale for a Total)."""


def on_one_stage() -> AbstractContextManager[None]:
    """Within the block the closure runs on only one stage, so functions that need all processes raise."""
    return current().computing(current().replicas, on_all_members=False)


class Losses:
    """The closure's results, for each backward call."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._kinds: dict[int, _Kind] = {}  # backward call -> kind; on the last stage
        self._agreed: dict[int, _Kind] = {}  # the same, on all stages

    def inverse_counts(
        self, work: Work, groups: Sequence[Sequence[Share]], counted: Callable[[int, Piece], list[Term]]
    ) -> dict[int, Tensor]:
        """On the last stage: term's number -> 1 / (its count over the whole global batch), for terms that have a count.
        counted(number of the group, piece): runs the closure with zeros as the model's output."""
        kind = self._kinds.get(work.call)
        if kind is not None and not any(kind.counted):
            return {}
        counts: list[list[Weight | None]] = []
        for number, group in enumerate(groups):
            for piece, _, _ in group:
                terms = counted(number, piece)
                counts.append([term.count for term in terms])
                if kind is None:
                    kind = _Kind(tuple(term.count is not None for term in terms), terms[0].value.dtype)
        assert kind is not None
        self._kinds[work.call] = kind
        which = [i for i, counted in enumerate(kind.counted) if counted]
        if not which:
            return {}
        dtype = wide_dtype(self._device)
        rows = [[scalar(count, dtype, self._device) for i in which if (count := row[i]) is not None] for row in counts]
        total = torch.stack([torch.stack(row) for row in rows]).sum(0)
        total = self._mesh.data.all_reduce(total)
        inverse = torch.where(total > 0, 1 / total.clamp(min=torch.finfo(dtype).tiny), 0)
        return dict(zip(which, inverse.unbind(), strict=True))

    def weighted(self, call: int, terms: Sequence[Term], share: Share, inverse: dict[int, Tensor]) -> Tensor:
        """The scalar that a micro-batch adds to the loss of the global batch. Raises UsageError if the closure returns
        other kinds of terms than before."""
        counted = tuple(term.count is not None for term in terms)
        if counted != self._kinds[call].counted:
            raise UsageError(
                "strategy pipeline: the closure returned different kinds of losses (means or Totals) than in earlier "
                "steps. Return the same kinds at every step: a Total with count 0 if there is nothing to count."
            )
        _, weight, scale = share
        parts = [t.value * (weight if t.count is None else inverse[i] * scale) for i, t in enumerate(terms)]
        return torch.stack([part.reshape(()) for part in parts]).sum()

    def broadcast(self, call: int, terms: list[list[Term]], count: int) -> list[list[Term]]:
        """Send the last stage's terms of `count` micro-batches to all stages."""
        last = self._mesh.size("stage") - 1
        src = self._mesh.at(stage=last)
        if call not in self._agreed:
            own: tuple[Any, ...] = self._kinds.get(call, ())
            agreed = self._mesh.group("stage").broadcast(tuple(own), src)
            self._agreed[call] = _Kind(*agreed)
        kind = self._agreed[call]
        dtype = wide_dtype(self._device)
        box = torch.zeros(count, len(kind.counted), 2, dtype=dtype, device=self._device)
        if self._mesh.coordinate("stage") == last:
            for number, row in enumerate(terms):
                for i, term in enumerate(row):
                    box[number, i, 0] = term.value
                    if term.count is not None:  # assigning a Python number would wait for the device
                        box[number, i, 1] = scalar(term.count, dtype, self._device)
        self._mesh.group("stage").broadcast_tensors([box], src=src)
        return [
            [
                Term(box[n, i, 0].to(kind.dtype), box[n, i, 1] if counted else None)
                for i, counted in enumerate(kind.counted)
            ]
            for n in range(count)
        ]


def padded(terms: list[list[Term]], computed: Sequence[Piece], pieces: Sequence[Piece]) -> list[list[Term]]:
    """Terms for every piece; zero for pieces that were not computed."""
    found = {piece.micro: row for piece, row in zip(computed, terms, strict=True)}
    nothing = [Term(torch.zeros_like(term.value), None if term.count is None else 0.0) for term in terms[0]]
    return [found.get(piece.micro, nothing) for piece in pieces]
