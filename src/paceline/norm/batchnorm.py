"""Batch norm over all replicas: the same statistics as on one device, for any split of the batch.

`convert(model)` changes the class of each batch norm in the model. Modules and parameters stay the same objects. In
training the forward of a layer has three phases. Only the second communicates:

1. Each replica computes count, mean and M2 (the sum of squared distances from that mean) of its examples. These, and a
   number for biases.py, are its row.
2. One sum over the replicas gives every replica all rows: each replica adds a table that is zero except for its row.
3. Each replica combines the rows in the same way, in float64 (Chan, Golub, LeVeque 1979, "Updating formulae and a
   pairwise algorithm for computing sample variances", for any number of parts):

    N = Σ n_r        mean = Σ (n_r / N) mean_r        var = Σ M2_r / N + Σ (n_r / N) (mean_r - mean)²

Running variances are unbiased: var · N / (N - 1). If all replicas have the same examples, such as a generator's images
of fixed noise, their rows have the same bits. These examples count once: N in that factor is then the count of one
replica.

No large numbers are subtracted, so this is as stable as two passes over the whole batch. A replica with an empty shard
takes part with a row of zeros. The backward sums one vector, [Σ dy, Σ dy·x̂], over the replicas. Gradients of weight and
bias cover this replica's examples, as in any other layer.

On CUDA, where the number of launches matters most, torch's kernels compute all of this except second derivatives
(batchnorm_kernels.py). Under torch.compile each layer breaks the graph: its exchange cannot be traced.

Legend for shapes: N values per channel (examples times pixels) over all replicas, R replicas, C channels; x is
(n, C, ...).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.comm.group import Replicas
from paceline.comm.mesh import group_of, replicas_here, world_group
from paceline.comm.replicas import CrossesReplicas, differentiable_sum
from paceline.errors import ModelError
from paceline.norm import batchnorm_kernels, biases
from paceline.norm.batchnorm_kernels import Statistics, statistics_dtype
from paceline.step.messages import ONE_VALUE, one_value_message
from paceline.torch_private.core import BatchNormBase


def _other_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(vector: Tensor, x: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, ...), to broadcast with x."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift per channel, in one pass: torch's kernel for a batch norm in eval mode."""
    zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
    # F.batch_norm refuses eps=0 in torch 2.11.
    return torch.batch_norm(x, scale, shift, zeros, ones, False, 0.0, 0.0, torch.backends.cudnn.enabled)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean (C,) and M2 (C,) of this replica's examples. There must be at least one example."""
    dtype = statistics_dtype(x)
    count = x.numel() // x.size(1)
    long_rows = x.dim() > 2 and x.is_contiguous() and x.dtype == dtype
    if x.device.type == "cpu" and not long_rows:
        scratch = torch.ones(2, x.size(1), dtype=dtype, device=x.device)
        mean, var = torch.batch_norm_update_stats(x, scratch[0], scratch[1], 0.0)
        return mean, var * count
    # On the CPU, two passes of vectorised kernels take a quarter of the time of torch's single pass over long rows.
    mean = x.sum(_other_dims(x), dtype=dtype) / count
    centred = _affine(x.to(dtype), torch.ones_like(mean), -mean)
    return mean, centred.square_().sum(_other_dims(x))


