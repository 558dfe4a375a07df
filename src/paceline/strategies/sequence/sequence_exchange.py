"""Collectives within a sequence group, for autograd. The backward of each is its exact transpose.

With transposed backwards, autograd differentiates the sum of all processes' losses. Each process has the whole loss, so
the strategy weighs it by 1 / size (ulysses.py). Then the sum of a parameter's gradients over the group is exact, even
if all processes of the group compute some operation on the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import Group, as_bytes


def exchange(
    x: Tensor, group: Group, split: int, split_sizes: Sequence[int], join: int, join_sizes: Sequence[int]
) -> Tensor:
    """All-to-all: split `x` along one dimension, send part r to rank r, and join what arrives along another dimension.

    split_sizes: the size of each rank's part along `split`. join_sizes: each rank's size along `join`.
    """
    result: Tensor = _Exchange.apply(x, group, split, split_sizes, join, join_sizes)
    return result


def gather(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """All-gather: join the tensors of all ranks along a dimension. sizes: each rank's size along it."""
    result: Tensor = _Gather.apply(x, group, dim, sizes)
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, split: int, split_sizes: Any, join: int, join_sizes: Any) -> Tensor:
        ctx.inverse = group, join, join_sizes, split, split_sizes
        return _exchange(x, group, split, split_sizes, join, join_sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        return _exchange(gradients[0], *ctx.inverse), None, None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.arguments = group, dim, sizes
        shapes = [_with_size(x, dim, size) for size in sizes]
        counts = [shape.numel() for shape in shapes]
        if not max(counts):  # a shard of the global batch without examples
            return x.new_empty(_with_size(x, dim, sum(sizes)))
        padded = x.new_zeros(max(counts))
        padded[: x.numel()] = x.reshape(-1)
        rows = group.all_gather(as_bytes(padded)).view(x.dtype).view(group.size, -1)
        return torch.cat([row[:n].view(shape) for row, n, shape in zip(rows, counts, shapes, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """Reduce-scatter: each rank receives all ranks' gradients of its part, and adds them in rank order."""
        group, dim, sizes = ctx.arguments
        parts = gradients[0].split(list(sizes), dim)
        own = parts[group.rank]
        if not gradients[0].numel():
            return torch.zeros_like(own), None, None, None
        flat = torch.cat([part.reshape(-1) for part in parts])
        received = group.all_to_all(flat, [part.numel() for part in parts], [own.numel()] * group.size)
        return received.view(group.size, *own.shape).sum(0), None, None, None


def _exchange(
    x: Tensor, group: Group, split: int, split_sizes: Sequence[int], join: int, join_sizes: Sequence[int]
) -> Tensor:
    parts = x.split(list(split_sizes), split)
    received = [_with_size(parts[group.rank], join, size) for size in join_sizes]
    counts = [shape.numel() for shape in received]
    sent = torch.cat([part.reshape(-1) for part in parts])
    if not sent.numel() and not sum(counts):  # a shard of the global batch without examples
        return sent.view(_with_size(parts[group.rank], join, sum(join_sizes)))
    flat = group.all_to_all(sent, [part.numel() for part in parts], counts)
    starts = [0, *accumulate(counts)]
    return torch.cat(
        [flat[start : start + n].view(shape) for start, n, shape in zip(starts, counts, received, strict=False)], join
    )


def _with_size(x: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size([size if i == dim else n for i, n in enumerate(x.shape)])
