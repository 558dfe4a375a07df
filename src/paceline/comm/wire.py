"""Named tensors as messages: a JSON header, and raw frames of 1 MB at most. Nothing is pickled.

The header describes a tensor as [name, dtype, shape]. The tensor's bytes follow in row-major order, in one or more
frames. A sparse tensor is [name, dtype, shape, sparse dimensions, entries]; its indices and values follow. While one
frame is sent, the next is encrypted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FRAME_BYTES = 2**20

Frame = bytes | memoryview


def pack(header: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]] = ()) -> list[Frame]:
    """Make a message. CPU tensors are not copied: their memory must not change before the message is sent."""
    entries: list[list[Any]] = []
    dense: list[Tensor] = []
    for name, tensor in tensors:
        tensor = tensor.detach()
        entry: list[Any] = [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if tensor.is_sparse:
            tensor = tensor.coalesce()
            entry += [tensor.sparse_dim(), tensor.values().shape[0]]
            dense += [tensor.indices(), tensor.values()]
        else:
            dense.append(tensor)
        entries.append(entry)
    first = json.dumps({**header, "tensors": entries} if entries else dict(header)).encode()
    return [first, *_frames(dense)]


def unpack(frames: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a message, in new memory on the CPU."""
    header = header_of(frames)
    left = iter(frames[1:])
    tensors: dict[str, Tensor] = {}
    for name, kind, shape, *sparse in header.pop("tensors", ()):
        dtype = getattr(torch, kind)
        if sparse:
            dims, entries = sparse
            indices = _fill(left, torch.int64, (dims, entries))
            values = _fill(left, dtype, (entries, *shape[dims:]))
            tensors[name] = torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
        else:
            tensors[name] = _fill(left, dtype, shape)
    return header, tensors


def header_of(frames: Sequence[Any]) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(bytes(_view(frames[0])))
    return header


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes on the CPU, row-major; a view if the memory already has that order."""
    raw = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(raw.numpy())  # type: ignore[arg-type]


def slices(memory: memoryview) -> Iterator[memoryview]:
    """Split memory into pieces of FRAME_BYTES."""
    for start in range(0, len(memory), FRAME_BYTES):
        yield memory[start : start + FRAME_BYTES]


def _frames(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    for tensor in _on_host(tensors):
        yield from slices(bytes_of(tensor))


def _on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy the tensors of one accelerator to the CPU together, since each copy waits for the device.

    If only one tensor is on an accelerator, or several accelerators have tensors, `bytes_of` copies them.
    """
    away = [t for t in tensors if t.device.type != "cpu"]
    if len(away) < 2 or len({t.device for t in away}) > 1:
        return tensors
    raw = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in away]
    parts = iter(torch.cat(raw).cpu().split([part.numel() for part in raw]))
    return [t if t.device.type == "cpu" else next(parts) for t in tensors]


def _fill(frames: Iterator[Any], dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    tensor = torch.empty(tuple(shape), dtype=dtype)
    memory = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    at = 0
    while at < len(memory):
        piece = np.frombuffer(_view(next(frames)), dtype=np.uint8)
        np.frombuffer(memory[at : at + len(piece)], dtype=np.uint8)[:] = piece
        at += len(piece)
    return tensor


def _view(frame: Any) -> Any:
    """Return the buffer of a ZeroMQ frame; return bytes unchanged."""
    return getattr(frame, "buffer", frame)
