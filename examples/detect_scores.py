"""Evaluate detections (COCO's mean average precision, with pycocotools), and draw them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detect_data import Images
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

COLOURS = "#e41a1c", "#1f4fbf", "#ffd500", "#2ca02c", "#9467bd", "#ff7f0e"


def in_pixels(found: Sequence[Tensor], images: Images) -> list[Tensor]:
    """Convert boxes on the canvas to boxes on the original images."""
    moved = []
    for boxes, box in zip(found, images.letterboxes, strict=True):
        shift = boxes.new_tensor([box.left, box.top, box.left, box.top])
        most = boxes.new_tensor([box.width, box.height, box.width, box.height])
        boxes = boxes.clone()
        boxes[:, :4] = ((boxes[:, :4] - shift) / box.scale).clamp(min=0).minimum(most)
        moved.append(boxes)
    return moved


def average_precision(found: Sequence[Tensor], images: Images) -> dict[str, float]:
    """mAP@0.5:0.95, mAP@0.5, and AP@0.5 of each class with boxes.

    found: for each image (boxes, 6): left, top, right, bottom in its pixels, score, class.
    """
    truth: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image, (boxes, own) in enumerate(zip(images.boxes, found, strict=True), start=1):
        for label, left, top, right, bottom in boxes.tolist():
            size = right - left, bottom - top
            one = {"id": len(truth) + 1, "image_id": image, "category_id": int(label) + 1, "iscrowd": 0}
            truth.append(one | {"bbox": [left, top, *size], "area": size[0] * size[1]})
        for left, top, right, bottom, score, label in own.tolist():
            one = {"image_id": image, "category_id": int(label) + 1, "score": score}
            results.append(one | {"bbox": [left, top, right - left, bottom - top]})
    categories = [{"id": number, "name": name} for number, name in enumerate(images.classes, start=1)]
    with contextlib.redirect_stdout(io.StringIO()):  # suppress pycocotools' output
        coco = COCO()
        coco.dataset = {"info": {}, "images": [{"id": i + 1} for i in range(len(found))], "annotations": truth}
        coco.dataset["categories"] = categories
        coco.createIndex()
        if not results:  # loadRes fails on an empty list
            return {"mAP@0.5:0.95": 0.0, "mAP@0.5": 0.0}
        scored = COCOeval(coco, coco.loadRes(results), "bbox")
        scored.evaluate()
        scored.accumulate()
    # (overlaps, recalls, classes); -1 for a class without boxes. Areas: all. Detections: at most 100 of an image.
    precision = scored.eval["precision"][:, :, :, 0, -1]

    def mean(values: np.ndarray[Any, Any]) -> float:
        return float(values[values >= 0].mean()) if (values >= 0).any() else 0.0

    by_class = {f"AP@0.5 {name}": precision[0, :, n] for n, name in enumerate(images.classes)}
    its = {name: mean(values) for name, values in by_class.items() if (values >= 0).any()}
    return {"mAP@0.5:0.95": mean(precision), "mAP@0.5": mean(precision[0]), **its}


def draw(path: Path, found: Sequence[Tensor], images: Images, columns: int = 3, least: float = 0.4) -> None:
    """A sheet of images with a legend and the boxes with a score above `least`. found: boxes on the canvas."""
    from PIL import Image, ImageDraw

    zoom = max(1, 320 // images.pixels.shape[3])
    height, width = (zoom * side for side in images.pixels.shape[2:])
    rows = -(-len(found) // columns)
    sheet = Image.new("RGB", (columns * (width + 4), rows * (height + 4) + 18), "white")
    for number, boxes in enumerate(found):
        one = Image.fromarray(images.pixels[number].permute(1, 2, 0).numpy().copy()).resize((width, height))
        drawing = ImageDraw.Draw(one)
        for *corners, score, label in boxes.tolist():
            if score > least:
                left, top, right, bottom = (zoom * corner for corner in corners)
                colour = COLOURS[int(label) % len(COLOURS)]
                drawing.rectangle((left, top, right, bottom), outline=colour, width=2)
                drawing.text((left + 3, top + 1), f"{score:.2f}", fill=colour)
        sheet.paste(one, (number % columns * (width + 4), number // columns * (height + 4)))
    legend = ImageDraw.Draw(sheet)
    for number, name in enumerate(images.classes):
        left, top = 4 + 100 * number, rows * (height + 4) + 3
        legend.rectangle((left, top, left + 11, top + 11), outline=COLOURS[number % len(COLOURS)], width=2)
        legend.text((left + 17, top), name, fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=80)
