"""Hyperparameters, images and histograms, read back from what the trackers wrote."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError
from paceline.monitor import media

PIXELS = torch.arange(12).reshape(3, 2, 2)


def train(folder: Path | None, trackers: str | None = None, *added: Any, early: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        run = paceline.start(log_dir=folder, trackers=trackers, progress="off")
        for tracker in added:
            run.add_tracker(tracker)
        try:
            run.log_hyperparameters(
                {"width": 8, "optimizer": {"name": "SGD", "lr": 0.1}, "path": Path("x")}, frozen=True
            )
            if early:
                run.log_histogram("early", torch.ones(2))
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.prepare(model, optimizer)
            for batch in run.loader(TensorDataset(torch.ones(8, 2)), global_batch=4):
                run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
                run.step(optimizer)
            run.log_hyperparameters(width=16)
            run.log_histogram("weights", torch.tensor([0.0, 1.0, 1.0, float("nan")]))
            run.log_image("first", PIXELS.byte())
        finally:
            run.close()


EXPECTED = {"width": 16, "optimizer.name": "SGD", "optimizer.lr": 0.1, "path": "x", "frozen": True}


def test_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is an extra: pip install 'paceline[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    train(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0, "images": 0}).Reload()
    (image,) = events.Images("first")
    assert (image.step, image.width, image.height) == (2, 2, 2)
    (histogram,) = events.Histograms("weights")
    assert (histogram.step, histogram.histogram_value.num) == (2, 3)
    found: dict[str, Any] = {}
    for content in events.summary_metadata.values():
        if content.plugin_data.plugin_name == "hparams":
            data = plugin_data_pb2.HParamsPluginData.FromString(content.plugin_data.content)
            for name, value in data.session_start_info.hparams.items():
                found[name] = getattr(value, value.WhichOneof("kind"))
    assert {**EXPECTED, "width": found.get("width")} == found


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra: pip install 'paceline[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    class NoHistograms:
        """mlflow has none, so another tracker takes them: else the run warns."""

        def begin(self, config: Any, step: int) -> None: ...
        def log(self, values: Any, step: int, epoch: int) -> None: ...
        def close(self) -> None: ...
        def log_histogram(self, *_: Any) -> None: ...

    train(tmp_path, "mlflow", NoHistograms())
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    run_id = (tmp_path / "mlflow_run_id").read_text().strip()
    params = client.get_run(run_id).data.params
    assert {name: params[name] for name in EXPECTED} == {**{k: str(v) for k, v in EXPECTED.items()}, "width": "8"}
    assert any("first" in item.path for item in client.list_artifacts(run_id, "images"))


@pytest.mark.conformance
@pytest.mark.timeout(400)
def test_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is an extra: pip install 'paceline[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path, "wandb")
    (picture,) = tmp_path.rglob("media/images/*.png")
    assert picture.stat().st_size
    wandb.teardown()  # its process and threads


def test_in_json_lines_and_where_no_tracker_takes_images(tmp_path: Path) -> None:
    with pytest.raises(UserWarning, match=r"run\.log_image: no tracker of this run supports it"):
        train(tmp_path, "jsonl")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line["histogram"]["weights"] for line in lines if "histogram" in line]
    assert (found["counts"][0], found["counts"][-1], sum(found["counts"])) == (1, 2, 3)
    assert json.loads((tmp_path / "config.json").read_text())["hyperparameters"] == EXPECTED
    train(None)  # without trackers nothing is done, and nothing said


def test_a_tracker_of_ones_own_is_told_what_it_has_a_method_for(tmp_path: Path) -> None:
    told: list[Any] = []

    class Own:
        def begin(self, config: Any, step: int) -> None:
            told.append(config["global_batch"])

        def log(self, values: Any, step: int, epoch: int) -> None: ...
        def close(self) -> None: ...

        def log_image(self, name: str, image: Any, step: int, epoch: int) -> None:
            told.append((name, image.dtype, image.tolist(), step))

        def log_histogram(self, name: str, values: Any, step: int, epoch: int) -> None:
            told.append((name, values.tolist(), step))

    train(None, None, Own(), early=True)
    before = [4, ("early", [1.0, 1.0], 0)]
    assert told == [*before, ("weights", [0.0, 1.0, 1.0], 2), ("first", np.uint8, PIXELS.permute(1, 2, 0).tolist(), 2)]


def test_pictures() -> None:
    grey = media.image("x", torch.tensor([[0.0, 0.5], [1.0, 0.2]]))
    assert grey[:, :, 0].tolist() == grey[:, :, 2].tolist() == [[0, 128], [255, 51]]
    assert media.image("x", np.ones((1, 2, 2), dtype=bool)).max() == 255
    for value, says in (
        (torch.zeros(4, 4, 3), r"It looks like \(height, width, channels\): permute\(2, 0, 1\)"),
        (torch.zeros(2, 3, 4, 4), r"the image has shape \(2, 3, 4, 4\)"),
        (torch.randn(3, 4, 4) * 9, "undo the normalisation"),
        (torch.full((4, 4), 300), "integers from 0 to 255"),
        ("picture.png", "not str"),
    ):
        with pytest.raises(UsageError, match=says):
            media.image("x", value)
    with pytest.raises(UsageError, match="no finite value"):
        media.histogram("x", torch.tensor([float("nan")]))
    with pytest.raises(UsageError, match="a dict or keywords"):
        media.hyperparameters(["lr"], {})  # type: ignore[arg-type]
