"""Batch norm over all replicas on CUDA, with the kernels of torch's SyncBatchNorm, without waiting for the device.

The forward:

1. batch_norm_stats computes the mean and 1 / sqrt(var + eps) of this replica's examples. With their count, and a number
   for biases.py, they form the replica's row.
2. Every replica gets all rows (Replicas.rows).
3. batch_norm_gather_stats_with_counts combines the rows in replica order, and batch_norm_elemt normalises.

The backward runs batch_norm_backward_reduce, one sum over the replicas, and batch_norm_backward_elemt. Second
derivatives are computed in batchnorm.py, as on other devices.

SyncBatchNorm computes phase 3 in float32, which rounds once per replica. By the kernel's formula, the error of the mean
is then about 4 times the rounding error of float32 with 8 replicas, and 13 times with 64. Here the same kernel gets the
rows in float64, and the result is rounded once for any number of replicas. This takes 5 more small launches: they
convert the rows to float64 and the results to float32, and update running statistics outside the kernel. Two more
differences:

- SyncBatchNorm removes the rows of empty shards, and waits for the device to do so. Here the row of an empty shard has
  a count that is too small to change the result (NO_EXAMPLES).
- Examples that are the same on all replicas count once in running variances (batchnorm.py). All rows are then equal,
  and every row but the first gets a count of zero.

A layer takes 16 launches in the forward and 5 in the backward. Both numbers include one exchange. Setting the gradient
of the preceding layer's bias to zero (biases.py) takes two more. SyncBatchNorm takes about 12 launches, plus the
launches that remove empty shards.

A reproducible run has one row for each of its V shards, whichever process computes the shard. The kernel combines the
rows in shard order, so the statistics have the same bits on any number of processes.

Legend for shapes: R replicas, C channels; x is (n, C, ...).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import Replicas
from paceline.torch_private.core import foreach_copy_

NO_EXAMPLES = 1e-30
"""The count in an empty shard's row. The kernel divides by the sum of the counts so far: with a count of 0, this would
be 0 / 0 if the first shards are empty. The kernel stores that sum as an integer, so this count adds nothing to it."""

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory format, by the number of dimensions."""


class Statistics(NamedTuple):
    """Statistics over the examples of all replicas, in float32 or float64."""

    mean: Tensor  # (C,)
    var: Tensor | None  # (C,), biased; None from the CUDA kernels
    invstd: Tensor  # (C,), 1 / sqrt(var + eps)
    unbiased_var: Tensor  # (C,); examples that are the same on all replicas count once
    counts: Tensor  # values per channel: () over all replicas; from the CUDA kernels (R,) int32, per replica
    agreed: bool | Tensor  # (), do all replicas that have examples listen? (biases.py)


def apply_to(x: Tensor) -> bool:
    """Whether these kernels support this tensor."""
    return x.is_cuda


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics, at least float32: bf16 and fp16 inputs have float32 statistics, as in torch."""
    return torch.promote_types(x.dtype, torch.float32)


def statistics(x: Tensor, eps: float, replicas: Replicas, listens: bool) -> Statistics:
    """Compute the statistics over all replicas' examples; NaN if all shards are empty.

    listens: whether x is the output of a converted layer with a bias (biases.py).
    """
    channels, count = x.size(1), x.numel() // max(1, x.size(1))
    rows = replicas.rows(_row(x, count, eps, listens))  # (R, 2 + 2 C)
    counts = rows[:, 0].to(torch.int32)
    agreed = (rows[:, 1] == 0).all() if listens else False  # only a replica that listens needs it
    exact = rows.to(torch.float64, copy=True)
    if count > 1:
        # If all rows are equal, all replicas have this count and run this line. If not, the line changes nothing.
        # If each replica has a single value, the counts stay: with N = 1, N / (N - 1) would be infinite.
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
    """Return this replica's row, (2 + 2 C,): count, 1 if it does not listen (else 0), mean, invstd."""
    dtype, device, channels = statistics_dtype(x), x.device, x.size(1)
    first, second = (count, int(not listens)) if count else (NO_EXAMPLES, 0)
    head = torch.linspace(first, second, 2, dtype=dtype, device=device)  # one launch, without a copy from the host
    if count:
        mean, invstd = torch.batch_norm_stats(_dense(x)[0], eps)
    else:
        mean, invstd = (torch.full((channels,), value, dtype=dtype, device=device) for value in (0.0, 1.0))
    return torch.cat((head, mean, invstd))


def normalised(x: Tensor, scale: Tensor | None, shift: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """Return (x - mean) · invstd · scale + shift. All but x are (C,), contiguous, in `statistics_dtype(x)`."""
    if not x.numel():
        return torch.empty_like(x)
    return torch.batch_norm_elemt(_dense(x)[0], scale, shift, mean, invstd, 0.0)  # invstd includes eps


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
    """Return (dx or None, Σ dy·x̂ or None without a weight, Σ dy), with sums over this replica's examples.

    counts: (R,) int32, the number of values per channel on each replica.
    """
    channels = x.size(1)
    if weight is not None:
        weight = weight.to(mean.dtype).contiguous()
    if x.numel():
        x, layout = _dense(x)
        dy = dy.contiguous(memory_format=layout)  # old channels-last kernels check the layout of only one of the two
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
    """Return (x, its layout), or (a contiguous copy of x, its layout) if the kernels do not support the layout of x."""
    channels_last = _CHANNELS_LAST.get(x.dim())
    if channels_last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=channels_last):
        return x, channels_last
    return x.contiguous(), torch.contiguous_format
