"""Small synthetic data in the formats that the examples read."""

from __future__ import annotations

import io
import pickle
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def text(length: int = 6000) -> str:
    """Words of a few letters at random: something to learn, and the same each time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 5))) for _ in range(30)]
    return " ".join(draw.choices(words, k=length))[:length]


def images(count: int) -> tuple[Array, list[int]]:
    """uint8 (count, 32, 32, 3), brighter for higher classes; and the classes, in turn."""
    draw = np.random.default_rng(0)
    labels = [index % 10 for index in range(count)]
    noise = draw.integers(0, 60, (count, 32, 32, 3))
    return (noise + 18 * np.array(labels)[:, None, None, None]).astype(np.uint8), labels


def python2_pickle(pixels: Array, labels: list[int]) -> bytes:
    """A batch as the official archive has it: protocol 2 as Python 2 wrote it, whose strings are bytes (opcodes U, T),
    with arrays of numpy 1. pixels: uint8 (n, 3072)."""
    rows, columns = pixels.shape
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    array += b"(K\x01" + struct.pack("<cicic", b"J", rows, b"J", columns, b"\x86") + dtype
    array += b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def archive(path: Path, batches: dict[str, bytes]) -> Path:
    """A tar.gz as the official one, with these members in its folder."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def cifar10(path: Path, train: int, test: int) -> Path:
    """An archive of two training batches and the test batch, with so many images."""
    pixels, labels = images(train + test)
    flat = pixels.transpose(0, 3, 1, 2).reshape(len(labels), -1)
    half, names = train // 2, pickle.dumps({b"label_names": [b"airplane"]}, protocol=2)
    parts = {"data_batch_1": slice(0, half), "data_batch_2": slice(half, train), "test_batch": slice(train, None)}
    return archive(
        path,
        {"batches.meta": names}
        | {name: python2_pickle(np.ascontiguousarray(flat[part]), labels[part]) for name, part in parts.items()},
    )
