"""The position of a run, which a checkpoint holds: which epoch it is, how many updates were made."""

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

    A checkpoint that is written in an epoch's body belongs to this epoch while a training loader is in the middle of
    its data. When the data have been read, it belongs to the next epoch: the rest of the body (evaluation, saving) is
    not repeated.

    A loop that is left by `break` while replicas train apart prints a message, and does not average them: a closed
    generator cannot tell a `break` on all ranks from an exception on one, and a collective would then wait for ever.
    """

    def __init__(self, loaders: Callable[[], Sequence[Loader]], strategy: Strategy, main: bool) -> None:
        self._loaders, self._strategy, self._main = loaders, strategy, main
        self._current = 0  # the number of the epoch
        self._inside = False  # whether the body of an epoch runs
        self._ended_before: dict[str, int] = {}  # Loader.ended of each loader when the body began
        self._restored = False  # whether a restored run has epochs behind it, and run.epochs was not called since

    def up_to(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that remain of `count`. Raises UsageError."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"run.epochs({count!r}): a whole number of epochs, 0 or more, is needed.")
        return self._up_to(count)

    def _up_to(self, count: int) -> Iterator[int]:
        self._restored = False
        while self._current < count:
            self._inside = True
            self._ended_before = {loader.name: loader.ended for loader in self._loaders()}
            try:
                yield self._current
            except GeneratorExit:
                self._tell_if_apart()
                raise
            self._inside = False
            self._current += 1

    def _tell_if_apart(self) -> None:
        if self._main and not self._strategy.synchronized():
            print(
                "paceline: the loop over run.epochs was left before its end, while each process has its own weights: "
                "what the script itself computes with the model from here on differs from rank to rank. run.save, "
                "run.export and every evaluation loader average them; so does the loop, where it ends by itself.",
                file=sys.stderr,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._current + int(self._inside and self._data_read())}

    def _data_read(self) -> bool:
        """Whether the training loaders have been read to their ends in this epoch."""
        loaders = self._loaders()
        read = [loader for loader in loaders if loader.ended > self._ended_before.get(loader.name, 0)]
        return bool(read) and all(loader.current is None for loader in loaders)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._current = int(state["epoch"])
        self._restored = self._current > 0

    def on_training_yield(self) -> None:
        """Warn where a restored run trains on and has not asked `run.epochs` with which epoch to go on."""
        if not self._restored:
            return
        self._restored = False
        warn(
            f"the restored run has {self._current} epochs behind it, but the loop over epochs is not `for epoch in "
            "run.epochs(n)`, so that all n are made once more. With it, a run goes on with the epoch where it stopped.",
        )


class RunPosition:
    """The counters of updates and epochs."""

    def __init__(self, stepper: Stepper, epochs: Epochs) -> None:
        self._updates, self._ownership, self._epochs = stepper.updates, stepper.ownership, epochs

    def counters(self) -> dict[str, Any]:
        """As a checkpoint has them."""
        updates = self._updates
        counts = {"updates": list(updates.counts.values()), "skipped": updates.left_out}
        return {**counts, "by_hand": self._ownership.manual_updates, "epochs": self._epochs.state_dict()}

    def counts(self) -> list[int]:
        """The updates of each optimizer, steps that were left out, and updates that the script has made by hand."""
        return [*self._updates.counts.values(), self._updates.left_out, self._ownership.manual_updates]

    def load_counters(self, found: dict[str, Any]) -> None:
        """Go on from the counters of a checkpoint."""
        updates = self._updates
        updates.counts.update(zip(updates.counts, found["updates"], strict=True))
        updates.skipped, updates.skipped_alone = found["skipped"], 0
        self._ownership.manual_updates = found.get("by_hand", 0)  # older checkpoints have none
        self._epochs.load_state_dict(found["epochs"])
