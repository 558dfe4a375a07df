"""Which epoch it is, and where a restored run goes on."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.comm import transport
from paceline.errors import UsageError
from paceline.strategies.base import Strategy
from paceline.train.loader import Loader


class Epochs:
    """Counts epochs for `run.epochs`.

    A checkpoint written in the body of an epoch belongs to that epoch while a training loader is in the middle of its
    data, and to the next one when the data have been read: what follows in the body (evaluation, saving) is then done.

    Where the loop is left by `break` it is said that replicas train apart, if they do. To make them one is left to the
    script: a generator that is closed cannot tell a `break`, on all ranks, from an exception on one, which the others
    would wait for.
    """

    def __init__(self, loaders: Callable[[], Sequence[Loader]], strategy: Strategy, main: bool) -> None:
        self._loaders, self._strategy, self._main = loaders, strategy, main
        self._current = 0
        self._inside = False
        self._ended_before: dict[str, int] = {}
        self.restored = False  # to a later epoch than the first, and nobody has asked for it yet

    def upto(self, count: int) -> Iterator[int]:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(f"run.epochs({count!r}): a whole number of epochs, 0 or more, is needed.")
        return self._upto(count)

    def _upto(self, count: int) -> Iterator[int]:
        transport.arrive()
        self.restored = False
        while self._current < count:
            self._inside = True
            self._ended_before = {loader.name: loader.ended for loader in self._loaders()}
            try:
                yield self._current
            except GeneratorExit:
                self._left()
                raise
            self._inside = False
            self._current += 1

    def _left(self) -> None:
        if self._main and not self._strategy.synchronized():
            print(
                "paceline: the loop over run.epochs was left before its end, while each process has its own weights: "
                "what the script itself computes with the model from here on differs from rank to rank. run.save, "
                "run.export and every evaluation loader average them; so does the loop, where it ends by itself.",
                file=sys.stderr,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._current + int(self._inside and self._read())}

    def _read(self) -> bool:
        loaders = self._loaders()
        read = [loader for loader in loaders if loader.ended > self._ended_before.get(loader.name, 0)]
        return bool(read) and all(loader.current is None for loader in loaders)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._current = int(state["epoch"])
        self.restored = self._current > 0

    def training(self) -> None:
        """A batch comes. Warns where a run was restored, and no `run.epochs` has said with which epoch it goes on."""
        if not self.restored:
            return
        self.restored = False
        warnings.warn(
            f"the restored run has {self._current} epochs behind it, but the loop over epochs is not `for epoch in "
            "run.epochs(n)`, so that all n are made once more. With it, a run goes on with the epoch where it stopped.",
            stacklevel=2,
        )
