"""Read a zip in the layout of Pascal VOC: lists of images, and an annotation of the boxes of each image.

<folder>/ImageSets/Main/<list>.txt     the names of the images of a list, one per line
<folder>/JPEGImages/<name>.jpg         needs Pillow
<folder>/Annotations/<name>.xml        the size of the image; class and corners of each box
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

LISTS = "ImageSets/Main/"
CORNERS = "xmin", "ymin", "xmax", "ymax"
Row = tuple[int, float, float, float, float]  # class, left, top, right, bottom


class DataError(Exception):
    """The file is missing, or not as expected."""


def check(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"there is no file {path}. Name a zip in the layout of Pascal VOC with --data, such as that of "
                        "the folder BCCD of https://github.com/Shenggan/BCCD_Dataset (8 MB).")  # fmt: skip
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is no zip. --data takes one in the layout of Pascal VOC: {LISTS}*.txt, "
                        "JPEGImages/*.jpg and Annotations/*.xml in one folder.")  # fmt: skip


def members(archive: zipfile.ZipFile, part: str) -> list[tuple[str, str]]:
    """The zip's members for each image of a list: the image and its annotation. Raises DataError."""
    path, present = archive.filename, set(archive.namelist())
    lists = {Path(name).stem: name for name in sorted(present) if LISTS in name and name.endswith(".txt")}
    if part not in lists:
        raise DataError(f"{path} has no {LISTS}{part}.txt. Its lists are: {', '.join(lists) or 'none'}. Name one of "
                        "them with --train-list and --test-list, or another zip with --data.")  # fmt: skip
    folder, names = lists[part].split(LISTS)[0], archive.read(lists[part]).decode(errors="replace").split()
    if not names:
        raise DataError(f"{lists[part]} of {path} names no image. Name another list, or another zip with --data.")
    pairs = [(f"{folder}JPEGImages/{name}.jpg", f"{folder}Annotations/{name}.xml") for name in names]
    for name, pair in zip(names, pairs):
        for wanted in pair:
            if wanted not in present:
                raise DataError(f"{lists[part]} names {name}, and {path} has no {wanted}. Add that file to the zip, or "
                                "take the line out of the list.")  # fmt: skip
    return pairs


def annotation(archive: zipfile.ZipFile, member: str, classes: Sequence[str]) -> tuple[int, int, list[Row]]:
    """(width, height, boxes) of an image. Boxes without an area (BCCD has two) are left out. Raises DataError."""
    where = f"{member} of {archive.filename}"
    try:
        tree = ElementTree.fromstring(archive.read(member))
        width, height = (int(tree.findtext(f"size/{side}", "")) for side in ("width", "height"))
        found = [
            (box.findtext("name", ""), [float(box.findtext(f"bndbox/{at}", "")) for at in CORNERS])
            for box in tree.findall("object")
        ]
    except (ElementTree.ParseError, ValueError) as error:
        raise DataError(f"{where} is no annotation of Pascal VOC: {error}. Correct it.") from None
    rows: list[Row] = []
    for name, (left, top, right, bottom) in found:
        if name not in classes:
            raise DataError(f"{where} has a box of the class {name!r}, and --classes has {', '.join(classes)}. Give "
                            "all classes of the data, as in --classes RBC WBC Platelets.")  # fmt: skip
        if not (0 <= left <= right <= width and 0 <= top <= bottom <= height):
            raise DataError(f"{where} has a box from ({left:g}, {top:g}) to ({right:g}, {bottom:g}), outside its image "
                            f"of {width} x {height} pixels. Correct the box, or the image's size there.")  # fmt: skip
        if left < right and top < bottom:
            rows.append((classes.index(name), left, top, right, bottom))
    return width, height, rows
