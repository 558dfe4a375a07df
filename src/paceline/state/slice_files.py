"""The files of a checkpoint in slices: each process writes the parts of tensors that it has, and reads what it needs.

    step-00000042/
      model_0.json               as in every checkpoint; it names all tensors
      model_0.safetensors        the tensors that are not in parts, written by rank 0
      slices-00003.safetensors   the parts that rank 3 has
      slices-00003.json          where these parts lie in their tensors; written after the file above
      manifest.json              as in every checkpoint; its format is 2

slices-00003.json:

    {"file": {"size": 4096, "sha256": "..."},        of slices-00003.safetensors; null if there is no such file
     "tensors": {"optimizer_0/state/up.weight/exp_avg":                            PART/NAME
                 {"dtype": "float32", "shape": [8, 4], "blocks": [[[4, 0], [4, 4]]]}}}

A block is [offset, shape]. The safetensors file has the block number k of a tensor under the name k/PART/NAME.

The layout is our own, since torch.distributed.checkpoint's writer for safetensors copies all that a process writes
before it writes, and its other formats use pickle. It has the same information: a tensor's shape, and an offset and a
shape for each block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from paceline import plain_state
from paceline.comm import dtensor
from paceline.comm.slices import Box, HeldTensor, StoredTensor, boxes_of, region, whole_box
from paceline.errors import CheckpointError
from paceline.state.atomic import damaged, explained, sync
from paceline.state.manifest import SLICES, Entry, Manifest
from paceline.state.plain_files import hash_of, open_plain
from paceline.state.snapshot import save_tensors

_CHUNK_BYTES = 16 * 2**20  # the part of a block that is read at once
_MOST_BYTES = 2**28  # the largest index of a file of slices

Index = dict[str, dict[str, Any]]
"""PART/NAME -> {"dtype", "shape", "blocks": [[file, name in it, offset, shape], ...]}. It consists of plain JSON."""


def file_name(rank: int) -> str:
    """The name of a rank's index. Its safetensors file has the same name with another suffix."""
    return f"{SLICES}{rank:05d}.json"


def blocks_of(held: Mapping[str, HeldTensor]) -> dict[str, Tensor]:
    """The tensors that this process writes: name in the safetensors file -> view of its memory."""
    return {
        f"{number}/{key}": region(one.local, box.start, box.shape)
        for key, one in held.items()
        for number, box in enumerate(one.boxes)
    }


def write(folder: Path, rank: int, held: Mapping[str, HeldTensor], blocks: Mapping[str, Tensor]) -> None:
    """Write this process's files into the folder of a checkpoint that is being written.

    held: PART/NAME -> tensor. blocks: from `blocks_of`, or copies. Raises CheckpointError if the disk is full, or
    another error of the operating system.
    """
    index = folder / file_name(rank)
    file: dict[str, Any] | None = None
    with explained("A checkpoint could not be saved to", folder.parent.parent):
        if blocks:
            path = index.with_suffix(".safetensors")
            save_tensors(path, blocks, {"format": "pt"})
            sync(path)
            file = Entry(path.stat().st_size, hash_of(path))._asdict()
        tensors = {
            key: {
                "dtype": str(one.meta.dtype).removeprefix("torch."),
                "shape": list(one.meta.shape),
                "blocks": [[list(box.offset), list(box.shape)] for box in one.boxes],
            }
            for key, one in held.items()
            if one.boxes or rank == 0  # every tensor is listed once, also without elements
        }
        part = index.with_suffix(".part")
        part.write_text(json.dumps({"file": file, "tensors": tensors}), "utf-8")
        sync(part)
        part.rename(index)  # whoever sees the index finds both files whole


def entries(folder: Path, ranks: int) -> dict[str, Entry]:
    """The manifest's entries of all ranks' files, once they are written."""
    found = {}
    for rank in range(ranks):
        index = folder / file_name(rank)
        found[index.name] = Entry(index.stat().st_size, hash_of(index))
        file = json.loads(index.read_text("utf-8"))["file"]
        if file is not None:
            found[index.with_suffix(".safetensors").name] = Entry(**file)
    return found