def _global_statistics(x: Tensor, eps: float, replicas: Replicas, listens: bool) -> Statistics:
    """Compute the statistics over all replicas' examples; NaN if all shards are empty.

    listens: whether x is the output of a converted layer with a bias (biases.py).
    """
    channels = x.size(1)
    exact = torch.float32 if x.device.type == "mps" else torch.float64
    if x.numel() > 0:
        head = [torch.full((1,), n, dtype=exact, device=x.device) for n in (x.numel() // channels, 1 - listens)]
        row = torch.cat((*head, *_moments(x)))
    else:
        row = torch.zeros(2 + 2 * channels, dtype=exact, device=x.device)
    rows = replicas.rows(row)
    counts, not_listening, means, m2s = rows.split((1, 1, channels, channels), dim=1)
    count = counts.sum()
    shares = counts / count  # (R, 1)
    mean = (shares * means).sum(0)
    var = torch.addcmul(m2s / count, shares, (means - mean).square()).sum(0)
    dtype = statistics_dtype(x)
    mean, var, once = mean.to(dtype), var.to(dtype), _distinct(rows, count).to(dtype)
    agreed = not_listening.sum() == 0 if listens else False  # only a replica that listens needs it
    return Statistics(mean, var, (var + eps).rsqrt(), var * (once / (once - 1)), count.to(dtype), agreed)


def _distinct(rows: Tensor, count: Tensor) -> Tensor:
    """Return N for the unbiased variance, (): `count`, or one replica's count if all rows have the same bits.

    If each replica has the same single value, N is `count`, since N / (N - 1) would be infinite for N = 1.
    """
    first = rows[0, 0]
    if rows.device.type == "cpu":
        same = torch.equal(rows[0], rows[1]) and torch.equal(rows[1:], rows[:-1]) and first.item() > 1
        return first if same else count
    return torch.where((rows == rows[:1]).all() & (first > 1), first, count)  # branching would wait for the device


class _MeanAndInvstd(torch.autograd.Function):
    """Returns the given (mean, invstd) over all replicas as functions of x. Differentiable any number of times.

    dmean/dx_i = 1/N and dinvstd/dx_i = -invstd³ (x_i - mean) / N. The backward sums the gradients of mean and invstd
    over all replicas. It uses differentiable operations on x and on the outputs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, invstd: Tensor, count: Tensor, replicas: Replicas
    ) -> tuple[Tensor, Tensor]:
        mean, invstd = mean.clone(), invstd.clone()
        ctx.save_for_backward(x, mean, invstd, count)
        ctx.replicas = replicas
        return mean, invstd

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, count = ctx.saved_tensors
        d_mean, d_invstd = differentiable_sum(torch.stack(gradients), ctx.replicas).unbind()
        centred = x.to(mean.dtype) - _per_channel(mean, x)
        slope = d_invstd * invstd**3
        dx = (_per_channel(d_mean, x) - _per_channel(slope, x) * centred) / count
        return dx.to(x.dtype), None, None, None, None


class _Normalise(torch.autograd.Function):
    """y = (x - mean) · invstd · weight + bias. mean and invstd are functions of all replicas' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor | None,
        invstd: Tensor,
        count: Tensor,
        eps: float,
        replicas: Replicas,
    ) -> Tensor:
        dtype = statistics_dtype(x)
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.fused = _fused_backward if var is not None else batchnorm_kernels.backward
        # Saved because on CUDA the backward runs in an autograd thread, where replicas_here() finds none.
        ctx.replicas = replicas
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        if var is None:
            return batchnorm_kernels.normalised(x, scale, shift, mean, invstd)
        return F.batch_norm(x, mean, var, scale, shift, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, count = ctx.saved_tensors
        backward = _differentiable_backward if torch.is_grad_enabled() else ctx.fused
        dx, d_weight, d_bias = backward(
            gradients[0], x, weight, mean, invstd, count, ctx.needs_input_grad[0], ctx.replicas
        )
        return (
            dx if dx is None else dx.to(x.dtype),
            d_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            d_bias.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 6,
        )


def _fused_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    count: Tensor,
    needs_dx: bool,
    replicas: Replicas,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return (dx or None, Σ dy·x̂, Σ dy), with sums over this replica's examples. Makes two passes over x and dy.

    dx = invstd · weight · (dy - Σdy/N - x̂ Σ(dy·x̂)/N), with sums over all replicas: Ioffe and Szegedy 2015, section 3.
    """
    if x.numel() > 0:
        # Do not request the kernel's dx: it would use the sums of this replica only. Only dx would need the weight.
        any_weight = invstd
        _, d_weight, d_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, any_weight, None, None, mean, invstd, True, 0.0, [False, True, True]
        )
    else:
        d_weight, d_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    if not needs_dx:
        return None, d_weight, d_bias
    mean_dy, mean_dy_xhat = (replicas.sum(torch.stack((d_bias, d_weight))) / count).unbind()
    scale = invstd if weight is None else invstd * weight
    slope = -scale * mean_dy_xhat * invstd
    dx = _affine(x.to(mean.dtype), slope, -scale * mean_dy - slope * mean)
    return dx.addcmul_(dy, _per_channel(scale, x)), d_weight, d_bias


def _differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    count: Tensor,
    needs_dx: bool,
    replicas: Replicas,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`_fused_backward` in differentiable operations, for a gradient penalty (create_graph=True)."""
    count = count.sum()  # the CUDA kernels have one count per replica
    mean, invstd = _MeanAndInvstd.apply(x, mean, invstd, count, replicas)
    dy = dy.to(mean.dtype)
    xhat = (x.to(mean.dtype) - _per_channel(mean, x)) * _per_channel(invstd, x)
    d_bias, d_weight = dy.sum(_other_dims(x)), (dy * xhat).sum(_other_dims(x))
    if not needs_dx:
        return None, d_weight, d_bias
    mean_dy, mean_dy_xhat = (differentiable_sum(torch.stack((d_bias, d_weight)), replicas) / count).unbind()
    scale = invstd if weight is None else invstd * weight
    dx = _per_channel(scale, x) * (dy - _per_channel(mean_dy, x) - xhat * _per_channel(mean_dy_xhat, x))
    return dx, d_weight, d_bias


class _Global(CrossesReplicas, BatchNormBase):
    """The base class of converted batch norms. torch's forward runs if there is a single replica, or if the layer uses
    running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        of_this_batch = self.training or (self.running_mean is None and self.running_var is None)
        replicas = replicas_here() if of_this_batch else None
        if replicas is None or replicas.size == 1:
            return BatchNormBase.forward(self, biases.listen(input) if of_this_batch else input)
        self._check_input_dim(input)
        from paceline.norm import uncompiled  # here, since the import takes a second (see its docstring)

        return uncompiled.call(self._normalise, input, replicas)

    def _normalise(self, input: Tensor, replicas: Replicas) -> Tensor:
        if input.size(1) != self.num_features and (self.affine or self.track_running_stats):
            raise ModelError(
                f"{type(self).__name__} was made for {self.num_features} channels, but its input of shape "
                f"{tuple(input.shape)} has {input.size(1)}. Set num_features={input.size(1)}."
            )
        listens = biases.is_biased_output(input)
        statistics = batchnorm_kernels.statistics if batchnorm_kernels.apply_to(input) else _global_statistics
        with torch.no_grad():
            found = statistics(input, self.eps, replicas, listens)
            known = int(found.counts.sum()) if _reads_count(input) else 2
            if known == 1:
                raise ValueError(
                    f"{ONE_VALUE}, got input size {input.size()} on this replica and 1 value per channel over all "
                    f"{replicas.size} replicas. {one_value_message(1, 1)}"
                )
            if known > 1:
                self._update_running_statistics(found.mean, found.unbiased_var)
        if known == 0:
            return BatchNormBase.forward(self, input)  # all shards are empty: nothing to sum, now or in the backward
        input = biases.listen(input, found.agreed)
        moments = found.mean, found.var, found.invstd, found.counts
        return _Normalise.apply(input, self.weight, self.bias, *moments, self.eps, replicas)

    def _update_running_statistics(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if not (self.training and self.track_running_stats):
            return
        factor: float | Tensor | None = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if factor is None:  # the mean over all batches
                number = self.num_batches_tracked
                factor = 1.0 / float(number) if number.device.type == "cpu" else _one_over(number)
        factor = 0.0 if factor is None else factor
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            if running is not None:
                _move(running, value, factor)


def _reads_count(x: Tensor) -> bool:
    """Whether this replica reads the number of values per channel over all replicas: several, one (an error), or none.

    A replica with several values does not need to read it. On an accelerator, reading waits for the device, so only a
    replica with an empty shard reads it, for example in the short last batch of an epoch. If there is only one value,
    the other shards are empty: their replicas read the number and raise, which ends the run.
    """
    few = x.numel() <= x.size(1)
    return few and (x.device.type == "cpu" or x.numel() == 0)


def _move(running: Tensor, value: Tensor, factor: float | Tensor) -> None:
    """Move a running statistic towards the value: running += factor · (value - running)."""
    running.lerp_(value.to(running.dtype), factor.to(running.dtype) if isinstance(factor, Tensor) else factor)


def _one_over(number: Tensor) -> Tensor:
    """Return 1 / number as a tensor (), since reading the number on the host would wait for the device."""
    return number.to(torch.float32 if number.device.type == "mps" else torch.float64).reciprocal()


class GlobalBatchNorm1d(_Global, nn.BatchNorm1d):
    """nn.BatchNorm1d with statistics over all replicas' examples."""


class GlobalBatchNorm2d(_Global, nn.BatchNorm2d):
    """nn.BatchNorm2d with statistics over all replicas' examples."""


class GlobalBatchNorm3d(_Global, nn.BatchNorm3d):
    """nn.BatchNorm3d with statistics over all replicas' examples."""


class GlobalSyncBatchNorm(_Global):
    """The converted class for nn.SyncBatchNorm. It is not a subclass, since DDP refuses nn.SyncBatchNorm on CPUs."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: GlobalBatchNorm1d,
    nn.BatchNorm2d: GlobalBatchNorm2d,
    nn.BatchNorm3d: GlobalBatchNorm3d,
    nn.SyncBatchNorm: GlobalSyncBatchNorm,
}


def _class_for(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the converted class for a batch norm class. For a user's subclass, the first call creates it."""
    if kind not in _CLASSES:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            return _blank, (kind,), *_Global.__reduce_ex__(self, protocol)[2:]

        _CLASSES[kind] = type(f"Global{kind.__name__}", (_Global, kind), {"__reduce_ex__": reduce})
    return _CLASSES[kind]


def _blank(kind: type[nn.Module]) -> nn.Module:
    """Make an object of the converted class for `kind`, without its state. pickle and deepcopy call it, since they
    cannot import a class that was created at run time."""
    made = _class_for(kind)
    return made.__new__(made)


def convert(model: nn.Module) -> int:
    """Make every batch norm in the model compute its statistics over all replicas. Returns the number of changed norms.

    The class of these modules changes in place, from nn.BatchNorm2d to GlobalBatchNorm2d and so on. A second call
    changes nothing. Raises ModelError, and changes nothing, if a batch norm cannot be converted.
    """
    found = [module for path, module in model.named_modules() if _can_convert(path or "(the model itself)", module)]
    for module in found:
        module.__class__ = _class_for(type(module))
    return len(found)


def _can_convert(path: str, module: nn.Module) -> bool:
    """Whether this is a batch norm to convert. Raises ModelError for a batch norm that cannot be converted."""
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        if "BatchNorm" in module.original_name:
            raise _refusal(path, module.original_name, "is a compiled TorchScript module", "Prepare it unscripted")
        return False
    if not isinstance(module, BatchNormBase) or isinstance(module, _Global):
        return False
    if isinstance(module, LazyModuleMixin):
        raise _refusal(path, kind.__name__, "has no channels yet", "Run the model once on an example before prepare")
    custom_forward = kind.forward is not BatchNormBase.forward and kind is not nn.SyncBatchNorm
    if custom_forward or "forward" in vars(module):
        raise _refusal(path, kind.__name__, "has a custom forward", "Use torch.nn's batch norm")
    bound = getattr(module, "process_group", None) if isinstance(module, nn.SyncBatchNorm) else None
    if bound is not None and (size := group_of(bound).size) != world_group().size:
        remedy = "Make it without process_group"
        raise _refusal(path, kind.__name__, f"is bound to a group of {size} ranks", remedy)
    return True


def _refusal(path: str, kind: str, why: str, remedy: str) -> ModelError:
    return ModelError(
        f"Batch norm {path} ({kind}) {why}, so its statistics cannot be computed over the global batch. {remedy}, or "
        "set batch_norm='shard': each shard then has separate statistics, and the model depends on the number of "
        "shards."
    )
