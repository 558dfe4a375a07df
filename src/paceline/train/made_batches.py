"""Batches that a function makes, and no data set: `run.batches`.

To a loader they are a data set whose examples are places (epoch, step, row), and a collate function that makes a batch
of them. So the cut, the order, the resume and the draws are those of any loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from paceline.errors import SettingError

_ENDLESS = 1 << 62


class Place(NamedTuple):
    """One row: of which epoch, and its number there (step x global batch + row)."""

    epoch: int
    number: int


class Rows(Sequence[int]):
    """The rows of a global batch that a function is to make: their positions in it, in order.

    epoch, step: of the global batch. total: rows in the whole global batch. `len(rows)`: how many are to be made.
    """

    def __init__(self, positions: Sequence[int], epoch: int, step: int, total: int) -> None:
        self._positions = positions
        self.epoch, self.step, self.total = epoch, step, total

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, key: int) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[int]: ...
    def __getitem__(self, key: int | slice) -> int | Sequence[int]:
        return self._positions[key]

    def __repr__(self) -> str:
        return f"Rows({list(self._positions)}, epoch={self.epoch}, step={self.step}, total={self.total})"


class Places:
    """The data set. steps: global batches in an epoch; None: without end."""

    def __init__(self, global_batch: int, steps: int | None) -> None:
        self.global_batch, self.steps = global_batch, steps

    def __len__(self) -> int:
        return _ENDLESS if self.steps is None else self.steps * self.global_batch

    def __getitem__(self, number: int) -> Place:
        return Place(0, number)

    def of_epoch(self, epoch: int, number: int) -> Place:
        return Place(epoch, number)


class Made:
    """The collate function: calls the user's with the rows of some places."""

    def __init__(self, function: Callable[[Rows], Any], global_batch: int) -> None:
        self.function, self._total = function, global_batch
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, places: list[Place]) -> Any:
        first = places[0]
        positions = [place.number % self._total for place in places]
        return self.function(Rows(positions, first.epoch, first.number // self._total, self._total))


def check_batches(function: Any, global_batch: Any, steps: Any, options: dict[str, Any]) -> None:
    """The arguments of `run.batches`. Raises SettingError."""
    if not callable(function):
        raise SettingError(
            f"run.batches({type(function).__name__}): a function is needed that makes the rows it is asked for, "
            "fn(rows); for a data set there is run.loader(dataset, global_batch=...)."
        )
    for key, value in (("global_batch", global_batch), ("steps", steps)):
        if key == "steps" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError(f"run.batches({key}={value!r}): a whole number, at least 1, is needed.")
    for key in ("collate_fn", "shuffle", "sampler", "batch_sampler", "drop_last", "batch_size"):
        if key in options:
            raise SettingError(
                f"run.batches({key}=...): the function itself makes each batch, and decides what is in it. Leave it "
                "out, or give run.loader a data set."
            )
