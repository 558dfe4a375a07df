"""A hash of a tensor's bits, computed where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.torch_private.core import DisableTorchFunction

_CHUNK = 2**18
_MULTIPLIER = 6364136223846793005  # Knuth's MMIX multiplier: odd, so that no chunk's bits are lost


def digest(tensor: Tensor) -> Tensor:
    """() int64 on the tensor's device: a hash of its bits, in row-major order. Not meant against malice.

    Each chunk's words are weighted by fixed random odd 64-bit numbers and added modulo 2**64, the chunks by Horner's
    rule: one changed word always changes the result, several do with probability 1 - 2**-63 or so.
    """
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    words = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(word)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(min(words.numel(), _CHUNK)).to(tensor.device)
    for chunk in words.split(_CHUNK):
        total = total * _MULTIPLIER + (weights[: chunk.numel()] * chunk).sum()
    return total


def _weights(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0x9E3779B97F4A7C15 >> 1)
    with DisableTorchFunction():  # with noise="example" a mode would take these for noise of the batch
        return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator) | 1
