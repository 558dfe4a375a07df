"""Best: the best value so far, and whether it is time to stop. For `fit`, and for loops of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.comm import collectives
from paceline.errors import SettingError, UsageError, suggest


class Best:
    """The best value of a metric, and early stopping. `fit(best=...)` updates it after each evaluation; a loop of one's
    own calls `update`, and `run.track(best=best)` puts it into checkpoints.

    Attributes:
        monitor: for fit: "loss" or "val_loss", or "val_" and a metric's name; "val_loss" if not given, "loss" where
            nothing is evaluated.
        mode: whether "min" or "max" of it is best.
        patience: how many updates in a row without a better value make `stop` True; None: never.
        path: for fit: the best model so far, as one safetensors file; `best.safetensors` in the checkpoints' directory
            if not given, and without checkpoints none is written.
        min_delta: by more than this a value must be better than the best one to count as better.
        value: the best value so far; None before the first.
        waited: updates since the best value.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: str = "min",
        patience: int | None = None,
        path: str | Path | None = None,
        min_delta: float = 0.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise SettingError(f"Best(mode={mode!r}) is not known. {suggest(str(mode), ('min', 'max'))}")
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise SettingError(
                f"Best(patience={patience!r}): how many epochs, or updates, in a row may be no better: a whole number, "
                "at least 1; None never stops."
            )
        number = isinstance(min_delta, (int, float)) and not isinstance(min_delta, bool)
        if not number or not 0 <= min_delta < math.inf:
            raise SettingError(
                f"Best(min_delta={min_delta!r}): by how much a value must be better, 0 or more, whatever the mode."
            )
        self.monitor, self.mode, self.patience, self.path, self.min_delta = monitor, mode, patience, path, min_delta
        self.value: float | None = None
        self.waited = 0

    def __repr__(self) -> str:
        return f"Best({self.monitor!r}, mode={self.mode!r}, value={self.value}, waited={self.waited})"

    @property
    def stop(self) -> bool:
        """Has there been no better value for `patience` updates in a row?"""
        return self.patience is not None and self.waited >= self.patience

    def update(self, value: float | Tensor) -> bool:
        """Whether this value is better than the best one so far, by more than min_delta; then it is the best. NaN never
        is. All processes call it; rank 0's value counts, so that all of them stop together."""
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(f"Best.update: a tensor of shape {tuple(value.shape)} is not one number.")
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"Best.update({value!r}): a number is needed, such as scores['loss'].")
        return self.record(collectives.broadcast_object(float(value)))

    def record(self, value: float) -> bool:
        """As `update`, for a value that is known to be the same on all processes."""
        better = not math.isnan(value) and (
            self.value is None
            or (value < self.value - self.min_delta if self.mode == "min" else value > self.value + self.min_delta)
        )
        if better:
            self.value = value
        self.waited = 0 if better else self.waited + 1
        return better

    def reset(self) -> None:
        """Forget all values."""
        self.value, self.waited = None, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.waited = state["value"], state["waited"]
