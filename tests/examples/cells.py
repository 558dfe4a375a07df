"""Small images with boxes, in the layout of Pascal VOC: filled circles of one size and squares of another, on grey."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path
from typing import Any

Box = tuple[str, float, float, float, float]


def annotation(width: int, height: int, boxes: list[Box]) -> str:
    objects = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{left}</xmin><ymin>{top}</ymin><xmax>{right}</xmax>"
        f"<ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom in boxes
    )
    return f"<annotation><size><width>{width}</width><height>{height}</height></size>{objects}</annotation>"


def image(draw: random.Random, width: int, height: int, most: int) -> tuple[bytes, list[Box]]:
    """A JPEG with at most so many things, and their boxes. There may be none."""
    from PIL import Image, ImageDraw

    picture = Image.new("RGB", (width, height), (200, 200, 190))
    pen, boxes = ImageDraw.Draw(picture), list[Box]()
    for _ in range(draw.randint(0, most)):
        side = draw.choice([14, 40])
        left, top = draw.randint(0, width - side), draw.randint(0, height - side)
        corners = left, top, left + side, top + side
        if side == 14:
            pen.rectangle(corners, fill=(40, 40, 160))
        else:
            pen.ellipse(corners, fill=(190, 60, 60))
        boxes.append(("small" if side == 14 else "large", *corners))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=90)
    return content.getvalue(), boxes


def write(path: Path, lists: dict[str, int], most: int = 4, **changes: Any) -> Path:
    """A zip with so many images in each list; the second of each list is upright.

    changes: content by the name of a member without its folder ("Annotations/test0.xml"); None leaves it out.
    """
    draw = random.Random(0)
    with zipfile.ZipFile(path, "w") as archive:
        members: dict[str, Any] = {}
        for part, count in lists.items():
            members[f"ImageSets/Main/{part}.txt"] = "\n".join(f"{part}{number}" for number in range(count))
            for number in range(count):
                size = (72, 96) if number == 1 else (96, 72)
                content, boxes = image(draw, *size, most)
                members[f"JPEGImages/{part}{number}.jpg"] = content
                members[f"Annotations/{part}{number}.xml"] = annotation(*size, boxes)
        for name, content in (members | changes.get("members", {})).items():
            if content is not None:
                archive.writestr(f"CELLS/{name}", content)
    return path
