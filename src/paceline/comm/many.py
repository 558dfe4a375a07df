"""Sums of many tensors at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.collectives import all_reduce, buckets, size_of


def sum_all(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replaces each tensor by the sum of all ranks', about 25 MB at a time, each on its way while the next is joined.

    All ranks have tensors of the same shapes and dtypes.
    """
    if size_of(group) == 1:
        return
    flying = []
    for bucket in buckets(tensors):
        joined = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        flying.append((bucket, all_reduce(joined, group=group, async_op=True)))
    for bucket, pending in flying:
        parts = pending.wait().split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_([t.detach() for t in bucket], [p.view(t.shape) for p, t in zip(parts, bucket)])
