"""Trackers of other makers: TensorBoard, Weights & Biases, MLflow. Each package is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.monitor.trackers import Config


class TensorBoard:
    """Event files in the log directory itself: `tensorboard --logdir LOG_DIR`. The configuration is a text."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def begin(self, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier run wrote beyond this step is hidden by the reader, the whole of it for a run from 0.
        older = any(self._directory.glob("events.out.tfevents.*"))
        purge = (step + 1 if step else 0) if older else None
        self._writer = SummaryWriter(str(self._directory), purge_step=purge, flush_secs=10)
        table = "\n".join(["|setting|value|", "|---|---|", *(f"|{key}|{value}|" for key, value in config.items())])
        self._writer.add_text("config", table, step)

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)
        self._writer.add_scalar("epoch", epoch, step)

    def log_hyperparameters(self, values: Config) -> None:
        self._writer.add_hparams(dict(values), {}, run_name=".")  # a file of its own, of the same run

    def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def log_histogram(self, name: str, values: Any, step: int, epoch: int) -> None:
        self._writer.add_histogram(name, values, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose files lie in the log directory. A restored run continues it, by the id that is
    kept there. WANDB_PROJECT, WANDB_MODE=offline and so on are wandb's own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._run: Any = None

    def begin(self, config: Config, step: int) -> None:
        import wandb

        kept = self._directory / "wandb_run_id"
        earlier = kept.read_text().strip() if step and kept.exists() else None
        self._run = wandb.init(
            dir=str(self._directory), config=dict(config), id=earlier, resume="allow" if earlier else None
        )
        kept.write_text(self._run.id + "\n")

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        self._run.log({**values, "epoch": epoch}, step=step)  # a step that it has already is refused there, not doubled

    def log_hyperparameters(self, values: Config) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
        import wandb

        self._run.log({name: wandb.Image(image)}, step=step)

    def log_histogram(self, name: str, values: Any, step: int, epoch: int) -> None:
        import wandb

        self._run.log({name: wandb.Histogram(values)}, step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, in the SQLite file mlflow.db of the log directory (`mlflow ui --backend-store-uri
    sqlite:///LOG_DIR/mlflow.db`), or at MLFLOW_TRACKING_URI.

    A restored run continues it, by the id that is kept in the log directory, and leaves out the points that it already
    has: MLflow cannot delete them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client: Any = None
        self._id = ""
        self._last: dict[str, int] = {}  # metric -> the last step that the run has

    def begin(self, config: Config, step: int) -> None:
        import os

        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        place = self._directory.absolute()
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{place / 'mlflow.db'}")
        kept = place / "mlflow_run_id"
        if step and kept.exists():
            self._id = kept.read_text().strip()
            for name in self._client.get_run(self._id).data.metrics:
                self._last[name] = max(point.step for point in self._client.get_metric_history(self._id, name))
            self._client.set_terminated(self._id, "RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "paceline")
        found = self._client.get_experiment_by_name(name)
        artifacts = None if os.environ.get("MLFLOW_TRACKING_URI") else (place / "mlruns").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(name, artifacts)
        self._id = self._client.create_run(experiment).info.run_id
        self._client.log_batch(self._id, params=[Param(key, str(value)) for key, value in config.items()])
        kept.write_text(self._id + "\n")

    def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        self._client.log_batch(self._id, metrics=[Metric(_name(key), value, now, step) for key, value in new.items()])

    def log_hyperparameters(self, values: Config) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self._id).data.params  # which MLflow does not let change
        new = {_name(key): str(value) for key, value in values.items() if _name(key) not in known}
        self._client.log_batch(self._id, params=[Param(key, value) for key, value in new.items()])

    def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
        self._client.log_image(self._id, image, key=_name(name), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")


def _name(key: str) -> str:
    """A metric's name as MLflow allows it: letters, digits, _ - . : space and / only."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in key)
