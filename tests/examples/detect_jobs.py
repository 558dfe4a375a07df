"""What the processes of test_detect.py run: the detector, as a person would start it, in float64 and on tiny images."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tests.examples.jobs import EXAMPLES, start

FOLDER = "PACELINE_TEST_DETECT"
TINY = ["--classes", "small", "large", "--size", "64x48", "--width", "4", "--train-list", "train"]
TRAINED = ["--epochs", "2", "--global-batch", "5", "--lr", "1e-3", "--every", "2"]


def arguments(zip_file: str) -> list[str]:
    folder = Path(os.environ[FOLDER])
    return ["--data", str(folder / zip_file), "--cache", str(folder / "cache"), *TINY]


def train(name: str, *more: str) -> str:
    """Trains in float64, on 7 images in batches of 5 and 2. The averaged weights are left in the folder.

    With --checkpoints it then takes the newest away, and goes on from the one before it.
    """
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(EXAMPLES))
    saved = Path(os.environ[FOLDER]) / f"{name}.safetensors"
    given = [*arguments("cells.zip"), *TRAINED, *more, "--export", str(saved)]
    printed = start(EXAMPLES / "detect.py", given)[1]
    if "--checkpoints" in more and os.environ["RANK"] == "0":
        saved.unlink()
        checkpoints = Path(more[more.index("--checkpoints") + 1])
        shutil.rmtree(max(checkpoints.glob("*/"), key=lambda path: path.stat().st_mtime))
    if "--checkpoints" in more:
        printed = start(EXAMPLES / "detect.py", given)[1]
        assert "resumed after step 2" in printed or os.environ["RANK"] != "0", printed
    return printed


def evaluate(zip_file: str, weights: str) -> dict[str, float]:
    """The scores of saved weights, in float32, with all digits. Rank 0 alone scores; the others return nothing."""
    sys.path.insert(0, str(EXAMPLES))
    import detect_scores

    exact: dict[str, float] = {}
    rounded = detect_scores.average_precision

    def kept(found: Any, images: Any) -> dict[str, float]:
        assert len(found) == len(images.boxes)
        exact.update(rounded(found, images))
        return exact

    detect_scores.average_precision = kept
    start(EXAMPLES / "detect.py", [*arguments(zip_file), "--evaluate", str(Path(os.environ[FOLDER]) / weights)])
    return exact
