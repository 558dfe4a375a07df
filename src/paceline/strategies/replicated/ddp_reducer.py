"""torch's C++ reducer, armed by ddp.py at the root of a backward instead of in a model's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.mesh import world_group
from paceline.errors import ModelError
from paceline.strategies.kit.named_parameters import parameter_names
from paceline.strategies.replicated.ddp_hook import Reduction
from paceline.torch_private import reducer
from paceline.torch_private.core import TENSOR_HOOKS


def accumulate(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate these gradients (None: zeros) in this order, as a backward would. The user's hooks do not run: they
    have already run, or must not run."""
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = None
        with _without_hooks(p):
            torch.autograd.backward(p, torch.zeros_like(p) if gradient is None else gradient)


@contextmanager
def _without_hooks(parameter: Tensor) -> Iterator[None]:
    """Empty the dictionaries that hold a tensor's hooks, and refill them afterwards."""
    kept = []
    for name in TENSOR_HOOKS:
        hooks = getattr(parameter, name, None)
        if hooks:
            kept.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)


class _AllModels(nn.Module):
    """All prepared models as one module, which DistributedDataParallel needs."""

    def __init__(self, models: Sequence[nn.Module], reduced: set[Tensor]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        ignored = [name for name, p in self.named_parameters() if p not in reduced]
        reducer.ignore(self, ignored + [name for name, _ in self.named_buffers()])


class BucketReducer:
    """torch's C++ reducer for some parameters, in the order in which their gradients arrive. Make it outside of a
    backward."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        ready: Sequence[Tensor],
        others: Sequence[Tensor],
        reduction: Reduction | None,
        *,
        used: tuple[bool, ...],
        bucket_mb: float,
        views: bool,
        static_graph: bool,
    ) -> None:
        """ready: the parameters to reduce, in order. others: all other trainable parameters. reduction: sums a bucket
        in place of torch's all-reduce and division by the number of replicas. used: for each trainable parameter,
        whether it is in `ready`."""
        self.first, self._parameters, self.others, self.used = ready[0], ready, others, used
        kept = [p.grad for p in ready]
        _check_sparse(models, ready, reduction)
        for p in ready:  # otherwise a reducer with views would turn these gradients into views of its buckets at once
            p.grad = None
        self._ddp = DistributedDataParallel(
            _AllModels(models, set(ready)),
            **reducer.NO_BUFFERS,
            init_sync=False,
            **reducer.bucket_sizes(bucket_mb),
            gradient_as_bucket_view=views,
            static_graph=static_graph,
        )
        if reduction is not None:
            reduction.idle = True
            self._ddp.register_comm_hook(reduction, Reduction.start)
        self.arm: tuple[Callable[[], None], ...] = reducer.arming(self._ddp.reducer)
        """Call each in turn at the root of a backward: from then on a gradient that is ready counts towards its
        bucket."""
        self.check: Callable[[], None] = partial(reducer.check_finalized, self._ddp.reducer)
        """Call it after a backward: raises RuntimeError if an expected gradient is missing."""
        # A reducer records the order of gradients in its first backward, and then rebuilds its buckets. So run a
        # backward with zeros. With a static graph, an earlier backward records the graph, and reduces at its end.
        zeros = [_zeros(p, gradient) for p, gradient in zip(ready, kept, strict=True)]
        if static_graph:
            self._arm()
            accumulate(ready, zeros)
            reducer.delay_all_reduce(self._ddp.reducer)
        self._arm()
        accumulate(ready, zeros)
        reducer.rebuild_buckets(self._ddp.reducer)
        for p, gradient in zip(ready, kept, strict=True):
            p.grad = gradient
        if reduction is not None:
            reduction.idle = False

    def reduce(self) -> None:
        """Sum the gradients of a backward that ran unarmed. A parameter without a gradient adds zeros."""
        self._arm()
        accumulate(self._parameters, [p.grad for p in self._parameters])

    def _arm(self) -> None:
        for arm in self.arm:
            arm()

    def close(self) -> None:
        reducer.remove_hooks(self._ddp.reducer)
        # The C++ reducer holds the process group, and the group's threads must end before the interpreter does. Release
        # the group now, not when the garbage collector reaches the reference cycle of DistributedDataParallel.
        self.arm, self.check = (), lambda: None
        for name in ("reducer", "logger", "process_group"):
            setattr(self._ddp, name, None)


def _check_sparse(models: Sequence[nn.Module], parameters: Sequence[Tensor], reduction: Reduction | None) -> None:
    """Raises ModelError for a sparse gradient that cannot be reduced."""
    for p in parameters:
        if p.grad is None or not p.grad.is_sparse:
            continue
        what = f"strategy ddp: {parameter_names(models)[p]} has a sparse gradient (nn.Embedding(sparse=True)), which"
        if not world_group().adds_sparse(p.device):
            raise ModelError(
                f"{what} NCCL cannot add, and NCCL adds the gradients on {p.device}. Make the layer with sparse=False, "
                "or train on CPUs (device='cpu')."
            )
        if reduction is not None and not reduction.takes_sparse:
            raise ModelError(
                f"{what} this reducer or codec cannot add. Use strategy='ddp' without reducer and codec, or "
                "sparse=False."
            )


def _zeros(parameter: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is not None and gradient.is_sparse:
        return torch.zeros_like(parameter).to_sparse(1)
    return torch.zeros_like(parameter)
