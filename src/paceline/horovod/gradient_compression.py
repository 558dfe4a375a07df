"""Horovod's interface to what is done to a tensor before it travels, and its two kinds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface: derive from it, and pass the class, or an object of it, as `compression`."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """What travels, and what `decompress` must know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """The tensor, from what has travelled and the second result of `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """The tensor as it is."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors are rounded to 16 bits, and added in 16 bits: beyond 65,504 they are inf."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The names that scripts use."""

    none = NoneCompressor
    fp16 = FP16Compressor
