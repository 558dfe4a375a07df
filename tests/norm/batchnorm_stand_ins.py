"""Stand-ins on the CPU for the kernels of torch's SyncBatchNorm, which only CUDA has.

Each computes the kernel's formula on plain tensors, and asserts what the kernel checks or takes for granted of dtypes,
shapes and layouts (aten/src/ATen/native/cuda/Normalization.cu and .cuh). `in_place_of_the_kernels()` puts them in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.norm import batchnorm_kernels

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

calls: Counter[str] = Counter()  # of each kernel


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any) -> Any:
        calls[function.__name__] += 1
        with torch.no_grad():
            return function(*args)

    return called


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """In which a kernel on CUDA adds values of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_dense(x: Tensor) -> bool:
    last = _CHANNELS_LAST.get(x.dim())
    return x.is_contiguous() or (last is not None and x.is_contiguous(memory_format=last))


def _over(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _nd(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def _check_vectors(x: Tensor, *vectors: Tensor | None) -> None:
    for vector in vectors:
        if vector is not None:
            assert vector.shape == (x.size(1),)
            assert vector.is_contiguous()
            assert vector.dtype == accumulated(x.dtype)


@_kernel
def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    assert x.numel() > 0
    assert _is_dense(x), "else the kernel makes a copy"
    values = x.to(accumulated(x.dtype))
    var, mean = torch.var_mean(values, _over(x), correction=0)
    return mean, (var + eps).rsqrt()


@_kernel
def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    kind = x.dtype if running_mean is None else running_mean.dtype
    acc = accumulated(kind)
    replicas, channels = means.shape
    assert invstds.shape == means.shape
    assert counts.numel() >= replicas
    assert counts.dtype == kind
    assert means.dtype == invstds.dtype == acc
    avg, var_n, n = means.new_zeros(channels), means.new_zeros(channels), 0
    for mean, invstd, count in zip(means, invstds, counts.tolist(), strict=True):
        var = 1 / invstd
        factor = torch.tensor(1.0, dtype=acc) / torch.tensor(n + count, dtype=acc)
        var_n += (var * var - eps) * count + (avg - mean) * (avg - mean) * n * count * factor
        avg = n * factor * avg + count * factor * mean
        n = int(n + count)  # the kernel keeps it as a whole number
    if running_mean is not None:
        assert running_var is not None
        assert running_var.dtype == kind
        running_mean.copy_((1 - momentum) * running_mean + momentum * avg)
        running_var.copy_((1 - momentum) * running_var + momentum * (var_n / (n - 1 if n != 1 else 0.0)))
    return avg, 1 / (var_n / n + eps).sqrt() if n else avg * torch.nan


@_kernel
def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    assert x.numel() > 0
    assert _is_dense(x)
    _check_vectors(x, weight, bias, mean, invstd)
    y = (x.to(mean.dtype) - _nd(mean, x)) * _nd(invstd, x)
    if weight is not None:
        y = y * _nd(weight, x)
    if bias is not None:
        y = y + _nd(bias, x)
    return torch.empty_like(x).copy_(y)


def _check_gradient(dy: Tensor, x: Tensor) -> None:
    assert dy.dtype == x.dtype
    assert dy.shape == x.shape
    assert x.numel() > 0
    assert _is_dense(x)
    both = [torch.contiguous_format] + ([_CHANNELS_LAST[x.dim()]] if x.dim() in _CHANNELS_LAST else [])
    assert any(x.is_contiguous(memory_format=f) and dy.is_contiguous(memory_format=f) for f in both)


@_kernel
def batch_norm_backward_reduce(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, of_x: bool, of_weight: bool, of_b: bool
) -> tuple[Tensor | None, ...]:
    _check_gradient(dy, x)
    _check_vectors(x, mean, invstd, weight)
    assert weight is not None or not (of_weight or of_b), "the kernel takes dtype and device of the weight"
    dy = dy.to(mean.dtype)
    sum_dy, sum_dy_xmu = dy.sum(_over(x)), (dy * (x.to(mean.dtype) - _nd(mean, x))).sum(_over(x))
    return (
        sum_dy if of_x else None,
        sum_dy_xmu if of_x else None,
        sum_dy_xmu * invstd if of_weight else None,
        sum_dy.clone() if of_b else None,
    )


@_kernel
def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    _check_gradient(dy, x)
    _check_vectors(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert counts.dtype == torch.int32
    assert counts.is_contiguous()
    share = 1 / torch.tensor(counts.sum().item(), dtype=mean.dtype)
    scale = invstd if weight is None else weight * invstd
    slope = invstd * invstd * sum_dy_xmu * share
    dx = dy.to(mean.dtype) - _nd(sum_dy * share, x) - (x.to(mean.dtype) - _nd(mean, x)) * _nd(slope, x)
    return torch.empty_like(x).copy_(dx * _nd(scale, x))


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
NAMES = (
    "batch_norm_stats",
    "batch_norm_gather_stats_with_counts",
    "batch_norm_elemt",
    "batch_norm_backward_reduce",
    "batch_norm_backward_elemt",
)


@contextmanager
def in_place_of_the_kernels() -> Iterator[Counter[str]]:
    """Within the block batch norm computes on the CPU as on CUDA. Yields how often each kernel was called."""
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batchnorm_kernels, "apply_to", lambda x: True)
        for name, kernel in zip(NAMES, KERNELS, strict=True):
            patch.setattr(torch, name, kernel)
        yield calls


def reproducible_hashes() -> list[str]:
    """Of runs with reproducible=V, with fewer shards than examples and with more, some of which are empty."""
    from tests.reproducible.checks import STEPS, train

    with in_place_of_the_kernels():
        found = [train(("global", shards, "bf16", None), STEPS) for shards in (5, 16)]
        assert calls["batch_norm_gather_stats_with_counts"] > 0
    return found