def read_index(folder: Path, manifest: Manifest, parts: Collection[str]) -> Index:
    """Find the tensors of some parts in the files of an intact checkpoint. Reads no tensors.

    Raises CheckpointError if the blocks of a tensor leave a gap or overlap.
    """
    index: Index = {}
    for name in manifest.files:
        if name.startswith(SLICES) and name.endswith(".json"):
            with damaged(folder / name), open_plain(folder / name) as file:
                described = json.loads(file.read(_MOST_BYTES))
                data = Path(name).with_suffix(".safetensors").name
                for key, one in described["tensors"].items():
                    if key.partition("/")[0] in parts:
                        _add(index, key, data, one)
    for part in parts:
        path = folder / f"{part}.safetensors"
        if path.name in manifest.files:
            open_plain(path).close()
            with damaged(path), safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    index[f"{part}/{name}"] = {
                        "dtype": None,
                        "shape": (shape := list(opened.get_slice(name).get_shape())),
                        "blocks": [[path.name, name, [0] * len(shape), shape]],
                    }
    for key, one in index.items():
        _check_cover(folder, key, one)
    return index


def _add(index: Index, key: str, file: str, described: dict[str, Any]) -> None:
    known = index.setdefault(key, {"dtype": described["dtype"], "shape": described["shape"], "blocks": []})
    if (known["dtype"], known["shape"]) != (described["dtype"], described["shape"]):
        raise ValueError(f"{key} has another shape or dtype than in another file")
    for number, (offset, shape) in enumerate(described["blocks"]):
        if any(type(n) is not int or n < 0 for n in (*offset, *shape)) or len(offset) != len(shape):
            raise ValueError(f"{key} has the block {offset}, {shape}")
        known["blocks"].append([file, f"{number}/{key}", offset, shape])


def _check_cover(folder: Path, key: str, one: dict[str, Any]) -> None:
    """Raises CheckpointError unless the blocks cover every element of a tensor once."""
    blocks, shape = one["blocks"], np.array(one["shape"], dtype=object)  # Python's integers do not overflow
    low, size = (np.array([b[k] for b in blocks], dtype=object).reshape(len(blocks), len(shape)) for k in (2, 3))
    high = low + size
    count = sum(math.prod(sizes) for sizes in size.tolist())
    inside = bool((high <= shape).all())
    if not inside or count != math.prod(one["shape"]) or _overlaps(low, high):
        raise CheckpointError(
            f"{folder}: the slices of {key} do not cover its shape {tuple(one['shape'])} once. The checkpoint was "
            "written by another program, or modified. Use another checkpoint."
        )


def _overlaps(low: np.ndarray[Any, Any], high: np.ndarray[Any, Any]) -> bool:
    """Whether two of these boxes have a common element. low, high: (boxes, dimensions), high is exclusive."""
    if not low.shape[1]:
        return len(low) > 1
    for dim in range(low.shape[1]):  # usually one dimension separates all boxes
        order = sorted(range(len(low)), key=lambda number: low[number, dim])
        if all(high[one, dim] <= low[after, dim] for one, after in pairwise(order)):
            return False
    return any(
        bool(((low[one] < high[one + 1 :]) & (low[one + 1 :] < high[one])).all(axis=1).any()) for one in range(len(low))
    )


