"""The readers of CIFAR-10: both archives give the same kind of data, and a pickle gets to call nothing."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.examples import data
from tests.examples.jobs import EXAMPLES


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    import cifar10_data

    return cifar10_data


def test_official_archive(reader: Any, tmp_path: Path) -> None:
    pixels, labels = data.images(50)
    train, test = reader.load(data.cifar10(tmp_path / "cifar-10-python.tar.gz", train=30, test=20))
    assert np.array_equal(np.concatenate([train.images, test.images]), pixels)
    assert train.labels.tolist() + test.labels.tolist() == labels


def test_zip_of_jpegs(reader: Any, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    path = tmp_path / "cifar10.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for part, count in (("train", 3), ("test", 2)):
            for label, name in enumerate(reader.CLASSES):
                for index in range(count):
                    content = io.BytesIO()
                    colour = (20 * label, 60 * index, 200 if part == "test" else 10)
                    image.new("RGB", (32, 32), colour).save(content, "JPEG", quality=95)
                    archive.writestr(f"{part}/{name}/{index:04}.jpg", content.getvalue())
    train, test = reader.load(path)
    assert (len(train), len(test)) == (30, 20)
    assert train.labels.tolist() == [*range(10)] * 3
    for images, blue in ((train.images, 10), (test.images, 200)):
        expected = [[20 * (i % 10), 60 * (i // 10), blue] for i in range(len(images))]
        assert (images.int().numpy().mean((1, 2)) - np.array(expected)).__abs__().max() < 6
    limited, some = reader.load(path, limit=20)
    assert (len(limited), len(some)) == (20, 4)
    assert limited.labels.bincount().tolist() == [2] * 10


class Malicious:
    """What calls a function of its choice when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize("function", ["system", "open", "exec"])
def test_malicious_pickles_are_refused(reader: Any, tmp_path: Path, function: str) -> None:
    trace = tmp_path / "it ran"
    call = {
        "system": (os.system, f"touch '{trace}'"),
        "open": (open, str(trace), "w"),
        "exec": (exec, f"open({str(trace)!r}, 'w')"),
    }[function]
    batch = pickle.dumps({b"data": Malicious(*call), b"labels": [0]}, protocol=2)
    pickle.loads(batch).clear()
    assert trace.exists(), "the pickle does nothing, and proves nothing"
    trace.unlink()
    path = data.archive(tmp_path / "cifar-10-python.tar.gz", {"data_batch_1": batch, "test_batch": batch})
    with pytest.raises(reader.DataError, match="Nothing was run"):
        reader.load(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.tar.gz", None, "cs.toronto.edu"),
        ("damaged.tar.gz", b"\x1f\x8bnot an archive", "is neither a zip of JPEGs nor cifar-10-python.tar.gz"),
        ("a.txt", b"text", "is neither a zip of JPEGs nor cifar-10-python.tar.gz"),
    ],
)
def test_other_files_are_named(reader: Any, tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(reader.DataError, match=said) as raised:
        reader.load(tmp_path / name)
    assert name in str(raised.value)
