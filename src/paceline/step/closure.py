"""Run the user's closure on one micro-batch of one shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from paceline.data.batch_plan import Request
from paceline.data.bundle import Bundle, Piece
from paceline.data.loader import Loader
from paceline.data.randomness import mix, seed_torch
from paceline.errors import EmptyShardError, UsageError
from paceline.step.loss import terms_of
from paceline.step.messages import NOT_AS_YIELDED, ONE_VALUE, empty_message, wrong_closure
from paceline.step.precision import Precision
from paceline.strategies.base import Term


def pieces_of(batch: Any, request: Request, bundled: bool) -> list[Piece]:
    """The pieces of a yielded batch. bundled: whether the loader yielded a Bundle for this request."""
    if isinstance(batch, Bundle):
        return batch.pieces
    if bundled:
        raise UsageError(NOT_AS_YIELDED)
    part = request.parts[0]
    return [Piece(part.shard, part.micro, len(part.indices), batch)]


def _noise(loader: Loader, request: Request, piece: Piece, call: int) -> AbstractContextManager[Any]:
    """A context in which the piece's examples key random draws, for noise="example"; otherwise it does nothing."""
    if loader.noise is None:
        return nullcontext()
    part = next(part for part in request.parts if (part.shard, part.micro) == (piece.shard, piece.micro))
    return loader.noise.for_closure(loader.streams, request, part, call)


def computing(
    loss_fn: Callable[[Any, Any], Any],
    precision: Precision,
    loader: Loader,
    request: Request,
    call: int,
    seeded: bool,
    check: Callable[[list[Tensor]], None] | None = None,
) -> Callable[[Any, Piece, torch.device], list[Term]]:
    """Returns `Work.compute`: a function that runs the closure on one piece, and returns the terms of its loss.

    call: the number of the backward call in its micro-batch. Each call has its own random numbers, the same under every
        strategy.
    seeded: whether the loader has already seeded torch's generators for the first call. Only if there is one piece.
    check: called with the values of the terms that are means over examples; may raise.
    """

    def compute(replica: Any, piece: Piece, device: torch.device) -> list[Term]:
        if call or not seeded:
            key = loader.streams.torch_key(request, piece.shard, piece.micro)
            seed_torch(mix(key, call) if call else key, device)
        if precision.dtype is None and loader.noise is None:
            return terms(replica, piece)
        with precision.autocast(), _noise(loader, request, piece, call):
            return terms(replica, piece)

    def terms(replica: Any, piece: Piece) -> list[Term]:
        try:
            made = terms_of(loss_fn(replica, piece.batch), piece.count, request.total)
            if check is not None:
                check([term.value for term in made if term.count is None])
            return made
        except (TypeError, AttributeError, NotImplementedError) as error:
            wrong = wrong_closure(loss_fn, replica)
            if wrong is None:
                raise
            raise UsageError(wrong) from error
        except (RuntimeError, ValueError, IndexError, ZeroDivisionError) as error:
            if piece.count or ONE_VALUE in str(error):
                raise
            raise EmptyShardError(empty_message(error, request.total)) from error

    return compute
