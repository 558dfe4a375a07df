"""What the user's closure returns in a pipeline: on the last stage, where the terms are weighted, and then broadcast
to all stages.

A sum over counted things is divided by the count of the whole global batch, which is not known when the first backward
begins. So the last stage runs a closure that returns a Total once more, before the schedule, with zeros in place of the
model's output: only to count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.mesh import Mesh, current
from paceline.comm.scalars import scalar, wide_dtype
from paceline.data.batch_plan import Piece
from paceline.errors import UsageError
from paceline.strategies.base import Term, Weight, Work


class _Kind(NamedTuple):
    """What a closure returns."""

    counted: tuple[bool, ...]  # for each term, whether it has a count of its own
    dtype: torch.dtype  # of the values


Share = tuple[Piece, float, float]
"""A micro-batch, the weight of a mean over its examples, and the loss scale."""


def on_one_stage() -> AbstractContextManager[None]:
    """Within the block the closure runs on one stage: functions that need all members of the run raise."""
    return current().computing(current().replicas, everywhere=False)


class Losses:
    """What the closure of each backward call returns."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._kinds: dict[int, _Kind] = {}  # backward call -> kind; on the last stage
        self._agreed: dict[int, _Kind] = {}  # the same, on all stages

    def inverse_counts(
        self, work: Work, groups: Sequence[Sequence[Share]], counted: Callable[[int, Piece], list[Term]]
    ) -> dict[int, Tensor]:
        """On the last stage: 1 / the count in the whole global batch of each term that has one. counted: what the
        closure returns for a piece of a group, with zeros in place of the model's output."""
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
        total = collectives.all_reduce(total, group=self._mesh.data)
        inverse = torch.where(total > 0, 1 / total.clamp(min=torch.finfo(dtype).tiny), 0)
        return dict(zip(which, inverse.unbind(), strict=True))

    def weighted(self, call: int, terms: Sequence[Term], share: Share, inverse: dict[int, Tensor]) -> Tensor:
        """The scalar that a micro-batch adds to the loss of the global batch. Raises UsageError where the closure
        returns other kinds of terms than before."""
        counted = tuple(term.count is not None for term in terms)
        if counted != self._kinds[call].counted:
            raise UsageError(
                "strategy pipeline: the closure returned other kinds of losses (means, or Totals) than before. Return "
                "the same at each step: a Total with the count 0 where there is nothing."
            )
        _, weight, scale = share
        parts = [t.value * (weight if t.count is None else inverse[i] * scale) for i, t in enumerate(terms)]
        return torch.stack([part.reshape(()) for part in parts]).sum()

    def broadcast(self, call: int, terms: list[list[Term]], count: int) -> list[list[Term]]:
        """The last stage's terms, of `count` micro-batches, on all stages."""
        last = self._mesh.size("stage") - 1
        src = self._mesh.at(stage=last)
        if call not in self._agreed:
            own: tuple[Any, ...] = self._kinds.get(call, ())
            told = collectives.broadcast_object(tuple(own), src, self._mesh.group("stage"))
            self._agreed[call] = _Kind(*told)
        kind = self._agreed[call]
        dtype = wide_dtype(self._device)
        box = torch.zeros(count, len(kind.counted), 2, dtype=dtype, device=self._device)
        if self._mesh.coordinate("stage") == last:
            for number, row in enumerate(terms):
                for i, term in enumerate(row):
                    box[number, i, 0] = term.value
                    if term.count is not None:  # to assign a number would copy it from the host, and wait
                        box[number, i, 1] = scalar(term.count, dtype, self._device)
        collectives.broadcast_tensors([box], src=src, group=self._mesh.group("stage"))
        return [
            [
                Term(box[n, i, 0].to(kind.dtype), box[n, i, 1] if counted else None)
                for i, counted in enumerate(kind.counted)
            ]
            for n in range(count)
        ]


def padded(terms: list[list[Term]], computed: Sequence[Piece], pieces: Sequence[Piece]) -> list[list[Term]]:
    """Terms for every piece; terms of pieces that were not computed are zero."""
    found = {piece.micro: row for piece, row in zip(computed, terms, strict=True)}
    nothing = [Term(torch.zeros_like(term.value), None if term.count is None else 0.0) for term in terms[0]]
    return [found.get(piece.micro, nothing) for piece in pieces]
