"""Represent a tensor by a few numbers that preserve norms of differences and linear relations.

A tensor with more than WHOLE elements is stored as its product with ROWS random sign vectors, divided by sqrt(ROWS):
a Johnson-Lindenstrauss projection (Achlioptas 2003, "Database-friendly random projections"). The projection is
linear. So the sketch of a linear combination of tensors, such as a difference, is the same combination of their
sketches. The squared norm of a sketch is an unbiased estimate of the squared norm of the tensor, with a relative
standard deviation of sqrt(2 / ROWS).

The tensor is viewed as a matrix with _COLUMNS columns. Each sign vector is the outer product of a vector for its rows
and a vector for its columns. The vectors are the same for all tensors of the same size, on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WHOLE = 4096  # elements of the largest tensor that is stored unchanged
ROWS = 256  # numbers in a sketch
_COLUMNS = 1024
_CHUNK = 4096  # rows that are converted to float64 at once


@lru_cache(maxsize=256)
def _signs(count: int, seed: int) -> Tensor:
    """(count, ROWS) of -1 and 1. Drawn by NumPy, because a mode may change torch's draws."""
    drawn = np.random.Generator(np.random.PCG64(seed)).integers(0, 2, (count, ROWS), dtype=np.int8)
    return torch.from_numpy(drawn).mul_(2).sub_(1)


def sketch(tensor: Tensor) -> Tensor:
    """The tensor unchanged (any shape) if it is small or contains integers; otherwise (ROWS,), float64."""
    if tensor.numel() <= WHOLE or not tensor.dtype.is_floating_point:
        return tensor
    flat = tensor.detach().reshape(-1).cpu()
    if flat.numel() % _COLUMNS:
        flat = torch.cat([flat, flat.new_zeros(_COLUMNS - flat.numel() % _COLUMNS)])
    rows = flat.reshape(-1, _COLUMNS)
    columns, found = _signs(_COLUMNS, 1).double(), torch.zeros(ROWS, dtype=torch.float64)
    of_rows = _signs(len(rows), 2)
    for begin in range(0, len(rows), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        found += ((rows[part].double() @ columns) * of_rows[part]).sum(0)
    return found / ROWS**0.5


def sketched(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sketches of these tensors. Tensors on the meta device are left out."""
    return {name: sketch(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
