"""What a fit keeps from epoch to epoch, in checkpoints too: its values, and which were the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SettingError, check_whole
from paceline.state.checkpoint import Scored, ranking


@dataclass(frozen=True)
class Checkpoints:
    """Where `fit` saves after each epoch, and resumes from when it is started again.

    Attributes:
        directory: on the machine of rank 0.
        keep: how many of the newest checkpoints to leave there.
        every: save in mid-epoch too, after each so many optimizer steps.
        keep_best: how many more to leave there, the best ones by the value that `best` monitors.
        background: train on while a checkpoint is written, as `run.save(background=True)` does. All are on the disk
            when `fit` returns.
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
            raise SettingError(f"Checkpoints(background={self.background!r}): True or False is needed.")

    def ranking(self, mode: str = "min") -> list[Scored]:
        """The checkpoints there that have a value of what is monitored: (score, step, path), best first. Their paths
        are what `run.restore` and `paceline export` take. On the machine of rank 0."""
        return ranking(self.directory, mode)


class History(Mapping[str, list[float]]):
    """The values of each epoch: `history["loss"][0]` is the mean loss of the first; "val_loss", and "val_" with the
    name of a metric, are those of `evaluate_on`. The same on every process, and restored with a checkpoint.

    Attributes:
        evaluations: the values of each evaluation, in mid-epoch too: {"step": 40, "epoch": 1, "val_loss": ...}.
        best_epoch, best_step, best_value: of the monitored value; the step counts all updates of the run.
        best_path: the file of the best model, or None.
        stopped_early: did the patience run out?
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

    def add_evaluation(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        self.evaluations.append({"step": step, "epoch": epoch, **values})

    def evaluated_at(self, step: int, epoch: int) -> dict[str, float] | None:
        """The values of the last evaluation, if it was made at this step of this epoch."""
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
