"""Numbers that stand for the values of a tensor in an event."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

_DIGEST_ELEMENTS = 512
_ROW_ELEMENTS, _MAX_ROWS = 64, 256
_SAMPLE_ELEMENTS = 6


def tensors_in(batch: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif depth < 4:
        parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
        for part in parts:
            yield from tensors_in(part, depth + 1)


def digest(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _DIGEST_ELEMENTS)].cpu()
    values = values.float() if values.dtype is torch.bfloat16 else values
    return zlib.crc32(values.contiguous().numpy().tobytes())


def row_digests(tensor: torch.Tensor) -> list[int]:
    """A number for each row of a tensor, from about so many of its values."""
    flat = tensor.detach()[:_MAX_ROWS].reshape(min(len(tensor), _MAX_ROWS), -1)
    stride = max(1, flat.shape[1] // _ROW_ELEMENTS)
    values = flat[:, ::stride].cpu()
    if values.dtype is torch.bfloat16:
        values = values.float()
    data = values.contiguous().numpy()
    return [zlib.crc32(row.tobytes()) for row in data]


def sample(tensor: torch.Tensor) -> list[float]:
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)][:_SAMPLE_ELEMENTS].double()
    size = torch.stack([flat.abs().sum(dtype=torch.float64), flat.sum(dtype=torch.float64)])
    return [flat.numel(), *torch.cat([size, values]).tolist()]
