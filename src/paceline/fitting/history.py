"""What a fit keeps from epoch to epoch, in checkpoints too: its values, and which were the best."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SettingError, suggest


@dataclass(frozen=True)
class Checkpoints:
    """Where `fit` saves after each epoch, and resumes from when it is started again.

    Attributes:
        directory: on the machine of rank 0.
        keep: how many checkpoints to leave there.
        every: save in mid-epoch too, after each so many optimizer steps.
    """

    directory: str | Path
    keep: int = 3
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("every", self.every)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError(f"Checkpoints({name}={value!r}): a whole number, at least 1, is needed.")


@dataclass(frozen=True)
class Best:
    """The value by which `fit` keeps the best model and stops early.

    Attributes:
        monitor: "loss" or "val_loss", or "val_" and a metric's name; "val_loss" if not given, "loss" where nothing is
            evaluated.
        mode: whether "min" or "max" of it is best.
        patience: stop when it was no better for this many epochs in a row; None: do not.
        path: the best model so far, as one safetensors file; `best.safetensors` in the checkpoints' directory if not
            given, and without checkpoints none is written.
    """

    monitor: str | None = None
    mode: str = "min"
    patience: int | None = None
    path: str | Path | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise SettingError(f"Best(mode={self.mode!r}) is not known. {suggest(str(self.mode), ('min', 'max'))}")
        if self.patience is not None and (
            isinstance(self.patience, bool) or not isinstance(self.patience, int) or self.patience < 1
        ):
            raise SettingError(f"Best(patience={self.patience!r}): a whole number of epochs, at least 1, is needed.")


class History(Mapping[str, list[float]]):
    """The values of each epoch: `history["loss"][0]` is the mean loss of the first; "val_loss", and "val_" with the
    name of a metric, are those of `evaluate_on`. The same on every process, and restored with a checkpoint.

    Attributes:
        best_epoch, best_value: of the monitored value.
        best_path: the file of the best model, or None.
        stopped_early: did the patience run out?
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.best_epoch: int | None = None
        self.best_value: float | None = None
        self.best_path: Path | None = None
        self.stopped_early = False

    def __getitem__(self, name: str) -> list[float]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        """How many values an epoch has; `epochs` says how many epochs there were."""
        return len(self._values)

    def __repr__(self) -> str:
        return f"History({self._values})"

    @property
    def history(self) -> dict[str, list[float]]:
        """The same as a plain dict (Keras has this name for it)."""
        return {name: list(values) for name, values in self._values.items()}

    @property
    def epochs(self) -> int:
        """How many epochs there were."""
        return len(self._values.get("loss", ()))

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def update_best(self, best: Best, monitor: str) -> bool:
        """Is the last epoch the best one so far? NaN never is. Records it if so, and sets `stopped_early`."""
        value, last = self._values[monitor][-1], self.epochs - 1
        better = not math.isnan(value) and (
            self.best_value is None or (value < self.best_value if best.mode == "min" else value > self.best_value)
        )
        if better:
            self.best_epoch, self.best_value = last, value
        waited = last - (self.best_epoch if self.best_epoch is not None else -1)
        self.stopped_early = best.patience is not None and waited >= best.patience
        return better

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": self.history,
            "best": [self.best_epoch, self.best_value],
            "stopped_early": self.stopped_early,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {name: list(values) for name, values in state["values"].items()}
        self.best_epoch, self.best_value = state["best"]
        self.stopped_early = state["stopped_early"]
