"""Numbers that stand for the values of a tensor in an event."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

_DIGEST_ELEMENTS = 512  # about so many, at equal distances, go into a digest
_ROW_ELEMENTS, _MAX_ROWS = 64, 256  # elements of a row; rows of a batch
_SAMPLE_ELEMENTS = 6


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 4:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
        for part in parts:
            yield from tensors_in(part, depth + 1)


def digest(tensor: torch.Tensor) -> int:
    """A checksum of a tensor."""
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _DIGEST_ELEMENTS)].cpu()
    values = values.float() if values.dtype is torch.bfloat16 else values
    return zlib.crc32(values.contiguous().numpy().tobytes())


def row_digests(tensor: torch.Tensor) -> list[int]:
    """A checksum of each row of a tensor."""
    flat = tensor.detach()[:_MAX_ROWS].reshape(min(len(tensor), _MAX_ROWS), -1)
    stride = max(1, flat.shape[1] // _ROW_ELEMENTS)
    values = flat[:, ::stride].cpu()
    if values.dtype is torch.bfloat16:
        values = values.float()
    data = values.contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in data]


def sample(tensor: torch.Tensor) -> list[float]:
    """[number of elements, sum of magnitudes, sum, some elements]."""
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)][:_SAMPLE_ELEMENTS].double()
    size = torch.stack([flat.abs().sum(dtype=torch.float64), flat.sum(dtype=torch.float64)])
    return [flat.numel(), *torch.cat([size, values]).tolist()]
