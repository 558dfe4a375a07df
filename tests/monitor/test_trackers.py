"""What is written, read back: JSON lines, TensorBoard by its own reader, MLflow in its SQLite file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import SettingError, UsageError
from paceline.monitor.trackers import JsonLines

STEPS = 10  # in an epoch


def train(folder: Path, trackers: str, *, stop: int | None = None, checkpoints: Path | None = None) -> None:
    """Two epochs with x = the number of the step, and what the whole epoch had; to step `stop` where that is given, as
    a run that is killed: after its last checkpoint it has gone on to log."""
    run = paceline.start(log_dir=folder, trackers=trackers, log_every=3, progress="off")
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, optimizer)
    loader = run.loader(TensorDataset(torch.ones(4 * STEPS, 2)), global_batch=4)
    if checkpoints is not None:
        run.restore(checkpoints, missing_ok=True)
    for _ in run.epochs(2):
        for batch in loader:
            run.forward_backward(lambda m, b: m(b[0]).square().mean(), model, batch)
            run.step(optimizer)
            run.log(x=run.steps)
            if checkpoints is not None and run.steps in (9, 14):
                run.save(checkpoints)
            if run.steps == stop:
                run.close()
                return
        run.log({"epoch/steps": run.steps})
    run.close()


def jsonl(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / JsonLines.FILE).read_text().splitlines()]


def points(lines: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(line["step"], line[key]) for line in lines if key in line]


EXPECTED = [(3, 2.0), (6, 5.0), (9, 8.0), (12, 11.0), (15, 14.0), (18, 17.0), (20, 19.5)]
RESUMED = [(3, 2.0), (6, 5.0), (9, 8.0), (12, 11.0), (15, 15.0), (18, 17.0), (20, 19.5)]  # from 14: 15 has its own step


def test_json_lines(tmp_path: Path) -> None:
    train(tmp_path, "jsonl")
    lines = jsonl(tmp_path)
    assert points(lines, "x") == EXPECTED
    assert points(lines, "epoch/steps") == [(10, 10.0), (20, 20.0)]
    assert [line["epoch"] for line in lines if "x" in line] == [0, 0, 0, 1, 1, 1, 1]
    assert all(
        line["loss"] > 0 and line["lr"] == pytest.approx(0.1) and line["time"] > 1e9 for line in lines if "x" in line
    )
    assert json.loads((tmp_path / "config.json").read_text())["global_batch"] == 4


def test_a_resumed_run_leaves_no_point_twice(tmp_path: Path) -> None:
    train(tmp_path, "jsonl", stop=19, checkpoints=tmp_path / "checkpoints")
    assert points(jsonl(tmp_path), "x")[-1] == (19, 19.0)
    with open(tmp_path / JsonLines.FILE, "a") as file:
        file.write('{"step": 21, "x":')  # a crash in the middle of a line
    train(tmp_path, "jsonl", checkpoints=tmp_path / "checkpoints")
    lines = jsonl(tmp_path)
    assert points(lines, "x") == RESUMED
    assert points(lines, "epoch/steps") == [(10, 10.0), (20, 20.0)]


def test_what_is_logged_again_at_the_step_of_the_restart_stands_once(tmp_path: Path) -> None:
    first = JsonLines(tmp_path)
    first.begin({}, 0)
    for step, values in ((4, {"a": 1.0}), (5, {"a": 2.0}), (5, {"kept": 3.0}), (6, {"a": 4.0})):
        first.log(values, step, 0)
    again = JsonLines(tmp_path)
    again.begin({}, 5)
    again.log({"a": 2.5}, 5, 0)
    again.log({"a": float("nan")}, 6, 0)
    assert points(jsonl(tmp_path), "a") == [(4, 1.0), (5, 2.5), (6, None)]
    assert points(jsonl(tmp_path), "kept") == [(5, 3.0)]


def test_a_new_run_in_an_old_directory_puts_its_file_aside(tmp_path: Path) -> None:
    for _ in range(3):
        train(tmp_path, "jsonl", stop=6)
    assert {path.name for path in tmp_path.glob("*.jsonl")} == {"metrics.jsonl", "metrics-1.jsonl", "metrics-2.jsonl"}
    assert points(jsonl(tmp_path), "x") == EXPECTED[:2]


def test_tensorboard_reads_the_same(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, "jsonl,tensorboard", stop=19, checkpoints=tmp_path / "checkpoints")
    train(tmp_path, "jsonl,tensorboard", checkpoints=tmp_path / "checkpoints")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    for key in ("x", "loss", "lr", "epoch/steps"):
        seen = [(event.step, event.value) for event in events.Scalars(key)]
        assert [step for step, _ in seen] == [step for step, _ in points(jsonl(tmp_path), key)]
        assert [value for _, value in seen] == pytest.approx([value for _, value in points(jsonl(tmp_path), key)])
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "|global_batch|4|" in text


@pytest.mark.conformance  # mlflow and wandb bring some eighty packages: `make conformance` installs them
def test_mlflow_in_its_sqlite_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra: pip install 'paceline[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train(tmp_path, "jsonl,mlflow", stop=19, checkpoints=tmp_path / "checkpoints")
    train(tmp_path, "jsonl,mlflow", checkpoints=tmp_path / "checkpoints")
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("paceline")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["global_batch"] == "4"
    seen = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "x")]
    assert seen[:4] + seen[-1:] == EXPECTED[:4] + EXPECTED[-1:]
    assert len({step for step, _ in seen}) == len(seen), "a step that stands twice"


@pytest.mark.conformance
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is an extra: pip install 'paceline[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(tmp_path, "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert (tmp_path / "wandb_run_id").read_text().strip()
    wandb.teardown()  # its process and threads


def test_a_missing_package_is_named_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.monitor.trackers.find_spec", lambda name: None)
    with pytest.raises(SettingError, match=r"pip install 'paceline\[wandb\]'"):
        paceline.start(log_dir=tmp_path, trackers="wandb")


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path) -> None:
    class Broken:
        def begin(self, config: Mapping[str, Any], step: int) -> None:
            pass

        def log(self, values: Mapping[str, float], step: int, epoch: int) -> None:
            raise OSError("the disk is full")

        def close(self) -> None:
            raise AssertionError("it was left out")

    run = paceline.start(log_dir=tmp_path, progress="off")
    run.add_tracker(Broken())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.log(a=1)
        run.log(a=2)
    run.close()
    assert [(str(w.message), w.filename) for w in caught if "Broken" in str(w.message)] == [
        ("the tracker Broken failed in log and is dropped: OSError: the disk is full", __file__)
    ]
    assert len(jsonl(tmp_path)) == 2


@pytest.mark.parametrize(
    ("value", "says"),
    [("0.5", "a number or a 0-dim tensor"), (torch.ones(3), "shape \\(3,\\)"), (None, "a number"), (1j, "a number")],
)
def test_what_is_no_number_is_named(value: object, says: str) -> None:
    run = paceline.start(progress="off")
    with pytest.raises(UsageError, match=says):
        run.log(accuracy=value)
    run.close()
