"""examples/detect.py in float64: the averaged weights are the same on one process, on two, on three with workers
and after a restart; one checkpoint has the same scores on 1, 2 and 3 processes, each image once, also where a process
has none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.examples import cells, jobs
from tests.examples import detect_jobs as its
from tests.examples.test_examples import distance
from tests.ranks import run_ranks

pytestmark = [pytest.mark.conformance, pytest.mark.timeout(900)]
for library in ("PIL", "pycocotools"):
    pytest.importorskip(library, reason=f"{library} is not installed: make conformance installs it")

BOUND = 1e-12  # two processes come to 2e-14
RUNS: dict[str, tuple[int, list[str]]] = {
    "two": (2, []),
    "three, workers": (3, ["--workers", "1"]),
    "two, restarted": (2, ["--every", "1", "--checkpoints", "{folder}/checkpoints"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """7 images to train on and 4 to test, and 2 to test; some have no box."""
    made = tmp_path_factory.mktemp("detect")
    cells.write(made / "cells.zip", {"train": 7, "test": 4})
    cells.write(made / "few.zip", {"train": 3, "test": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(jobs.EXAMPLES)
        patch.setenv(its.FOLDER, str(made))
        yield made


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """The weights that one process ends with."""
    run_ranks(1, "tests.examples.detect_jobs:train", "one", deadline=300)
    return load_file(folder / "one.safetensors")


@pytest.mark.parametrize(
    "run", ["two, restarted", *(pytest.param(name, marks=pytest.mark.full) for name in ("two", "three, workers"))]
)
def test_the_weights_are_the_same(run: str, folder: Path, one: dict[str, Any]) -> None:
    size, more = RUNS[run]
    given = [argument.format(folder=folder) for argument in more]
    run_ranks(size, "tests.examples.detect_jobs:train", run, *given, deadline=300)
    assert distance(one, load_file(folder / f"{run}.safetensors")) <= BOUND


@pytest.mark.full
def test_verify_finds_one_model(folder: Path) -> None:
    script = [str(jobs.EXAMPLES / "detect.py"), *its.arguments("cells.zip"), "--global-batch", "5"]
    command = [sys.executable, "-m", "paceline", "verify", "--nproc", "2", "--steps", "3", *script]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """Weights that find most things, made by a plain loop."""
    import detect_data
    import detect_loss
    import detect_model
    import detect_mosaic

    data, cache = its.arguments("cells.zip")[1], folder / "cache"
    images = detect_data.load(Path(data), "test", ["small", "large"], (64, 48), cache)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these tensors are too small for two
    torch.manual_seed(0)
    model = detect_model.Detector(2, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = detect_mosaic.collate(list(detect_mosaic.Detections(images)))
    for _ in range(80):
        loss = detect_loss.loss_fn(model, batch)
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    save_file(model.state_dict(), folder / "trained.safetensors")
    return folder / "trained.safetensors"


@pytest.mark.parametrize("data", ["cells", pytest.param("few", marks=pytest.mark.full)])
def test_one_checkpoint_has_one_score(data: str, folder: Path, trained: Path) -> None:
    """Four images on three processes are uneven shards; two leave one of them without any."""
    import detect_boxes
    import detect_data
    import detect_model
    import detect_mosaic
    import detect_scores

    images = detect_data.load(folder / f"{data}.zip", "test", ["small", "large"], (64, 48), folder / "cache")
    model = detect_model.Detector(2, 4).eval()
    model.load_state_dict(load_file(trained))
    found = []
    for example in detect_mosaic.Detections(images):
        found += detect_boxes.detect(model, detect_mosaic.collate([example])[0])
    expected = detect_scores.average_precision(detect_scores.in_pixels(found, images), images)
    if data == "cells":
        assert expected["mAP@0.5"] > 0.3
    for size in (1, 2, 3):
        first, *others = run_ranks(
            size, "tests.examples.detect_jobs:evaluate", f"{data}.zip", "trained.safetensors", deadline=300
        )
        assert first == pytest.approx(expected, abs=1e-6)
        assert not any(others), "rank 0 alone scores"
