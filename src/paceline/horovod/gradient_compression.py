"""Horovod's interface for compressing tensors before they are sent, and its two compressors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """The interface of a compressor. Pass a subclass, or an instance of a subclass, as `compression`."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Restore a tensor from the received tensor and the context of `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor unchanged."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Rounds floating-point tensors to 16 bits. They are also added in 16 bits: sums above 65,504 become inf."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx)


class Compression:
    """The compressors under the names that scripts use."""

    none = NoneCompressor
    fp16 = FP16Compressor
