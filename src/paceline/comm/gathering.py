"""Joins or exchanges tensors of unequal length over all ranks.

`gather_uneven` is differentiable. It checks shapes and dtypes first: tensors of unequal size on two ranks would end the
process or give wrong data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Group, as_bytes
from paceline.comm.replicas import ReplicaSum
from paceline.errors import UsageError


class _Head(NamedTuple):
    """A rank's description of its tensor, sent before the data."""

    dtype: torch.dtype
    needs_gradient: bool
    shape: tuple[int, ...]


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MOST_DIMS = 28


def _gather_heads(tensor: Tensor, group: Group) -> list[_Head]:
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    if tensor.dim() > _MOST_DIMS:
        raise UsageError(f"gather accepts at most {_MOST_DIMS} dimensions, not {tensor.dim()}. Flatten some of them.")
    own = [_DTYPES.index(tensor.dtype), int(needs_gradient), tensor.dim(), *tensor.shape]
    row = torch.tensor(own + [0] * (3 + _MOST_DIMS - len(own)), dtype=torch.int64)
    heads = []
    for values in (received.tolist() for received in group.gather_rows(row)):
        dtype, needs_gradient, dims = values[:3]
        heads.append(_Head(_DTYPES[dtype], bool(needs_gradient), tuple(values[3 : 3 + dims])))
    return heads


def _check_heads(heads: Sequence[_Head]) -> None:
    shapes = ", ".join(f"rank {rank}: {head.shape}" for rank, head in enumerate(heads))
    if any(head.shape == () for head in heads):
        raise UsageError(
            f"gather joins tensors along dimension 0, and a 0-dim tensor has none (shapes: {shapes}). "
            f"Use tensor.reshape(1); or, for a number, run.mean or run.sum."
        )
    if len({head.shape[1:] for head in heads}) > 1:
        raise UsageError(
            f"gather joins tensors along dimension 0, so all other dimensions must be the same on all ranks. "
            f"Received shapes: {shapes}. Pad them to the same shape, or gather a list of objects instead."
        )
    if len({head.dtype for head in heads}) > 1:
        dtypes = ", ".join(f"rank {rank}: {head.dtype}" for rank, head in enumerate(heads))
        raise UsageError(
            f"gather needs the same dtype on all ranks. Received {dtypes}. Convert with tensor.to(dtype) first."
        )


def _gather_bytes(tensor: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
    """(sum of lengths, ...): all ranks' tensors joined. Each is padded to the longest for the transfer."""
    own = as_bytes(tensor)
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    padded = own.new_zeros(max(lengths) * row_bytes)
    padded[: own.numel()] = own
    received = group.gather_rows(padded) if padded.numel() else [padded] * len(lengths)
    joined = torch.cat([part[: length * row_bytes] for part, length in zip(received, lengths)])
    return joined.view(tensor.dtype).reshape(sum(lengths), *tensor.shape[1:])


class _Gather(torch.autograd.Function):
    """Joins all ranks' tensors; every rank gets the same result. Backward: this rank's slice of the summed gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
        rank = group.rank
        ctx.start, ctx.length = sum(lengths[:rank]), lengths[rank]
        ctx.total = lambda t: group.all_reduce(t.clone(memory_format=torch.contiguous_format))
        return _gather_bytes(tensor, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ReplicaSum.apply(gradients[0], ctx.total).narrow(0, ctx.start, ctx.length), None, None


def gather_uneven(tensor: Tensor, group: Group) -> Tensor:
    """Join all ranks' tensors along dimension 0 in rank order: (sum of the ranks' lengths, ...), the same on all ranks.

    Lengths may differ and may be 0; any dtype. Differentiable any number of times. The backward communicates, so all
    ranks must run it, or none. Therefore the result requires a gradient on every rank if any rank's tensor does. Raises
    UsageError on every rank if the other dimensions or the dtypes differ.
    """
    group.check()
    heads = _gather_heads(tensor, group)
    _check_heads(heads)
    if len(heads) == 1:
        return tensor.clone()  # a copy, as with several ranks, so that in-place changes act the same way
    if not tensor.requires_grad and any(head.needs_gradient for head in heads):
        tensor = tensor.detach().requires_grad_()
    joined: Tensor = _Gather.apply(tensor, [head.shape[0] for head in heads], group)
    return joined


def exchange_rows(tensor: Tensor, outwards: Sequence[int], group: Group) -> tuple[Tensor, list[int]]:
    """Send the first `outwards[0]` rows of the tensor to rank 0, the next `outwards[1]` to rank 1, and so on.

    The tensor has sum(outwards) rows. All ranks' tensors have the same dtype and rows of the same shape.

    Returns:
        (received, counts): the rows sent to this rank, joined in rank order; and the number of rows from each rank.
    """
    if group.size == 1:
        return tensor.detach().clone(), list(outwards)
    inwards = [counts[group.rank] for counts in group.gather(list(outwards))]
    width = tensor.shape[1:].numel()
    flat = tensor.detach().reshape(-1)
    joined = group.all_to_all(flat, [width * count for count in outwards], [width * count for count in inwards])
    return joined.reshape(sum(inwards), *tensor.shape[1:]), inwards