class SliceReader:
    """Reads tensors of one checkpoint. index: from `read_index`, perhaps on another rank."""

    def __init__(self, folder: Path, index: Index) -> None:
        self._folder, self._index = folder, index
        self._files: dict[str, Any] = {}  # open files

    def read_part(self, part: str, data: bytes) -> Any:
        """Decode a part of a checkpoint. Its tensors are StoredTensors. data: its JSON. Raises CheckpointError."""
        return plain_state.read_saved(data, PartTensors(self, part), str(self._folder / f"{part}.json"))

    def names(self, part: str) -> list[str]:
        return [key.partition("/")[2] for key in self._index if key.startswith(f"{part}/")]

    def form(self, key: str) -> tuple[torch.Size, torch.dtype]:
        """The shape and the dtype of a tensor."""
        one = self._index[key]
        if one["dtype"] is not None:
            return torch.Size(one["shape"]), plain_state.native_dtype(one["dtype"])
        file, name, *_ = one["blocks"][0]
        with damaged(self._folder / file):
            empty = self._open(file).get_slice(name)
            first = empty[0:0] if one["shape"] else self._open(file).get_tensor(name)
        return torch.Size(one["shape"]), first.dtype

    def read(self, key: str, target: Tensor, boxes: Sequence[Box]) -> None:
        """Read boxes of a tensor into `target`, this process's local tensor."""
        one = self._index[key]
        with torch.no_grad():
            for file, name, offset, shape in one["blocks"]:
                for box in boxes:
                    common = _common(box, offset, shape)
                    if common is not None:
                        self._copy(file, name, shape, target, *common)

    def _copy(
        self, file: str, name: str, shape: Sequence[int], target: Tensor, at: list[int], to: list[int], size: list[int]
    ) -> None:
        """Copy `size` elements from index `at` of a block to index `to` of the target, a few rows at a time."""
        with damaged(self._folder / file):
            opened = self._open(file)
            if not size:
                target.copy_(opened.get_tensor(name))
                return
            block = opened.get_slice(name)
            if list(block.get_shape()) != list(shape):
                raise ValueError(f"{name} has the shape {block.get_shape()} instead of {shape}")
            row_bytes = max(1, target.element_size() * math.prod(size[1:]))
            rows = max(1, _CHUNK_BYTES // row_bytes)
            for first in range(0, size[0], rows):
                count = min(rows, size[0] - first)
                begin, length = [at[0] + first, *at[1:]], [count, *size[1:]]
                chosen = tuple(slice(a, a + n) for a, n in zip(begin, length, strict=True))
                region(target, [to[0] + first, *to[1:]], length).copy_(block[chosen])

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            open_plain(path).close()
            self._files[file] = safe_open(path, framework="pt")
        return self._files[file]


def _common(box: Box, offset: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
    """The common part of a box and a block: (its index in the block, its index in the local tensor, its shape)."""
    first = [max(a, b) for a, b in zip(box.offset, offset, strict=True)]
    ends = zip(box.offset, box.shape, offset, shape, strict=True)
    size = [min(a + n, b + m) - f for (a, n, b, m), f in zip(ends, first, strict=True)]
    if any(length <= 0 for length in size):
        return None
    at = [f - b for f, b in zip(first, offset, strict=True)]
    to = [f - a + start for f, a, start in zip(first, box.offset, box.start, strict=True)]
    return at, to, size


class PartTensors(plain_state.LazyTensors):
    """The tensors of one part of a checkpoint, by name."""

    def __init__(self, reader: SliceReader, part: str) -> None:
        self._reader, self._part = reader, part

    def lazy(self, name: str, strides: list[int] | None) -> _FileTensor:
        return _FileTensor(self._reader, f"{self._part}/{name}", strides)

    def __getitem__(self, name: str) -> Tensor:
        return self.lazy(name, None).whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.names(self._part))

    def __len__(self) -> int:
        return len(self._reader.names(self._part))


@dataclass
class _FileTensor(StoredTensor):
    reader: SliceReader
    key: str
    strides: list[int] | None

    def __post_init__(self) -> None:
        self.shape, self.dtype = self._form

    @cached_property
    def _form(self) -> tuple[torch.Size, torch.dtype]:
        return self.reader.form(self.key)

    def read(self, target: Tensor) -> None:
        self.reader.read(self.key, dtensor.local(target), boxes_of(target))

    def whole(self) -> Tensor:
        made = plain_state.empty(self.shape, self.strides, self.dtype)
        self.reader.read(self.key, made, whole_box(self.shape))
        return made
