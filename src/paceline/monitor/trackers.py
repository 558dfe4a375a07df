"""Where logged values are written: by rank 0 only, through one small interface.

A tracker is told the step from which the run continues. What an earlier run left in the same place from later steps
must not appear twice: JSON lines are removed, TensorBoard is told to purge, services continue the run that they had.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from paceline.errors import warn

Config = Mapping[str, "str | int | float | bool"]


class Tracker(Protocol):
    """What `run.add_tracker` takes.

    It may have these methods too; what a tracker has no method for, it is not told:
        log_hyperparameters(values): name -> string, number or truth value, at any time after begin.
        log_image(name, image, step, epoch): a NumPy array of uint8, (height, width, 3).
        log_histogram(name, values, step, epoch): a NumPy array of floats, of one dimension.
    """

    def begin(self, config: Config, step: int) -> None:
        """Called once, on rank 0, before the first value.

        Args:
            config: the settings and the world, flat.
            step: how many updates the run has made; more than 0 where it was restored.
        """

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Record global values after `step` updates."""

    def close(self) -> None:
        """Called at the end, if `begin` was called."""


_REQUIRED = ("begin", "log", "close")
_HOMES = {  # name -> (module, class, what must be installed, extra)
    "jsonl": ("paceline.monitor.trackers", "JsonLines", None, None),
    "tensorboard": ("paceline.monitor.services", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": ("paceline.monitor.services", "WeightsAndBiases", "wandb", "wandb"),
    "mlflow": ("paceline.monitor.services", "MLflow", "mlflow", "mlflow"),
}


def cannot_track(log_dir: str | None, names: Sequence[str]) -> str | None:
    """Why these trackers could not write there, as the text of an error; None where they can."""
    if log_dir is None:
        return None
    for name in names:
        _, _, package, extra = _HOMES[name]
        if package is not None and find_spec(package) is None:
            return f"trackers={name!r} needs {package}, which is not installed: pip install 'paceline[{extra}]'"
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=log_dir):
            pass
        for path in Path(log_dir).glob(JsonLines.FILE):
            with open(path, "a"):
                pass
    except OSError as error:
        return (
            f"log_dir={log_dir!r}: rank 0 cannot write there: {error.strerror or error}. Give a directory that it may "
            "write to, or none."
        )
    return None


class TrackerSet:
    """A run's trackers, on rank 0. One that fails is left out, with a warning: a curve is not worth a run."""

    def __init__(self, log_dir: str | None, names: Sequence[str]) -> None:
        self._log_dir, self._names = log_dir, names if log_dir is not None else ()
        self._added: list[Tracker] = []  # all of them
        self._trackers: list[Tracker] = []  # those that have begun and not failed
        self._config: Config | None = None
        self._step = 0
        self._hyperparameters: dict[str, str | int | float | bool] = {}
        self._media: list[tuple[str, str, Any, int, int]] = []  # images and histograms from before `begin`

    def add(self, tracker: Tracker) -> None:
        self._added.append(tracker)
        if self._config is not None and self._begin(tracker):
            self._trackers.append(tracker)

    def _begin(self, tracker: Tracker) -> bool:
        """Begin a tracker. Returns whether it succeeded."""
        known = self._hyperparameters
        return self._call(tracker, "begin", self._config, self._step) and (
            not known or self._call(tracker, "log_hyperparameters", known)
        )

    def begin(self, config: Config, step: int) -> None:
        if self._config is not None:
            return
        self._config, self._step = config, step
        for name in self._names:
            module, cls, _, _ = _HOMES[name]
            self._added.append(getattr(import_module(module), cls)(Path(str(self._log_dir))))
        self._trackers = [tracker for tracker in self._added if self._begin(tracker)]
        waiting, self._media = self._media, []
        for one in waiting:
            self.log_media(*one)

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        self.begin({}, step)  # where a script logs before it trains
        self._trackers = [tracker for tracker in self._trackers if self._call(tracker, "log", values, step, epoch)]

    def log_hyperparameters(self, values: Config) -> None:
        """Record hyperparameters, now or, before training begins, when it does."""
        self._hyperparameters |= values
        if self._config is not None:
            self._trackers = [one for one in self._trackers if self._call(one, "log_hyperparameters", values)]

    def log_media(self, method: str, name: str, value: Any, step: int, epoch: int) -> bool:
        """Record an image or a histogram, now or, before training begins, when it does. method: log_image or
        log_histogram. Returns whether any tracker has it, as far as that is known."""
        if self._config is None:
            self._media.append((method, name, value, step, epoch))
            return True
        able = any(callable(getattr(tracker, method, None)) for tracker in self._trackers)
        self._trackers = [one for one in self._trackers if self._call(one, method, name, value, step, epoch)]
        return able

    def close(self) -> None:
        if self._hyperparameters or self._media:
            self.begin({}, 0)  # of a script that has not trained
        for tracker in self._trackers:
            self._call(tracker, "close")
        self._trackers = []

    def _call(self, tracker: Tracker, method: str, *args: Any) -> bool:
        """Call a method of a tracker, if it has it. Returns whether that succeeded."""
        try:
            if method in _REQUIRED or hasattr(tracker, method):
                getattr(tracker, method)(*args)
            return True
        except Exception as error:
            warn(
                f"the tracker {type(tracker).__name__} failed in {method} and is left out from here on: "
                f"{type(error).__name__}: {error}",
            )
            return False


class JsonLines:
    """metrics.jsonl: an object in each line, with step, epoch, time (seconds since 1970) and the values; null for one
    that is not finite. Each line is in the file as soon as it is logged. The settings are in config.json beside it."""

    FILE = "metrics.jsonl"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.FILE
        self._config: dict[str, Any] = {}
        # What is logged at the step where the run was restored may be in the file already.
        self._resumed_at: int | None = None

    def begin(self, config: Config, step: int) -> None:
        if self._path.exists() and self._path.stat().st_size:
            if step:
                self._keep(lambda line: line.get("step", 0) <= step)
                self._resumed_at = step
            else:
                self._put_aside()
        self._config = dict(config)
        self._write_config()

    def _write_config(self) -> None:
        (self._path.parent / "config.json").write_text(json.dumps(self._config, indent=1) + "\n")

    def log_hyperparameters(self, values: Config) -> None:
        self._config["hyperparameters"] = {**self._config.get("hyperparameters", {}), **values}
        self._write_config()

    def log_histogram(self, name: str, values: Any, step: int, epoch: int) -> None:
        """A line with the counts of 30 bins of equal width, and the 31 edges."""
        import numpy as np

        counts, edges = np.histogram(values, bins=30)
        line = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "histogram": {name: histogram}}) + "\n")

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        if step == self._resumed_at:
            self._keep(lambda line: line.get("step") != step or not (values.keys() & line.keys()))
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        own = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        line = json.dumps({**own, **{key: value for key, value in finite.items() if key not in own}})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def close(self) -> None:
        return None

    def _keep(self, wanted: Any) -> None:
        """Replace the file, in one piece, by its lines that are wanted. A last line that a crash cut off goes."""
        kept = []
        for text in self._path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if wanted(line):
                kept.append(text + "\n")
        part = self._path.with_suffix(".part")
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._path)

    def _put_aside(self) -> None:
        """Rename an earlier run's file, which a new run must not overwrite: metrics-1.jsonl, and so on."""
        number = 1
        while (aside := self._path.with_name(f"metrics-{number}.jsonl")).exists():
            number += 1
        os.replace(self._path, aside)
