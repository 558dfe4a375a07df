"""Numbers that represent the values of a tensor in a record.

`digest` and `row_digests` show whether values are equal. `sample` shows the size of a difference. `projections` shows
both for each row of a batch. Sketches of whole gradients, for comparing sums and multiples, are in sketches.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

SOME = 512  # about this many elements, evenly spaced, are enough to recognise a tensor
_ROW_ELEMENTS, _MAX_ROWS = 64, 256  # elements to read from a row; rows to read from a batch
_SAMPLE_ELEMENTS = 6
_MAX_ELEMENTS_READ = 1 << 20  # in a larger tensor, only evenly spaced columns are projected
_MAX_STEPS, _MAX_PADDED = 8192, 65536  # padded_rows: limits for the steps and the elements of a row


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU. After `numpy()` of the tensor itself, FSDP could not resize its storage."""
    found = tensor.detach().cpu()
    return found.clone(memory_format=torch.contiguous_format) if tensor.device.type == "cpu" else found.contiguous()


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings (transformers' BatchEncoding is a mapping but no dict)."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 4:
        parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
        for part in parts:
            yield from tensors_in(part, depth + 1)


def digest(*tensors: torch.Tensor, most: int | None = None) -> str:
    """A checksum of the bits of these tensors.

    most: read about this many evenly spaced elements of each tensor. None: read all elements.
    """
    made = hashlib.sha1(usedforsecurity=False)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        some = (flat if most is None else flat[:: max(1, flat.numel() // most)]).cpu().contiguous()
        if some.nbytes:  # not through `numpy`: see own_copy
            made.update((ctypes.c_char * some.nbytes).from_address(some.data_ptr()))
    return made.hexdigest()[:16]


def row_digests(tensor: torch.Tensor) -> list[int]:
    """A checksum of each row of a tensor."""
    flat = tensor.detach()[:_MAX_ROWS].reshape(min(len(tensor), _MAX_ROWS), -1)
    stride = max(1, flat.shape[1] // _ROW_ELEMENTS)
    return [zlib.crc32(row.tobytes()) for row in _as_array(flat[:, ::stride])]


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    values = own_copy(tensor)
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()


def sample(tensor: torch.Tensor) -> list[float]:
    """Return [number of elements, sum of magnitudes, sum, *some elements]."""
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)][:_SAMPLE_ELEMENTS].double()
    size = torch.stack([flat.abs().sum(dtype=torch.float64), flat.sum(dtype=torch.float64)])
    return [flat.numel(), *torch.cat([size, values]).tolist()]


def padded_rows(tensor: torch.Tensor) -> list[list[int]] | None:
    """Describe each row of a batch of sequences, (rows, steps) or (rows, steps, features), regardless of padding.

    Two batches may pad the same example to different widths, on the right or on the left. These numbers still identify
    the example: [number of steps, *right side, *left side]. Each side has the number of equal steps at its end, and
    checksums of one such step, of the other steps, and of all steps. Returns None for other tensors.
    """
    if tensor.dim() not in (2, 3) or not 1 < tensor.shape[1] <= _MAX_STEPS or tensor[0].numel() > _MAX_PADDED:
        return None
    data = _as_array(tensor.detach()[:_MAX_ROWS].reshape(min(len(tensor), _MAX_ROWS), tensor.shape[1], -1))
    sides = zip(_side(data), _side(np.ascontiguousarray(data[:, ::-1])))
    return [[data.shape[1], *right, *left] for right, left in sides]


def _side(data: np.ndarray) -> list[list[int]]:  # (rows, steps, features)
    """For each row: the number of equal steps at its end, and checksums of one of them, of the other steps, of all."""
    steps = data.shape[1]
    unlike = (data != data[:, -1:]).any(axis=2)
    real = np.where(unlike.any(axis=1), steps - unlike[:, ::-1].argmax(axis=1), 0).tolist()
    return [[steps - n, zlib.crc32(row[-1].tobytes()), _head(row, n), _head(row, steps)] for row, n in zip(data, real)]


def _head(row: np.ndarray, steps: int) -> int:
    """A checksum of the first steps of a row, and of their number."""
    return zlib.crc32(row[: min(steps, _ROW_ELEMENTS)].tobytes(), steps)


def projections(rows: torch.Tensor) -> list[float]:  # rows: (rows, columns)
    """The scalar product of each row with fixed weights. Values that are not finite become 1e308, for JSON."""
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    rows = rows[:, :: max(1, rows.numel() // _MAX_ELEMENTS_READ)].to("cpu", torch.float64)
    # Rows of scores may contain infinities as a mask: a single infinity would hide all other numbers of its row.
    rows = rows.nan_to_num(nan=math.nan, posinf=1.0, neginf=-1.0)
    return [finite(value) for value in (rows @ _weights(rows.shape[1])).tolist()]


@lru_cache(maxsize=256)
def _weights(columns: int) -> torch.Tensor:
    return torch.cos(torch.arange(columns, dtype=torch.float64) * 2.399963) + 1.5


def finite(value: complex) -> float:
    """The real part of a number, or 1e308 if it is not finite."""
    number = float(value.real)
    return number if math.isfinite(number) else 1e308
