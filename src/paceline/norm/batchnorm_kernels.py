"""Batch norm over all replicas on CUDA, by the kernels of torch's SyncBatchNorm: few launches, and no wait.

In the forward:

1. batch_norm_stats gives the mean and 1 / sqrt(var + eps) of this replica's examples. With their count, and a number
   for biases.py, they are its row.
2. Every replica gets all rows (Replicas.rows).
3. batch_norm_gather_stats_with_counts combines the rows in their order, and batch_norm_elemt normalises.

The backward: batch_norm_backward_reduce, one sum over the replicas, batch_norm_backward_elemt. A second derivative is
in batchnorm.py, as on other devices.

SyncBatchNorm lets phase 3 compute in float32, which rounds once more for each replica: by the kernel's formula the mean
of 8 replicas is some 4 times as far from the exact one as its dtype makes it, that of 64 replicas 13 times. Here the
same kernel gets the rows in float64, and the result is rounded once, however many replicas there are. This takes 5
small launches more: the rows in float64, the results in float32, running statistics apart from the kernel. And:

- SyncBatchNorm takes out the rows of empty shards, for which it waits for the device. Here an empty shard has a row
  with a count so small that it changes nothing (NO_EXAMPLES).
- Examples that are the same on all replicas count once in running variances (batchnorm.py). All rows are then equal,
  and every row but the first gets a count of zero.

A layer takes 16 launches in the forward and 5 in the backward, one of each the exchange. Where the bias of the layer
before has its gradient made zero (biases.py) there are two more. SyncBatchNorm has some 12, and those that take out
empty shards.

In reproducible runs the rows are those of the V shards, whichever process computed them, and the kernel goes through
them in their order: the statistics have the same bits on any number of processes.

Legend for shapes: R replicas, C channels; x is (n, C, ...).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.mesh import Replicas
from paceline.torch_private.core import foreach_copy_

NO_EXAMPLES = 1e-30
"""The count in an empty shard's row. The kernel divides by the sum of the counts so far, which is 0 / 0 where the first
shards are empty. It keeps that sum as a whole number, to which this adds nothing."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Of the number of dimensions."""


class Statistics(NamedTuple):
    """Over the examples of all replicas, in float32 at least."""

    mean: Tensor  # (C,)
    var: Tensor | None  # (C,), biased; None where the kernels computed
    invstd: Tensor  # (C,), 1 / sqrt(var + eps)
    unbiased_var: Tensor  # (C,), in which examples that are the same on all replicas count once
    counts: Tensor  # values of a channel: () of all replicas; (R,) int32 of each where the kernels computed
    agreed: bool | Tensor  # (), whether all replicas that have examples listen (biases.py)


def apply_to(x: Tensor) -> bool:
    """Whether there are kernels for this tensor."""
    return x.is_cuda


def statistics_dtype(x: Tensor) -> torch.dtype:
    """At least float32: bf16 and fp16 inputs have float32 statistics, as in torch."""
    return torch.promote_types(x.dtype, torch.float32)


def statistics(x: Tensor, eps: float, replicas: Replicas, listens: bool) -> Statistics:
    """NaN where all shards are empty. listens: whether this replica does."""
    channels, count = x.size(1), x.numel() // max(1, x.size(1))
    rows = replicas.rows(_row(x, count, eps, listens))  # (R, 2 + 2 C)
    counts = rows[:, 0].to(torch.int32)
    agreed = (rows[:, 1] == 0).all() if listens else False  # who does not listen does not ask
    exact = rows.to(torch.float64, copy=True)
    if count > 1:
        # Equal rows have equal counts, so that all replicas come here, or the rows are not equal. A single value keeps
        # its count on each: its variance is zero, and N / (N - 1) would be infinite.
        exact[1:, 0].mul_((rows[1:] != rows[:1]).any())
    means, invstds = exact[:, 2:].split(channels, dim=1)
    mean, unbiased_var = exact.new_zeros(2, channels)
    _, invstd = torch.batch_norm_gather_stats_with_counts(
        exact, means, invstds, mean, unbiased_var, 1.0, eps, exact[:, 0]
    )
    found = rows.new_empty(3, channels)
    foreach_copy_(list(found), [mean, invstd, unbiased_var])
    return Statistics(found[0], None, found[1], found[2], counts, agreed)


def _row(x: Tensor, count: int, eps: float, listens: bool) -> Tensor:
    """(2 + 2 C,): count, whether this replica does not listen, mean, invstd."""
    dtype, device, channels = statistics_dtype(x), x.device, x.size(1)
    first, second = (count, int(not listens)) if count else (NO_EXAMPLES, 0)
    head = torch.linspace(first, second, 2, dtype=dtype, device=device)  # one launch, and nothing copied from the host
    if count:
        mean, invstd = torch.batch_norm_stats(_dense(x)[0], eps)
    else:
        mean, invstd = (torch.full((channels,), value, dtype=dtype, device=device) for value in (0.0, 1.0))
    return torch.cat((head, mean, invstd))


def normalised(x: Tensor, scale: Tensor | None, shift: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """(x - mean) · invstd · scale + shift. All but x are (C,), contiguous, in `statistics_dtype(x)`."""
    if not x.numel():
        return torch.empty_like(x)
    return torch.batch_norm_elemt(_dense(x)[0], scale, shift, mean, invstd, 0.0)  # which has eps in invstd


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    counts: Tensor,
    needs_dx: bool,
    replicas: Replicas,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(dx or None, Σ dy·x̂ or None without a weight, Σ dy), the sums over this replica's examples.

    counts: (R,) int32, how many values a channel of each replica has.
    """
    channels = x.size(1)
    if weight is not None:
        weight = weight.to(mean.dtype).contiguous()
    if x.numel():
        x, layout = _dense(x)
        dy = dy.contiguous(memory_format=layout)  # the kernels for channels last look at one of the two in old versions
        sum_dy, sum_dy_xmu, d_weight, _ = torch.batch_norm_backward_reduce(
            dy, x, mean, invstd, weight, True, weight is not None, False
        )
    else:
        sum_dy, sum_dy_xmu, d_weight = mean.new_zeros(3, channels)
    if not needs_dx:
        return None, d_weight, sum_dy
    total, total_xmu = replicas.sum(torch.cat((sum_dy, sum_dy_xmu))).split(channels)
    if not x.numel():
        return torch.empty_like(x), d_weight, sum_dy
    dx = torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, total, total_xmu, counts)
    return dx, d_weight, sum_dy


def _dense(x: Tensor) -> tuple[Tensor, torch.memory_format]:
    """x in a layout of the kernels, copied where it has another, and which layout that is."""
    channels_last = _CHANNELS_LAST.get(x.dim())
    if channels_last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=channels_last):
        return x, channels_last
    return x.contiguous(), torch.contiguous_format
