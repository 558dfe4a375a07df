"""Represent a tensor by a few numbers that preserve norms of differences and linear relations.

A tensor with more than WHOLE elements is stored as a count sketch (Charikar, Chen, Farach-Colton 2002, "Finding
frequent items in data streams", section 3): each element gets a random sign and is added to one of ROWS sums, chosen at
random. The sketch is linear. So the sketch of a linear combination of tensors, such as a difference, is the same
combination of their sketches. The squared norm of a sketch is an unbiased estimate of the squared norm of the tensor,
with a relative standard deviation of at most sqrt(2 / ROWS) (Weinberger et al. 2009, "Feature hashing for large scale
multitask learning", section 2).

The signs and sums are drawn for _CHUNK elements. In a further chunk of a tensor, the sums are rotated and the sign is
changed, by numbers drawn for the chunk. All are the same for every tensor, on every rank and in every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

WHOLE = 4096  # elements of the largest tensor that is stored unchanged
ROWS = 256  # numbers in a sketch
_CHUNK = 1 << 20  # elements that are added at once
_CHUNKS = 4096  # chunks with a rotation and a sign of their own


@lru_cache(maxsize=2)
def _drawn(dtype: torch.dtype) -> tuple[np.ndarray, Tensor, np.ndarray]:
    """The sum and the sign of each element of a chunk, both (_CHUNK,); the rotation and the sign, as 0 or 1, of each
    chunk (_CHUNKS, 2). Drawn by NumPy, because a mode may change torch's draws."""
    generator = np.random.Generator(np.random.PCG64(1))
    sums = generator.integers(0, ROWS, _CHUNK)
    signs = torch.from_numpy(generator.integers(0, 2, _CHUNK) * 2 - 1).to(dtype)
    return sums, signs, generator.integers(0, (ROWS, 2), (_CHUNKS, 2))


def sketch(tensor: Tensor) -> Tensor:
    """The tensor unchanged (any shape) if it is small or contains integers; otherwise (ROWS,), float64."""
    if tensor.numel() <= WHOLE or not tensor.dtype.is_floating_point:
        return tensor
    dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    sums, signs, of_chunks = _drawn(dtype)
    flat, found = tensor.detach().reshape(-1), np.zeros(ROWS)
    for number, begin in enumerate(range(0, flat.numel(), _CHUNK)):
        part = flat[begin : begin + _CHUNK].to("cpu", dtype)
        signed = (part * signs[: len(part)]).numpy()
        added = np.bincount(sums[: len(part)], weights=signed, minlength=ROWS)
        rotation, sign = of_chunks[number % _CHUNKS]
        found += (2 * sign - 1) * np.roll(added, rotation)
    return torch.from_numpy(found)


def sketched(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sketches of these tensors. Tensors on the meta device are left out."""
    return {name: sketch(tensor) for name, tensor in tensors.items() if not tensor.is_meta}
