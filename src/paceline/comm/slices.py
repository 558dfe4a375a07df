"""Parts of tensors: the part that a process has in memory, and tensors whose values are in the files of a checkpoint.

A part is a list of boxes. With rows split over two processes, a tensor of shape (8, 4) has one box on rank 1:

    Box(offset=(4, 0), start=(0, 0), shape=(4, 4))

A layer with q, k and v in one weight has three boxes, because each third is split separately.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh, world_group
from paceline.plain_state import NATIVE_DTYPES as NATIVE_DTYPES
from paceline.plain_state import TensorApart


class Box(NamedTuple):
    """A box of a tensor that this process has."""

    offset: tuple[int, ...]  # the index of its first element in the whole tensor
    start: tuple[int, ...]  # the index of its first element in the process's local tensor
    shape: tuple[int, ...]


def region(tensor: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """A view of the elements from index `start` on."""
    for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def boxes_of(tensor: Tensor) -> list[Box]:
    """The boxes of the whole tensor that this process has: those of a DTensor's local tensor, else one, the whole."""
    if not dtensor.is_sharded(tensor):
        return whole_box(tensor.shape)
    runs = [dtensor.runs_of(tensor, dim) for dim in range(tensor.dim())]
    return [Box(*zip(*chosen, strict=True)) if chosen else Box((), (), ()) for chosen in product(*runs)]


def write_part(target: Tensor, whole: Tensor) -> None:
    """Write a whole tensor into a tensor of its shape. Of a sharded tensor, write this process's part."""
    own = dtensor.local(target)
    for box in boxes_of(target):
        region(own, box.start, box.shape).copy_(region(whole, box.offset, box.shape))


def write_rows(target: Tensor, first: int, count: int, rows: Callable[[], Tensor]) -> None:
    """Write some rows of a tensor with at least one dimension. Of a sharded tensor, write this process's part of them.

    first, count: which rows. rows: makes them; called if this process has a part of them.
    """
    own, made = dtensor.local(target), None
    for box in boxes_of(target):
        low, high = max(first, box.offset[0]), min(first + count, box.offset[0] + box.shape[0])
        if low < high:
            made = rows() if made is None else made
            shape = (high - low, *box.shape[1:])
            start = (box.start[0] + low - box.offset[0], *box.start[1:])
            region(own, start, shape).copy_(region(made, (low - first, *box.offset[1:]), shape))


def whole_box(shape: Sequence[int]) -> list[Box]:
    """The one box of a tensor that this process has whole; no box if it has no elements."""
    zeros = (0,) * len(shape)
    return [Box(zeros, zeros, tuple(shape))] if all(shape) else []


@dataclass(frozen=True)
class HeldTensor(TensorApart):
    """A tensor of which this process has a part. It stands for the whole tensor in `Strategy.held_state`.

    Attributes:
        local: the part's memory.
        boxes: the boxes of the whole tensor that this process writes. Among processes with the same part, one writes.
    """

    local: Tensor
    boxes: Sequence[Box]


class StoredTensor(ABC):
    """A tensor in the files of a checkpoint. It stands for the tensor in a state that a strategy loads.

    Attributes:
        shape, dtype: of the whole tensor.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def read(self, target: Tensor) -> None:
        """Read this process's part into a sharded tensor's local memory, or the whole into another tensor.

        target: of this tensor's shape; any dtype and device. Raises CheckpointError if the files cannot be read.
        """

    @abstractmethod
    def whole(self) -> Tensor:
        """Read the whole tensor."""

    def like(self, own: Tensor | None) -> Tensor:
        """Read a tensor for a parameter: a part if `own` is a part of a tensor of this shape, otherwise the whole."""
        if own is None or own.shape != self.shape or not dtensor.is_cut(own):
            return self.whole()
        made = dtensor.empty_like(own, self.dtype)
        self.read(made)
        return made


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor on "meta" with the shape, strides and dtype of a whole tensor or a DTensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def held(node: Any, mesh: Mesh) -> Any:
    """Replace the sharded tensors in a nested state by HeldTensors. Collective.

    A tensor that every process has becomes a plain tensor. So does a tensor of a dtype that cannot be written in
    parts: it is gathered, and other ranks than 0 get an empty tensor.
    """
    if dtensor.is_sharded(node):
        if not dtensor.is_cut(node):
            return dtensor.local(node)
        if node.dtype not in NATIVE_DTYPES:
            whole = dtensor.whole_on_main(node)
            return whole if world_group().rank == 0 else torch.empty(0)
        boxes = boxes_of(node) if dtensor.is_first_copy(node, mesh) else []
        return HeldTensor(meta_like(node), dtensor.local(node).detach(), boxes)
    if isinstance(node, dict):
        return {key: held(value, mesh) for key, value in node.items()}
    return [held(item, mesh) for item in node] if isinstance(node, list) else node
