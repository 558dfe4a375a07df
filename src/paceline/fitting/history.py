"""The values of each epoch and evaluation of a fit, and the settings of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SettingError, check_whole
from paceline.state.checkpoint import Scored, ranking


@dataclass(frozen=True)
class Checkpoints:
    """The directory where `fit` saves a checkpoint after each epoch. At the next start, it resumes from the last one.

    Attributes:
        directory: on the machine of rank 0.
        keep: the number of newest checkpoints to keep.
        every: also save in mid-epoch, every N optimizer steps.
        keep_best: also keep this number of best checkpoints, judged by the value that `best` monitors.
        background: continue training while a checkpoint is written, as in `run.save(background=True)`. All checkpoints
            are on disk when `fit` returns.
    """

    directory: str | Path
    keep: int = 3
    every: int | None = None
    keep_best: int | None = None
    background: bool = False

    def __post_init__(self) -> None:
        for name, value in (("keep", self.keep), ("every", self.every), ("keep_best", self.keep_best)):
            if value is not None:
                check_whole("Checkpoints", name, value)
        if not isinstance(self.background, bool):
            raise SettingError(f"Checkpoints(background={self.background!r}): pass True or False.")

    def ranking(self, mode: str = "min") -> list[Scored]:
        """(score, step, path) of each checkpoint with a score, best first. The path is for `run.restore` or
        `paceline export`. Call it on the machine of rank 0."""
        return ranking(self.directory, mode)


class History(Mapping[str, list[float]]):
    """The values of each epoch: `history["loss"][0]` is the mean loss of the first epoch. "val_loss", and "val_" with
    the name of a metric, come from `evaluate_on`. Every process has the same history. Checkpoints store and restore it.

    Attributes:
        evaluations: the values of each evaluation, also in mid-epoch: {"step": 40, "epoch": 1, "val_loss": ...}.
        best_epoch, best_step, best_value: the best monitored value, and its epoch and step. The step counts all updates
            of the run.
        best_path: the file of the best model, or None.
        stopped_early: whether `Best.patience` ended the fit.
    """

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}
        self.evaluations: list[dict[str, float]] = []
        self.best_epoch: int | None = None
        self.best_step: int | None = None
        self.best_value: float | None = None
        self.best_path: Path | None = None
        self.stopped_early = False

    def __getitem__(self, name: str) -> list[float]:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        """The number of values per epoch. `epochs` is the number of epochs."""
        return len(self._values)

    def __repr__(self) -> str:
        return f"History({self._values})"

    @property
    def history(self) -> dict[str, list[float]]:
        """The values as a plain dict (Keras's name for it)."""
        return {name: list(values) for name, values in self._values.items()}

    @property
    def epochs(self) -> int:
        """The number of epochs."""
        return len(self._values.get("loss", ()))

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._values.setdefault(name, []).append(value)

    def add_evaluation(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self.evaluations.append({"step": step, "epoch": epoch, **values})

    def evaluated_at(self, step: int, epoch: int) -> dict[str, float] | None:
        """The values of the last evaluation, if it belongs to this step of this epoch."""
        last = self.evaluations[-1] if self.evaluations else {}
        if (last.get("step"), last.get("epoch")) != (step, epoch):
            return None
        return {name: value for name, value in last.items() if name not in ("step", "epoch")}

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": self.history,
            "evaluations": [dict(one) for one in self.evaluations],
            "best": [self.best_epoch, self.best_value, self.best_step],
            "stopped_early": self.stopped_early,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._values = {name: list(values) for name, values in state["values"].items()}
        self.evaluations = [dict(one) for one in state.get("evaluations", ())]
        self.best_epoch, self.best_value, self.best_step = [*state["best"], None][:3]
        self.stopped_early = state["stopped_early"]
