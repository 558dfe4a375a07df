"""A tensor in few numbers, of which norms of differences and linear relations can still be read.

A tensor of more than WHOLE elements is kept as its product with ROWS vectors of random signs, divided by the root of
ROWS: a Johnson-Lindenstrauss projection (Achlioptas 2003, "Database-friendly random projections"). The projection is
linear. So the sketch of a difference is the difference of the sketches, and gradients that are a combination of others
stay that combination. The mean of the square of a sketch's norm is the square of the tensor's norm, with a relative
standard deviation of sqrt(2 / ROWS).

Each vector is the product of two short vectors, for the row and the column of the tensor as a matrix of _COLUMNS
columns. The vectors are the same for every tensor of a size, on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

WHOLE = 4096  # elements of the largest tensor that is kept as it is
ROWS = 256  # numbers in a sketch
_COLUMNS = 1024
_CHUNK = 4096  # rows that are converted to float64 at once


@lru_cache(maxsize=256)
def _signs(count: int, seed: int) -> Tensor:
    """(count, ROWS) of -1 and 1."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (count, ROWS), generator=draw, dtype=torch.int8).mul_(2).sub_(1)


def sketch(tensor: Tensor) -> Tensor:
    """The tensor as it is, of any shape, where it is small or holds integers; else (ROWS,), float64."""
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
    """The sketches of these tensors. Tensors without memory are left out."""
    return {name: sketch(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
