"""run.predict(to=...): each example once, in order, in files; stopped and resumed; and what it refuses."""

from __future__ import annotations

import copy
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.fit.problem import TEST, TEST_X, TEST_Y, X, near, net, started
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline
from paceline.comm.mesh import world_group
from paceline.errors import CheckpointError, SettingError, UsageError
from paceline.metrics import predict_files


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], list[Any]]:
    """As a reader does it: the index, the tensors joined in its order, and the lines."""
    index = json.loads((folder / "index.json").read_text())
    parts = [load_file(folder / one["file"]) for one in index["files"]]
    lines: list[Any] = []
    for one in index["files"] if index["jsonl"] else ():
        text = (folder / one["file"]).with_suffix(".jsonl").read_text()
        lines += map(json.loads, text.splitlines())
    return index, {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, lines


class Words(torch.utils.data.Dataset[Tensor]):
    """Of unequal length."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index % 4 + 1,), float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(X)


class Pair(NamedTuple):
    best: Tensor
    label: Tensor


def results(model: Any, batch: Any) -> dict[str, Any]:
    outputs = model(batch[0])
    return {
        "logits": outputs,
        "pair": Pair(outputs.argmax(1), batch[1]),
        "name": [f"{x:.3f}" for x in batch[0][:, 0].tolist()],
    }


@pytest.mark.ranks(1, 2, full=3)
def test_each_example_is_in_the_files_once_and_in_order(tmp_path: Path) -> None:
    model = net(dropout=0.5)
    expected = copy.deepcopy(model).eval()(TEST_X).detach()
    with started() as run:
        run.prepare(model)
        for number, options in enumerate(
            (
                {"global_batch": 5},
                {"global_batch": 7, "micro_batch": 2, "rows_per_file": 3},
                {"global_batch": 100, "rows_per_file": 6},
            )
        ):
            folder = tmp_path / str(number) / "out"
            assert run.predict(model, TEST, to=folder, fn=results, **options) == folder
            index, tensors, lines = read(folder)
            assert index["examples"] == len(TEST) == sum(one["count"] for one in index["files"])
            assert tensors["index"].tolist() == list(range(17))
            near(tensors["logits"], expected)
            assert tensors["pair.best"].equal(expected.argmax(1))
            assert tensors["pair.label"].equal(TEST_Y)
            assert [line["name"] for line in lines] == [f"{x:.3f}" for x in TEST_X[:, 0].tolist()]
            assert index["outputs"]["logits"] == {"dtype": "F64", "shape": [3]}
            assert max(one["count"] for one in index["files"]) <= options.get("rows_per_file", 17)
            names = sorted(path.name for path in folder.iterdir() if path.suffix == ".safetensors")
            assert names == [one["file"] for one in index["files"]], "the order of the names is that of the examples"
            assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".jsonl", ".json"}
            assert not (folder / "unfinished.json").exists()
            run.wait()
        folder = run.predict(model, Stream(), global_batch=4, to=tmp_path / "stream")
        near(read(folder)[1]["output"], copy.deepcopy(model).eval()(X))
        double = run.predict(
            nn.Identity(), Words(), global_batch=4, collate_fn=list, to=tmp_path / "words", fn=lambda _, b: list(b)
        )
        tensors = read(double)[1]
        rows = tensors["output"].split(tensors["output.lengths"].tolist())
        assert [row.tolist() for row in rows] == [[float(i)] * (i % 4 + 1) for i in range(11)]
        assert model.training
        with pytest.raises(UsageError, match=r"run\.predict: the data set has no examples"):
            run.predict(model, TEST_X[:0], global_batch=4, to=tmp_path / "none")


@pytest.mark.ranks(1, conformance=2)
def test_a_pass_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    model = net()
    expected = copy.deepcopy(model).eval()(TEST_X).detach()
    seen: list[int] = []

    def stopping(model: Any, batch: Any) -> Tensor:
        if len(seen) >= 3:
            raise KeyboardInterrupt
        seen.append(len(batch[0]))
        return model(batch[0])

    def counting(model: Any, batch: Any) -> Tensor:
        seen.append(len(batch[0]))
        return model(batch[0])

    with started() as run:
        run.prepare(model)
        options: dict[str, Any] = {"global_batch": 2, "to": tmp_path / "out", "rows_per_file": 2}
        with pytest.raises(KeyboardInterrupt):
            run.predict(model, TEST, fn=stopping, **options)
        run.wait()
        assert (tmp_path / "out" / "unfinished.json").exists()
        there = sum(last + 1 - first for first, last in predict_files._spans(tmp_path / "out"))
        assert 0 < there < 17
        with pytest.raises(SettingError, match=r"results of an interrupted pass\. Continue it with resume=True"):
            run.predict(model, TEST, **options)
        with pytest.raises(
            UsageError, match="the number of examples of the results in the folder differ from this pass"
        ):
            run.predict(model, TEST_X[:5], resume=True, **options)
        seen.clear()
        options |= {"global_batch": 3, "rows_per_file": 4}
        folder = run.predict(model, TEST, fn=counting, resume=True, **options)
        assert sum(run.gather(seen)) == 17 - there, "what was there is not computed again"
        tensors = read(folder)[1]
        assert tensors["index"].tolist() == list(range(17))
        near(tensors["output"], expected)
        seen.clear()
        before = (folder / "index.json").stat().st_mtime_ns
        assert run.predict(model, TEST, fn=counting, resume=True, **options) == folder
        assert not seen
        assert (folder / "index.json").stat().st_mtime_ns == before
        with pytest.raises(SettingError, match=r"holds the results of a complete pass\. Pass another folder"):
            run.predict(model, TEST, **options)
        with torch.no_grad():
            model[0].weight.add_(1.0)
        with pytest.raises(UsageError, match="the weights of the results in the folder differ from this pass"):
            run.predict(model, TEST, resume=True, **options)


def test_files_that_were_lost_since_are_computed_again(tmp_path: Path) -> None:
    model = net()
    with started() as run:
        run.prepare(model)
        folder = run.predict(model, TEST, global_batch=2, to=tmp_path / "out", rows_per_file=3)
        whole = {path.name: path.read_bytes() for path in folder.iterdir()}
        shutil.move(folder / "index.json", tmp_path / "index.json")
        for name in ("0000000003-0000000005.safetensors", "0000000015-0000000016.safetensors"):
            (folder / name).unlink()
        begun = json.loads((tmp_path / "index.json").read_text())
        unfinished = {key: begun[key] for key in ("format", "examples", "weights")}
        (folder / "unfinished.json").write_text(json.dumps(unfinished))
        run.predict(model, TEST, global_batch=2, to=folder, resume=True, rows_per_file=3)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_what_it_refuses(tmp_path: Path) -> None:
    model = net()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "index.json").write_text("[1]")
    with started() as run:
        run.prepare(model)

        def refused(kind: type[Exception], match: str, **options: Any) -> None:
            given = {"global_batch": 5, "to": tmp_path / "new", **options}
            with pytest.raises(kind, match=match):
                run.predict(model, TEST, **given)
            shutil.rmtree(tmp_path / "new", ignore_errors=True)

        refused(
            SettingError, r"not empty, and run.predict did not write its content \(thesis.txt\)", to=tmp_path / "other"
        )
        refused(SettingError, "was not written by run.predict", to=tmp_path / "foreign")
        refused(CheckpointError, "Predictions could not be written to .*file", to=tmp_path / "file")
        refused(CheckpointError, "Predictions could not be written to", to="/proc/predictions")
        refused(SettingError, r"rows_per_file=0.*at least 1", rows_per_file=0)
        refused(SettingError, r"run\.predict\(shuffle=", shuffle=True)
        refused(UsageError, "which cannot be written as JSON", fn=lambda model, batch: [object()] * len(batch[0]))
        refused(UsageError, "the name 'index' is reserved", fn=lambda model, batch: {"index": batch[1]})
        refused(UsageError, "for a batch of 5 examples", fn=lambda model, batch: batch[0].sum())
        refused(
            UsageError,
            "pad to a fixed length, or return a list",
            fn=lambda model, batch: batch[0].new_zeros(len(batch[0]), int(batch[1].sum())),
        )
        with pytest.raises(UsageError, match=r"also needs a folder: to="):
            run.predict(model, TEST, global_batch=5, resume=True)


def test_a_stream_is_not_resumed(tmp_path: Path) -> None:
    with started() as run:
        model = run.prepare(net())

        def stopping(model: Any, batch: Any) -> Tensor:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run.predict(model, Stream(), global_batch=4, to=tmp_path / "out", fn=stopping)
        with pytest.raises(UsageError, match="an iterable data set cannot be resumed where the pass stopped"):
            run.predict(model, Stream(), global_batch=4, to=tmp_path / "out", resume=True)


@pytest.mark.ranks(conformance=2)
@pytest.mark.parametrize("strategy", ["shared", "fsdp", "pipeline", "tensor", "local_sgd"])
def test_under_strategies_that_hold_parts_or_see_the_same_examples(strategy: str, tmp_path: Path) -> None:
    model = net()
    expected = copy.deepcopy(model).eval()(TEST_X).detach()
    with started(strategy=strategy) as run:
        run.prepare(model)
        folder = paceline.predict(model, TEST, global_batch=4, to=tmp_path / "out", rows_per_file=3)
        index, tensors, _ = read(folder)
        assert tensors["index"].tolist() == list(range(17))
        near(tensors["output"], expected)
        assert len(index["files"]) >= 6
        assert sum(world_group().gather(predict_files._is_writer())) in (1, 2)


SCRIPT = """
import os, signal, sys, time
import torch
import paceline

kill_at = int(sys.argv[1])
run = paceline.start(seed=0, device="cpu", progress="off")
torch.manual_seed(0)
model = run.prepare(torch.nn.Linear(4, 3).double())
inputs = torch.arange(92.0, dtype=torch.float64).reshape(23, 4)
calls = 0

def fn(model, batch):
    global calls
    calls += 1
    if run.world.rank == 1 and calls == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if run.world.rank == 0 and kill_at:
        time.sleep(0.05)
    print("computed", len(batch), flush=True)
    return model(batch)

run.predict(model, inputs, global_batch=4, to="out", rows_per_file=2, fn=fn, resume=True)
"""


@pytest.mark.conformance
@pytest.mark.timeout(240)
@pytest.mark.parametrize("again", [1, 3])
def test_a_pass_whose_rank_was_killed_goes_on_on_another_number_of_processes(again: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    def launch(size: int, kill_at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", "run", "--nproc", str(size), "--tee", f"0-{size - 1}"]
        command += ["script.py", str(kill_at)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    killed = launch(2, 4)
    assert killed.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in killed.stderr
    folder = tmp_path / "out"
    assert (folder / "unfinished.json").exists()
    assert not (folder / "index.json").exists()
    there = sum(last + 1 - first for first, last in predict_files._spans(folder))
    assert 0 < there < 23
    resumed = launch(again, 0)
    assert resumed.returncode == 0, resumed.stderr
    assert sum(map(int, re.findall(r"computed (\d+)", resumed.stdout))) == 23 - there
    tensors = read(folder)[1]
    assert tensors["index"].tolist() == list(range(23))
    torch.manual_seed(0)
    plain = nn.Linear(4, 3).double()
    near(tensors["output"], plain(torch.arange(92.0, dtype=torch.float64).reshape(23, 4)).detach())
