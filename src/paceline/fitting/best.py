"""Best: the best value of a metric so far, and early stopping. For `fit`, and for your own training loop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError, suggest


class Best:
    """The best value of a metric, and early stopping. `fit(best=best)` updates it after each evaluation. In your own
    loop, call `best.update`, and call `run.track(best=best)` to save it in checkpoints.

    Attributes:
        monitor: for fit: "loss", "val_loss", or "val_" and the name of a metric. Default: "val_loss", or "loss" without
            evaluation.
        mode: whether the "min" or "max" value is best.
        patience: `stop` becomes True after this many updates in a row without a better value; None: never.
        path: for fit: the safetensors file of the best model. Default: `best.safetensors` in the directory of the
            checkpoints, or no file if fit saves no checkpoints.
        min_delta: a value counts as better only if it beats the best value by more than this.
        value: the best value so far; None before the first.
        waited: number of updates since the best value.
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
            raise SettingError(f"Best(mode={mode!r}): unknown mode. {suggest(str(mode), ('min', 'max'))}")
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise SettingError(
                f"Best(patience={patience!r}): pass the number of consecutive epochs or updates without improvement "
                "after which training stops: an integer of at least 1, or None to never stop."
            )
        number = isinstance(min_delta, (int, float)) and not isinstance(min_delta, bool)
        if not number or not 0 <= min_delta < math.inf:
            raise SettingError(
                f"Best(min_delta={min_delta!r}): pass the smallest improvement that counts, 0 or more, for both modes."
            )
        self.monitor, self.mode, self.patience, self.path, self.min_delta = monitor, mode, patience, path, min_delta
        self.value: float | None = None
        self.waited = 0

    def __repr__(self) -> str:
        return f"Best({self.monitor!r}, mode={self.mode!r}, value={self.value}, waited={self.waited})"

    @property
    def stop(self) -> bool:
        """Have `patience` updates in a row brought no better value?"""
        return self.patience is not None and self.waited >= self.patience

    def update(self, value: float | Tensor) -> bool:
        """Record a value. Returns whether it beats the best value so far by more than min_delta. NaN never does.

        Call `update` on all processes. Rank 0's value counts, so that all processes stop together.
        """
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise UsageError(f"Best.update: a tensor of shape {tuple(value.shape)} is not one number.")
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise UsageError(f"Best.update({value!r}): pass a number, such as scores['loss'].")
        return self.record(world_group().broadcast(float(value)))

    def record(self, value: float) -> bool:
        """Like `update`, for a value that is already the same on all processes."""
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
