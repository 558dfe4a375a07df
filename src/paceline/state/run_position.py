"""The position of a run for its checkpoints: the epoch, and the number of updates."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.data.loader import Loader
from paceline.errors import UsageError, warn
from paceline.step.step import Stepper
from paceline.strategies.base import Strategy


class Epochs:
    """Counts epochs for `run.epochs`.

    While a training loader is in the middle of its data, a checkpoint belongs to the current epoch. After the end of
    the data a checkpoint belongs to the next epoch, so a resumed run does not repeat the rest of the loop body
    (evaluation, saving).

    With independent replicas, a `break` out of the loop prints a message and does not average the replicas. A closed
    generator cannot distinguish a `break` on all ranks from an exception on one rank, where a collective would hang.
    """

    def __init__(self, loaders: Callable[[], Sequence[Loader]], strategy: Strategy, main: bool) -> None:
        self._loaders, self._strategy, self._main = loaders, strategy, main
        self._current = 0  # the number of the epoch
        self._inside = False  # whether the loop body is running
        self._ended_before: dict[str, int] = {}  # Loader.ended of each loader at the start of the body
        self._restored = False  # whether completed epochs were restored, and run.epochs was not called since

    def up_to(self, count: int) -> Iterator[int]:
        """An iterator over the numbers of the remaining epochs, out of `count` epochs. Raises UsageError."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"run.epochs({count!r}): give the number of epochs, an integer of at least 0.")
        return self._up_to(count)

    def _up_to(self, count: int) -> Iterator[int]:
        self._restored = False
        while self._current < count:
            self._inside = True
            self._ended_before = {loader.name: loader.ended for loader in self._loaders()}
            try:
                yield self._current
            except GeneratorExit:
                self._warn_if_independent()
                raise
            self._inside = False
            self._current += 1

    def _warn_if_independent(self) -> None:
        if self._main and not self._strategy.synchronized():
            print(
                "paceline: the script left the loop over run.epochs early, and the weights differ between processes. "
                "From now on, what the script computes with the model differs between ranks. run.save, run.export and "
                "every evaluation loader average the weights; so does the regular end of the loop.",
                file=sys.stderr,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._current + int(self._inside and self._data_read())}

    def _data_read(self) -> bool:
        """Whether a training loader has reached its end in this epoch, and none is in the middle of its data."""
        loaders = self._loaders()
        read = [loader for loader in loaders if loader.ended > self._ended_before.get(loader.name, 0)]
        return bool(read) and all(loader.current is None for loader in loaders)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._current = int(state["epoch"])
        self._restored = self._current > 0

    def on_training_yield(self) -> None:
        """Warn if a restored run trains without `run.epochs`, and so repeats epochs."""
        if not self._restored:
            return
        self._restored = False
        warn(
            f"the restored run has already completed {self._current} epochs, but the script's loop would repeat them. "
            "Write `for epoch in run.epochs(n)`, which continues with the epoch where the run stopped.",
        )


class RunPosition:
    """The counters of updates and epochs."""

    def __init__(self, stepper: Stepper, epochs: Epochs) -> None:
        self._updates, self._ownership, self._epochs = stepper.updates, stepper.ownership, epochs

    def counters(self) -> dict[str, Any]:
        """The counters for a checkpoint."""
        updates = self._updates
        counts = {"updates": list(updates.counts.values()), "skipped": updates.left_out}
        return {**counts, "by_hand": self._ownership.manual_updates, "epochs": self._epochs.state_dict()}

    def counts(self) -> list[int]:
        """The numbers of updates of each optimizer, of skipped updates, and of updates without run.step."""
        return [*self._updates.counts.values(), self._updates.left_out, self._ownership.manual_updates]

    def load_counters(self, found: dict[str, Any]) -> None:
        """Set the counters from a checkpoint."""
        updates = self._updates
        updates.counts.update(zip(updates.counts, found["updates"], strict=True))
        updates.skipped, updates.skipped_alone = found["skipped"], 0
        self._ownership.manual_updates = found.get("by_hand", 0)  # older checkpoints lack this key
        self._epochs.load_state_dict(found["epochs"])
