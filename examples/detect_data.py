"""Images with boxes, scaled to a canvas of fixed size, from a zip in the layout of Pascal VOC (detect_voc.py).

https://github.com/Shenggan/BCCD_Dataset has 364 images of blood cells, of 640 x 480 pixels: zip its folder BCCD.
Images are decoded once per machine, into a file that all processes read.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from detect_voc import DataError, annotation, check, members
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

Array = np.ndarray[Any, Any]
GREY = 114  # fills the rest of the canvas


class Letterbox(NamedTuple):
    """The position of an image of `width` x `height` pixels on the canvas: pixel x is at left + scale * x."""

    width: int
    height: int
    scale: float
    left: int
    top: int


class Images(NamedTuple):
    """A list of images, on a canvas of one size."""

    pixels: Tensor  # (images, 3, height, width) uint8
    boxes: list[Tensor]  # per image (boxes, 5): class, left, top, right, bottom, in pixels of the original image
    letterboxes: list[Letterbox]
    classes: Sequence[str]


def load(path: Path, part: str, classes: Sequence[str], size: tuple[int, int], cache: Path) -> Images:
    """The images of a list. size: (width, height) of the canvas. cache: the folder for decoded images, for the next
    time. Raises DataError."""
    check(path)
    with zipfile.ZipFile(path) as archive:
        pairs = members(archive, part)
        read = [annotation(archive, member, classes) for _, member in pairs]
        letterboxes = [letterbox(width, height, size) for width, height, _ in read]
        key = f"{path.resolve()} {path.stat().st_mtime_ns} {path.stat().st_size} {part} {size}"
        file = cache / f"{part}-{size[0]}x{size[1]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
        if not file.is_file():
            cache.mkdir(parents=True, exist_ok=True)
            canvases = [canvas(archive, image, box, size) for (image, _), box in zip(pairs, letterboxes)]
            unfinished = file.with_suffix(f".{os.getpid()}")
            with unfinished.open("wb") as opened:
                np.save(opened, np.stack(canvases))
            unfinished.replace(file)  # a run that is stopped here leaves no partial file
    pixels = torch.from_numpy(np.load(file, mmap_mode="c"))  # all processes of a machine share the pages
    boxes = [torch.tensor(rows, dtype=torch.float32).reshape(-1, 5) for *_, rows in read]
    return Images(pixels, boxes, letterboxes, classes)


def check_classes(images: Images, path: Path) -> None:
    """Raises DataError if a class has no boxes."""
    found = {int(label) for boxes in images.boxes for label in boxes[:, 0].tolist()}
    missing = [name for number, name in enumerate(images.classes) if number not in found]
    if missing:
        raise DataError(f"--classes has {', '.join(missing)}, of which the training list of {path} has no box. Leave "
                        "out of --classes what is not to be found, or name another --train-list.")  # fmt: skip


def load_weights(model: nn.Module, file: Path) -> None:
    """The weights that --export wrote. Raises DataError."""
    if not file.is_file():
        raise DataError(f"--evaluate: there is no file {file}. Train with --export FILE first.")
    try:
        model.load_state_dict(load_file(file))
    except SafetensorError as error:
        raise DataError(
            f"--evaluate {file} is no safetensors file ({error}). Train with --export FILE first."
        ) from None
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip()[:120]
        raise DataError(f"--evaluate {file} holds the weights of another model. Give --width and --classes as in the "
                        f"training that wrote it. ({first} ...)") from None  # fmt: skip


def letterbox(width: int, height: int, size: tuple[int, int]) -> Letterbox:
    scale = min(size[0] / width, size[1] / height)
    left, top = (size[0] - round(scale * width)) // 2, (size[1] - round(scale * height)) // 2
    return Letterbox(width, height, scale, left, top)


def canvas(archive: zipfile.ZipFile, member: str, box: Letterbox, size: tuple[int, int]) -> Array:
    """uint8 (3, height, width): the scaled image on grey."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError("the images are JPEGs, which Pillow reads: pip install pillow") from None
    try:
        image = Image.open(io.BytesIO(archive.read(member))).convert("RGB")
    except OSError as error:
        raise DataError(f"{member} of {archive.filename} is no image: {error}. Replace it.") from None
    if image.size != (box.width, box.height):
        raise DataError(f"{member} of {archive.filename} has {image.width} x {image.height} pixels, and its annotation "
                        f"is for {box.width} x {box.height}. Correct the annotation.")  # fmt: skip
    whole = Image.new("RGB", size, (GREY,) * 3)
    fitting = round(box.scale * box.width), round(box.scale * box.height)
    whole.paste(image.resize(fitting, Image.Resampling.BILINEAR), (box.left, box.top))
    return np.asarray(whole).transpose(2, 0, 1)
