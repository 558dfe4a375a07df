"""Third-party trackers: TensorBoard, Weights & Biases, MLflow. Each package is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.monitor.trackers import Config


class TensorBoard:
    """Writes TensorBoard event files to the log directory (`tensorboard --logdir LOG_DIR` shows them).

    The configuration is a text entry.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None

    def begin(self, config: Config, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard hides an earlier run's points after `step`. If this run starts at 0, it hides all of them.
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
        self._writer.add_hparams(dict(values), {}, run_name=".")  # in a separate event file of the same run

    def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def log_histogram(self, name: str, values: Any, step: int, epoch: int) -> None:
        self._writer.add_histogram(name, values, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to a Weights & Biases run, with its files in the log directory.

    A restored run continues the W&B run with the id stored in the log directory. wandb reads its environment variables,
    such as WANDB_PROJECT and WANDB_MODE=offline.
    """

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
        self._run.log({**values, "epoch": epoch}, step=step)  # wandb rejects a step that it already has

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
    """Logs to an MLflow run, in the SQLite file LOG_DIR/mlflow.db or at MLFLOW_TRACKING_URI.

    `mlflow ui --backend-store-uri sqlite:///LOG_DIR/mlflow.db` shows the file. A restored run continues the MLflow run
    with the id stored in the log directory. It skips points that MLflow already has, since MLflow cannot delete them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._client: Any = None
        self._id = ""
        self._last: dict[str, int] = {}  # metric -> the last logged step

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

        known = self._client.get_run(self._id).data.params  # MLflow does not allow changes to logged parameters
        new = {_name(key): str(value) for key, value in values.items() if _name(key) not in known}
        self._client.log_batch(self._id, params=[Param(key, value) for key, value in new.items()])

    def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
        self._client.log_image(self._id, image, key=_name(name), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")


def _name(key: str) -> str:
    """Replace characters that MLflow does not allow in a name. It allows letters, digits, _ - . : space and /."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in key)
