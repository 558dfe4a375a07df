"""Trackers write logged values, on rank 0 only, through one small interface.

A tracker receives the step from which the run continues. An earlier run may have logged later steps in the same
directory. These must not appear twice: JsonLines removes them, TensorBoard hides them, and Weights & Biases and MLflow
continue their earlier run.
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
    """The interface for `run.add_tracker`.

    Three more methods are optional. A tracker without such a method does not record these values:
        log_hyperparameters(values): name -> string, number or boolean, at any time after begin.
        log_image(name, image, step, epoch): a NumPy array of uint8, (height, width, 3).
        log_histogram(name, values, step, epoch): a NumPy array of floats, with one dimension.
    """

    def begin(self, config: Config, step: int) -> None:
        """Called once, on rank 0, before the first value.

        Args:
            config: the settings and the world, as a flat dict.
            step: number of updates so far; not 0 if the run was restored.
        """

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        """Record means over all processes, after `step` updates."""

    def close(self) -> None:
        """Called at the end, if `begin` was called."""


_REQUIRED = ("begin", "log", "close")
_HOMES = {  # name -> (module, class, required package, extra)
    "jsonl": ("paceline.monitor.trackers", "JsonLines", None, None),
    "tensorboard": ("paceline.monitor.services", "TensorBoard", "tensorboard", "tensorboard"),
    "wandb": ("paceline.monitor.services", "WeightsAndBiases", "wandb", "wandb"),
    "mlflow": ("paceline.monitor.services", "MLflow", "mlflow", "mlflow"),
}


def cannot_track(log_dir: str | None, names: Sequence[str]) -> str | None:
    """Return the text of an error if these trackers cannot write to `log_dir`; None if they can."""
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
            f"log_dir={log_dir!r}: rank 0 cannot write there: {error.strerror or error}. Use a writable directory, "
            "or remove log_dir."
        )
    return None


class TrackerSet:
    """A run's trackers, on rank 0. A tracker that fails is dropped with a warning: it must not end the run."""

    def __init__(self, log_dir: str | None, names: Sequence[str]) -> None:
        self._log_dir, self._names = log_dir, names if log_dir is not None else ()
        self._added: list[Tracker] = []  # all trackers
        self._trackers: list[Tracker] = []  # trackers that have begun and have not failed
        self._config: Config | None = None
        self._step = 0
        self._hyperparameters: dict[str, str | int | float | bool] = {}
        self._media: list[tuple[str, str, Any, int, int]] = []  # images and histograms logged before `begin`

    def add(self, tracker: Tracker) -> None:
        self._added.append(tracker)
        if self._config is not None and self._begin(tracker):
            self._trackers.append(tracker)

    def _begin(self, tracker: Tracker) -> bool:
        """Begin a tracker. Returns whether that succeeded."""
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
        self.begin({}, step)  # if a script logs before it trains
        self._trackers = [tracker for tracker in self._trackers if self._call(tracker, "log", values, step, epoch)]

    def log_hyperparameters(self, values: Config) -> None:
        """Record hyperparameters. Before training, they are held until it begins."""
        self._hyperparameters |= values
        if self._config is not None:
            self._trackers = [one for one in self._trackers if self._call(one, "log_hyperparameters", values)]

    def log_media(self, method: str, name: str, value: Any, step: int, epoch: int) -> bool:
        """Record an image or a histogram. Before training, it is held until training begins.

        method: "log_image" or "log_histogram". Returns whether any tracker has this method; before training, True.
        """
        if self._config is None:
            self._media.append((method, name, value, step, epoch))
            return True
        able = any(callable(getattr(tracker, method, None)) for tracker in self._trackers)
        self._trackers = [one for one in self._trackers if self._call(one, method, name, value, step, epoch)]
        return able

    def close(self) -> None:
        if self._hyperparameters or self._media:
            self.begin({}, 0)  # the script has logged, but not trained
        for tracker in self._trackers:
            self._call(tracker, "close")
        self._trackers = []

    def _call(self, tracker: Tracker, method: str, *args: Any) -> bool:
        """Call a tracker's method, if the tracker has it. Returns False if the call failed."""
        try:
            if method in _REQUIRED or hasattr(tracker, method):
                getattr(tracker, method)(*args)
            return True
        except Exception as error:
            warn(
                f"the tracker {type(tracker).__name__} failed in {method} and is dropped: "
                f"{type(error).__name__}: {error}",
            )
            return False


class JsonLines:
    """Writes metrics.jsonl, as soon as values are logged, and the settings to config.json beside it.

    Each line is a JSON object with step, epoch, time (seconds since 1970) and the values. A value that is not finite
    becomes null.
    """

    FILE = "metrics.jsonl"

    def __init__(self, directory: Path) -> None:
        self._path = directory / self.FILE
        self._config: dict[str, Any] = {}
        # Values logged at the step of the restore may already be in the file.
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
        """Write a line with the counts of 30 bins of equal width, and their 31 edges."""
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
        position = {"step": step, "epoch": epoch, "time": round(time.time(), 3)}
        line = json.dumps({**position, **{key: value for key, value in finite.items() if key not in position}})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def close(self) -> None:
        return None

    def _keep(self, wanted: Any) -> None:
        """Keep only the wanted lines of the file, atomically. Also drops a last line that a crash left incomplete."""
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
        """Rename an earlier run's file to metrics-1.jsonl, and so on, so that a new run does not overwrite it."""
        number = 1
        while (aside := self._path.with_name(f"metrics-{number}.jsonl")).exists():
            number += 1
        os.replace(self._path, aside)
