"""Batches that a function makes instead of a data set: `run.batches`.

The loader gets a data set of row addresses, and a collate function that passes the rows of a batch to the user's
function. So plan, order, resume and random streams work as for any loader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

from paceline.errors import SettingError

_ENDLESS = 1 << 62


class RowAddress(NamedTuple):
    """The address of one row: its epoch, and its number within the epoch."""

    epoch: int
    number: int  # step x global batch + position in the global batch


class RowAddresses(Sequence[RowAddress]):
    """The addresses of some rows of one epoch. One object per row would make a small step 3% slower."""

    def __init__(self, epoch: int, numbers: Sequence[int]) -> None:
        self.epoch, self.numbers = epoch, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, key: int) -> RowAddress: ...
    @overload
    def __getitem__(self, key: slice) -> RowAddresses: ...
    def __getitem__(self, key: int | slice) -> RowAddress | RowAddresses:
        if isinstance(key, slice):
            return RowAddresses(self.epoch, self.numbers[key])
        return RowAddress(self.epoch, self.numbers[key])


class Rows(Sequence[int]):
    """The rows that a function should make: their positions in the global batch, in order.

    epoch, step: the epoch and step of the global batch. total: number of rows in the whole global batch. `len(rows)`:
    number of rows to make.
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


class RowDataset:
    """A data set of row addresses. steps: global batches per epoch; None: epochs are endless."""

    def __init__(self, global_batch: int, steps: int | None) -> None:
        self.global_batch, self.steps = global_batch, steps

    def __len__(self) -> int:
        return _ENDLESS if self.steps is None else self.steps * self.global_batch

    def __getitem__(self, number: int) -> RowAddress:
        return RowAddress(0, number)


class RowCollate:
    """The collate function: calls the user's function with the positions of some rows."""

    def __init__(self, function: Callable[[Rows], Any], global_batch: int) -> None:
        self.function, self._total = function, global_batch
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, rows: Sequence[RowAddress]) -> Any:
        epoch, first = rows[0]
        numbers = rows.numbers if isinstance(rows, RowAddresses) else [row.number for row in rows]
        positions = [number % self._total for number in numbers]
        return self.function(Rows(positions, epoch, first // self._total, self._total))


def check_batches(function: Any, global_batch: Any, steps: Any, options: dict[str, Any]) -> None:
    """Check the arguments of `run.batches`. Raises SettingError."""
    if not callable(function):
        raise SettingError(
            f"run.batches({type(function).__name__}): pass a function fn(rows) that makes these rows. For a data set, "
            "use run.loader(dataset, global_batch=...)."
        )
    for key, value in (("global_batch", global_batch), ("steps", steps)):
        endless = key == "steps" and value is None
        if not endless and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise SettingError(f"run.batches({key}={value!r}): pass an integer, at least 1.")
    for key in ("collate_fn", "shuffle", "sampler", "batch_sampler", "drop_last", "batch_size"):
        if key in options:
            raise SettingError(
                f"run.batches({key}=...): the function makes each batch and decides its content. Remove this "
                "argument, or pass a data set to run.loader."
            )
