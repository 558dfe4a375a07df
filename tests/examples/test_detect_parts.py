"""The parts of examples/detect.py: the reader, mosaics, the assignment, the loss, overlaps left out, and the scores."""

from __future__ import annotations

import math
import random
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


def test_boxes_follow_their_images_through_mosaics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blue rectangle is where its box is, however it was cut, scaled and mirrored."""
    import detect_data
    import detect_mosaic

    monkeypatch.setattr(detect_mosaic, "LEFT_OF", 0.0)
    pixels = torch.full((4, 3, 48, 64), 200, dtype=torch.uint8)
    boxes = torch.tensor([[5, 5, 25, 20], [30, 20, 60, 44], [10, 25, 20, 45], [40, 2, 62, 12]], dtype=torch.float32)
    for number, (left, top, right, bottom) in enumerate(boxes.int().tolist()):
        pixels[number, :2, top:bottom, left:right] = 0
    rows = [torch.cat([torch.zeros(1), box])[None] for box in boxes]
    canvases = [detect_data.letterbox(64, 48, SIZE)] * 4
    made = detect_mosaic.Detections(detect_data.Images(pixels, rows, canvases, ["blue"]), mosaic=0.7)
    torch.manual_seed(0)
    counts = []
    for index in [0, 1, 2, 3] * 4:
        image, found = made[index]
        counts.append(len(found))
        inside = torch.zeros(48, 64, dtype=torch.bool)
        for _, left, top, right, bottom in found.tolist():
            inside[round(top) : round(bottom), round(left) : round(right)] = True
        blue = image[0] < 100
        assert (blue != inside).sum() <= 2 * sum(64 for _ in found), "more than the edges"
        assert (blue & inside).sum() >= 0.7 * inside.sum()
    assert max(counts) == 4
    assert {image.shape for image, _ in (made[0], made[1])} == {(3, 48, 64)}


def test_a_batch_is_of_one_size_and_its_boxes_with_it() -> None:
    import detect_mosaic

    examples = [(torch.zeros(3, 48, 64, dtype=torch.uint8), torch.tensor([[1.0, 8, 6, 64, 48]])) for _ in range(2)]
    seen = set()
    for seed in range(9):
        random.seed(seed)
        images, boxes = detect_mosaic.collate_scaled(examples)
        height, width = images.shape[2:]
        assert height % 8 == width % 8 == 0
        torch.testing.assert_close(boxes[1][0], torch.tensor([1, width / 8, height / 8, width, height]))
        seen.add((height, width))
    assert len(seen) == len(detect_mosaic.SCALES)


def expected_cell(boxes: list[list[float]], x: float, y: float, stride: float) -> int:
    """The rule of detect_loss.py for one cell, in plain Python."""
    least, most = {8.0: (0, 64), 16.0: (64, 128), 32.0: (128, math.inf)}[stride]
    fitting = []
    for number, (_, left, top, right, bottom) in enumerate(boxes):
        near = abs(x - (left + right) / 2) < 1.5 * stride and abs(y - (top + bottom) / 2) < 1.5 * stride
        within = left < x < right and top < y < bottom
        if near and within and least <= max(right - left, bottom - top) < most:
            fitting.append(((right - left) * (bottom - top), number))
    return min(fitting)[1] if fitting else -1


def test_cells_answer_for_the_smallest_box_of_their_scale() -> None:
    import detect_boxes
    import detect_loss

    draw = random.Random(0)
    boxes = []
    for side in [12, 20, 30, 40, 63, 64, 90, 127, 128, 180] * 3:
        left, top = draw.uniform(0, 200 - side), draw.uniform(0, 200 - side)
        boxes.append([0.0, left, top, left + side, top + side * draw.uniform(0.5, 1)])
    centres, strides = detect_boxes.cells(torch.zeros(1, 3, 200, 200, dtype=torch.float64))
    found = detect_loss.assign(torch.tensor(boxes, dtype=torch.float64), centres, strides)
    want = [expected_cell(boxes, x, y, s) for (x, y), (s,) in zip(centres.tolist(), strides.tolist())]
    assert found.tolist() == want
    assert len(set(want)) > 20
    assert (detect_loss.assign(torch.zeros(0, 5), centres, strides) == -1).all()


def test_the_loss_is_the_sum_of_its_formulas_over_cells() -> None:
    """Plain loops over cells, on a batch of two images of which one has no box."""
    import detect_boxes
    import detect_loss

    torch.manual_seed(0)
    images = torch.zeros(2, 3, 40, 48, dtype=torch.float64)
    centres, strides = detect_boxes.cells(images)
    found = torch.randn(2, len(centres), 6, dtype=torch.float64)
    boxes = [torch.tensor([[1.0, 3, 4, 30, 28], [0, 20, 10, 34, 26]]), torch.zeros(0, 5)]
    total = detect_loss.loss_fn(lambda _: found, (images, boxes))
    sum_, count = 0.0, 0
    for image, its in enumerate(boxes):
        for number, ((x, y), (stride,)) in enumerate(zip(centres.tolist(), strides.tolist())):
            *sides, p, q = found[image, number].tolist()
            wanted = [0.0, 0.0]
            box = expected_cell(its.tolist(), x, y, stride)
            if box >= 0:
                left, top, right, bottom = (
                    centre + sign * stride * math.exp(side)
                    for centre, sign, side in zip((x, y, x, y), (-1, -1, 1, 1), sides)
                )
                label, a, b, c, d = its[box].tolist()
                shared = max(min(right, c) - max(left, a), 0) * max(min(bottom, d) - max(top, b), 0)
                union = (right - left) * (bottom - top) + (c - a) * (d - b) - shared
                around = (max(right, c) - min(left, a)) * (max(bottom, d) - min(top, b))
                sum_ += 2.0 * (1 - shared / union + (around - union) / around)
                wanted[int(label)] = shared / union
                count += 1
            for logit, want in zip((p, q), wanted):
                score = 1 / (1 + math.exp(-logit))
                entropy = -want * math.log(score) - (1 - want) * math.log(1 - score)
                sum_ += abs(score - want) ** 2 * entropy
    assert count > 5
    assert int(total.count) == count
    assert float(total.sum) == pytest.approx(sum_, rel=1e-12)


def test_overlapping_boxes_of_a_class_are_left_out() -> None:
    import detect_boxes

    torch.manual_seed(1)
    images = torch.zeros(1, 3, 64, 64, dtype=torch.float64)
    centres, strides = detect_boxes.cells(images)
    found = torch.randn(1, len(centres), 6, dtype=torch.float64)
    found[..., :4] = 0.3 * found[..., :4] + 1.2
    got = detect_boxes.detect(lambda _: found, images)[0]
    corners = detect_boxes.corners(found, centres, strides)[0]
    candidates = sorted(
        ((float(found[0, n, 4 + c].sigmoid()), c, corners[n].tolist()) for n in range(len(corners)) for c in (0, 1)),
        reverse=True,
    )[: detect_boxes.CANDIDATES]
    kept: list[list[float]] = []
    for score, label, box in candidates:
        rivals = [torch.tensor(other[:4]) for other in kept if other[5] == label]
        if score > 0.05 and all(detect_boxes.overlap(torch.tensor(box), one)[0] <= 0.6 for one in rivals):
            kept.append([*box, score, label])
    assert 10 < len(kept) < len(candidates) - 10
    torch.testing.assert_close(got, torch.tensor(kept, dtype=torch.float64))


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
