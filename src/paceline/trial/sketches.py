"""A tensor in few numbers, of which norms of differences and linear relations can still be read.

A tensor of more than WHOLE elements is kept as its product with ROWS vectors of random signs, over the root of ROWS: a
Johnson-Lindenstrauss projection (Achlioptas 2003, "Database-friendly random projections"). It is linear, so that the
sketch of a difference is the difference of the sketches, and gradients that are a combination of others stay that
combination; the square of its norm has the mean of the tensor's, with a relative standard deviation of sqrt(2 / ROWS).
The vectors are products of two short ones, for the row and the column of the tensor as a matrix of COLUMNS columns:
the same for every tensor of a size, on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

WHOLE = 4096
ROWS = 256
_COLUMNS = 1024
_CHUNK = 4096  # rows that are taken to float64 at once


@lru_cache(maxsize=256)
def _signs(count: int, seed: int) -> Tensor:
    """(count, ROWS) of -1 and 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, ROWS), generator=draw, dtype=torch.int8).mul_(2).sub_(1)


def sketch(tensor: Tensor) -> Tensor:
    """tensor, of any shape, where it is small; else (ROWS,), float64."""
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
    return {name: sketch(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
