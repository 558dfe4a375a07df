"""The parts of examples/detect.py: the reader, mosaics, the assignment, the loss, overlaps left out, and the scores."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.examples import cells
from tests.examples.jobs import EXAMPLES

pytest.importorskip("PIL", reason="Pillow is not installed")
CLASSES = ["small", "large"]
SIZE = 64, 48


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def loaded(folder: Path, part: str = "train", **changes: Any) -> Any:
    import detect_data

    path = cells.write(folder / "cells.zip", {"train": 3, "test": 2}, members=changes)
    return detect_data.load(path, part, CLASSES, SIZE, folder / "cache")


def test_images_of_any_shape_lie_on_the_canvas_and_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import detect_data

    images = loaded(tmp_path)
    assert images.pixels.shape == (3, 3, 48, 64)
    assert images.letterboxes[0] == (96, 72, 2 / 3, 0, 0)
    assert images.letterboxes[1] == (72, 96, 0.5, 14, 0)
    upright = images.pixels[1]
    assert (upright[:, :, :14] == detect_data.GREY).all()
    assert (upright[:, :, 50:] == detect_data.GREY).all()
    assert (upright[0, :, 16:48] != detect_data.GREY).float().mean() > 0.9
    monkeypatch.setattr(detect_data, "canvas", None)  # nothing is decoded again
    again = detect_data.load(tmp_path / "cells.zip", "train", CLASSES, SIZE, tmp_path / "cache")
    assert torch.equal(again.pixels, images.pixels)
    with pytest.raises(TypeError):
        detect_data.load(tmp_path / "cells.zip", "train", CLASSES, (32, 32), tmp_path / "cache")


def test_a_box_without_an_area_is_left_out(tmp_path: Path) -> None:
    boxes: list[cells.Box] = [("small", 5, 5, 5, 5), ("large", 1, 2, 31, 42)]
    images = loaded(tmp_path, **{"Annotations/train0.xml": cells.annotation(96, 72, boxes)})
    assert images.boxes[0].tolist() == [[1, 1, 2, 31, 42]]


OUTSIDE = cells.annotation(96, 72, [("small", 90, 10, 104, 24)])
OTHER_CLASS = cells.annotation(96, 72, [("Cell", 0, 10, 14, 24)])
BAD_ZIPS = {
    "a list that is missing": ({"ImageSets/Main/train.txt": None}, "Its lists are: test"),
    "an empty list": ({"ImageSets/Main/train.txt": ""}, "names no image"),
    "a missing image": ({"JPEGImages/train1.jpg": None}, "train1.jpg. Add that file to the zip, or take the line out"),
    "a missing annotation": ({"Annotations/train1.xml": None}, "train1.xml. Add that file"),
    "an image that is none": ({"JPEGImages/train1.jpg": b"no image"}, "is no image"),
    "an annotation that is none": ({"Annotations/train1.xml": "<annotation"}, "no annotation of Pascal VOC"),
    "an annotation without a size": ({"Annotations/train1.xml": "<annotation/>"}, "no annotation of Pascal VOC"),
    "another size": ({"Annotations/train0.xml": cells.annotation(90, 72, [])}, "has 96 x 72 pixels"),
    "a box outside its image": ({"Annotations/train0.xml": OUTSIDE}, "(90, 10) to (104, 24), outside its image of 96"),
    "another class": ({"Annotations/train0.xml": OTHER_CLASS}, "'Cell', and --classes has small, large"),
}


@pytest.mark.parametrize("name", BAD_ZIPS)
def test_what_is_wrong_with_a_zip_is_named(name: str, tmp_path: Path) -> None:
    import detect_voc

    members, said = BAD_ZIPS[name]
    with pytest.raises(detect_voc.DataError) as raised:
        loaded(tmp_path, **members)
    assert said in str(raised.value)
    assert str(tmp_path / "cells.zip") in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere/at/all"], "no file nowhere/at/all. Name a zip"),
        (["--data", "{script}"], "detect.py is no zip. --data takes"),
        (
            ["--data", "{cells}", "--classes", "small", "large", "huge"],
            "--classes has huge, of which the",
        ),
        (["--data", "{cells}", "--classes", "small", "large", "--evaluate", "no.file"], "no.file. Train with --export"),
        (["--data", "{cells}", "--classes", "small", "large", "--evaluate", "{script}"], "is no safetensors file"),
        (
            ["--data", "{cells}", "--classes", "small", "large", "--evaluate", "{weights}"],
            "holds the weights of another model. Give --width and --classes as in the training",
        ),
    ],
)
def test_the_script_says_what_to_do(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("pycocotools", reason="pycocotools is not installed: make conformance installs it")
    script = EXAMPLES / "detect.py"
    cells.write(tmp_path / "cells.zip", {"train": 3, "test": 2})
    paths = {"script": script, "cells": tmp_path / "cells.zip", "weights": tmp_path / "a.safetensors"}
    save_file({"other": torch.ones(2)}, paths["weights"])
    given = [argument.format(**paths) for argument in arguments]
    given += ["--train-list", "train", "--size", "64x48", "--cache", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *given])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.split("error:")[1]


def interpolated(hits: list[bool], boxes: int) -> float:
    """COCO's average precision of detections in the order of their scores: over 101 recalls, the best precision at that
    recall or beyond it."""
    points = [(sum(hits[: n + 1]) / boxes, sum(hits[: n + 1]) / (n + 1)) for n in range(len(hits))]
    best = [
        max((precision for recall, precision in points if recall >= step / 100), default=0.0) for step in range(101)
    ]
    return sum(best) / 101


def test_scores_are_those_of_coco(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools", reason="pycocotools is not installed: make conformance installs it")
    import detect_data
    import detect_scores

    one = [[0, 0, 0, 20, 20], [0, 50, 50, 70, 70], [1, 10, 10, 40, 40]]
    two = [[0, 5, 5, 25, 25]]
    boxes = [torch.tensor(rows, dtype=torch.float32) for rows in (one, two)]
    letterboxes = [detect_data.letterbox(96, 72, SIZE)] * 2
    images = detect_data.Images(torch.zeros(2, 3, 48, 64), boxes, letterboxes, ["a", "b", "without a box"])
    found = [
        torch.tensor([[0, 0, 20, 20, 0.9, 0], [60, 0, 80, 20, 0.8, 0], [50, 50, 70, 64, 0.7, 0], [0, 0, 9, 9, 0.6, 1]]),
        torch.tensor([[5, 5, 25, 25, 0.3, 0.0], [5, 5, 25, 25, 0.2, 1.0]]),
    ]
    # In the order of their scores: class a hits, misses, hits with an overlap of 0.7, hits.
    at_half, strict = interpolated([True, False, True, True], 3), interpolated([True, False, False, True], 3)
    scores = detect_scores.average_precision(found, images)
    assert scores["AP@0.5 a"] == pytest.approx(at_half, abs=1e-9)
    assert scores["AP@0.5 b"] == 0.0
    assert "AP@0.5 without a box" not in scores
    assert scores["mAP@0.5"] == pytest.approx(at_half / 2, abs=1e-9)
    by_overlap = [at_half] * 5 + [strict] * 5  # 0.5 to 0.7, and 0.75 to 0.95
    assert scores["mAP@0.5:0.95"] == pytest.approx(sum(by_overlap) / 10 / 2, abs=1e-9)
    assert set(detect_scores.average_precision([torch.zeros(0, 6)] * 2, images).values()) == {0.0}
    scaled = [torch.cat([rows[:, :4] * 2 / 3, rows[:, 4:]], dim=1) for rows in found]
    for got, want in zip(detect_scores.in_pixels(scaled, images), found):
        torch.testing.assert_close(got, want)
    images = images._replace(pixels=torch.zeros(2, 3, 48, 64, dtype=torch.uint8))
    detect_scores.draw(tmp_path / "sheet" / "two.jpg", scaled, images)
    from PIL import Image

    assert Image.open(tmp_path / "sheet" / "two.jpg").size == (3 * (5 * 64 + 4), 5 * 48 + 4 + 18)
