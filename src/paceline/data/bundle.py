"""The content of a yield: a piece, or a bundle of several pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError

_CANNOT_BE_UNPACKED = (
    "this batch holds several collated batches, since the chosen strategy computes several shards or micro-batches at "
    "once (with `reproducible`, if the model has batch norm over the global batch). It cannot be unpacked in the loop. "
    "Move the loss into a function,\n"
    "    def loss_fn(model, batch): images, labels = batch; return F.cross_entropy(model(images), labels)\n"
    "and call\n"
    "    loss = run.forward_backward(loss_fn, model, batch)\n"
    "instead of the forward and run.backward; or choose a strategy with one replica per process, such as ddp, without "
    "`reproducible`."
)


@dataclass(slots=True)
class Piece:
    """One micro-batch of one shard, with its data."""

    shard: int
    micro: int
    count: int  # number of examples
    batch: Any  # the result of collate


class Bundle:
    """A yield of several collated batches, if this process computes several shards or micro-batches at once.

    A script cannot look into a bundle. It passes the bundle to `run.forward_backward`.
    """

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def _refuse(self, *_: Any) -> Any:
        raise UsageError(_CANNOT_BE_UNPACKED)

    __iter__ = __getitem__ = __len__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise UsageError(_CANNOT_BE_UNPACKED)
