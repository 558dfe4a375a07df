"""Checks whether the ranks hold the same tensors. Each tensor is hashed on its device, and only 64 bits are sent."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from paceline.comm.group import Group
from paceline.torch_private.core import DisableTorchFunction

_DIGEST_CHUNK = 2**15
_DIGEST_MULTIPLIER = 6364136223846793005  # Knuth's MMIX multiplier; odd, so that multiplying loses no bits


def digest(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits in row-major order: () int64 on the tensor's device. Not a cryptographic hash.

    Each chunk's words are weighted by fixed random odd 64-bit numbers and added modulo 2**64; chunks are combined by
    Horner's rule. One changed word always changes the result. Several changed words change it with a probability of
    about 1 - 2**-63.
    """
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    dense = tensor.to_dense() if tensor.is_sparse else tensor  # a momentum of sparse gradients is sparse
    words = dense.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(word)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _digest_weights(tensor.device)
    for chunk in words.split(_DIGEST_CHUNK):
        total = total * _DIGEST_MULTIPLIER + (weights[: chunk.numel()] * chunk).sum()
    return total


@cache
def _digest_weights(device: torch.device) -> Tensor:
    """(_DIGEST_CHUNK,) int64 on the device, cached (256 KB): drawing and uploading the weights for each tensor would
    cost more than most digests."""
    generator = torch.Generator().manual_seed(0x9E3779B97F4A7C15 >> 1)
    # With noise="example" a torch function mode would treat these draws as noise of the batch.
    with DisableTorchFunction(), torch.inference_mode(False):
        return (torch.randint(-(2**63), 2**63 - 1, (_DIGEST_CHUNK,), generator=generator) | 1).to(device)


def digest_mismatch(named_tensors: Iterable[tuple[str, Tensor]], group: Group) -> list[str]:
    """The names of the tensors that differ in any bit between ranks, in order.

    Raises UsageError if the ranks do not pass the same names, dtypes and shapes.
    """
    named = list(named_tensors)
    if group.size == 1 or not group.agree([(name, str(t.dtype), tuple(t.shape)) for name, t in named]):
        return []
    own = torch.stack([digest(tensor).cpu() for _, tensor in named])
    rows = torch.stack(group.gather_rows(own))
    differs = (rows != rows[0]).any(dim=0).tolist()
    return [name for (name, _), different in zip(named, differs) if different]
