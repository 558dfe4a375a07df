"""Average the gradients of one DistributedOptimizer over all processes while the backward runs.

Phase 1: a hook on each parameter counts its backward passes. After the last pass, the gradient is ready.
Phase 2: a bucket of about 25 MB is sent when all its gradients are ready. Every process sends the buckets in the same
  order: bucket 1 waits for bucket 0. So gradients may become ready in different orders on different processes.
Phase 3: `synchronize` sends the remaining buckets, with zeros for missing gradients, waits, and writes the results into
  `.grad`.

The first step has no buckets yet. In it, `synchronize` compares names, shapes and dtypes over the processes, and makes
buckets in the order in which rank 0's gradients became ready. Layers that are unfrozen later get additional buckets.

After its gradients, a bucket contains for each parameter the number of processes with a gradient, and last the number
of processes that have not joined (`stand_in`). The numbers of a parameter are read only if this process has no gradient
for it. A parameter that no process's loss has reached keeps `.grad = None`, as on one process. (Horovod sets it to
zeros, so that momentum and weight decay change the parameter.)

Each reducer has a separate process group, because one process may send a bucket during the backward, and another
process may send it in `synchronize`, after an allreduce of the script.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm.group import ALONE, Group, Pending, buckets
from paceline.comm.mesh import new_group, world_group
from paceline.errors import UsageError
from paceline.horovod import named_operations
from paceline.horovod.hvd_collectives import form_of, sparse_sum
from paceline.horovod.hvd_world import Average, ReduceOp
from paceline.torch_private.core import foreach_copy_, foreach_mul_, version_of


class Reduction(NamedTuple):
    """How gradients are combined."""

    compression: Any  # a Compressor, or its class
    op: ReduceOp  # Average or Sum
    predivide: float  # divisor of the gradients before the sum
    sparse_as_dense: bool  # send sparse gradients as dense ones


class _Ready(NamedTuple):
    """A gradient after its last backward pass."""

    gradient: Tensor
    version: int  # torch's count of writes to the gradient so far


class _Sent(NamedTuple):
    """A bucket in flight."""

    parameters: Sequence[Tensor]
    contexts: list[Any]  # decompression context of each parameter
    shapes: list[torch.Size]  # of the compressed gradients
    pending: Pending


reducers: list[GradientReducer] = []  # in use, in order of creation
_numbers = itertools.count()


def close_all() -> None:
    """Release the reducers' process groups."""
    for reducer in list(reducers):
        reducer.close()


class GradientReducer:
    """Averages the gradients of one DistributedOptimizer.

    Args:
        groups: the optimizer's parameter groups.
        names: parameter -> name, for messages. Parameters without a name are identified by their position.
        reduction: how gradients are combined.
        passes: backward passes per step.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], reduction: Reduction, passes: int
    ) -> None:
        self.label = f"DistributedOptimizer {next(_numbers)}"
        self.reduction, self.passes = reduction, passes
        self._given = names
        self._names: dict[Tensor, str] = {}
        self._left: dict[Tensor, int] = {}  # remaining backward passes of each parameter
        self._ready: dict[Tensor, _Ready] = {}  # in the order in which gradients became ready
        self._hooks: list[Any] = []
        self._new: dict[Tensor, None] = {}  # parameters in no bucket yet
        self._buckets: list[list[Tensor]] = []
        self._sparse: list[Tensor] = []  # parameters in no bucket: the entries of their gradients are gathered
        self._sent: list[_Sent] = []
        self._ended = False
        self.add(groups)
        for former in list(reducers):
            if former._names.keys() & self._names.keys():  # the script has created a new optimizer for the same model
                former.close()
        reducers.append(self)

    def add(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add the parameters of these groups that are neither frozen nor added already."""
        for g, group in enumerate(groups):
            for n, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._names:
                    self._names[parameter] = self._given.get(parameter, f"group {g}, parameter {n}")
                    self._left[parameter] = self.passes
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
                    self._new[parameter] = None

    @cached_property
    def _group(self) -> Group:
        """The reducer's process group. It is created in `_lay_out`, which all processes call."""
        atexit.register(close_all)  # runs before process_group.leave, which was registered earlier
        return new_group()

    @property
    def under_way(self) -> bool:
        """Whether a backward pass has reached a parameter since the last `synchronize`."""
        return bool(self._ready or self._sent) or any(left < self.passes for left in self._left.values())

    def close(self) -> None:
        """Release the parameters and the process group."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._group, self._ended = ALONE, True
        if self in reducers:
            reducers.remove(self)

    # ---- phases 1 and 2: within the backward ----

    def _arrived(self, parameter: Tensor) -> None:
        left = self._left[parameter] - 1
        if left < 0:
            raise UsageError(
                f"{self._names[parameter]!r} has had more than {self.passes} backward passes since the last step. For "
                f"several passes per step, set backward_passes_per_step of DistributedOptimizer, and divide the loss "
                "by that number. If this is another model's loss (as in a GAN), freeze these parameters meanwhile "
                "(requires_grad_(False))."
            )
        self._left[parameter] = left
        if left == 0:
            assert parameter.grad is not None
            self._ready[parameter] = _Ready(parameter.grad, version_of(parameter.grad))
            self._send_ready()

    def _send_ready(self) -> None:
        while len(self._sent) < len(self._buckets) and all(p in self._ready for p in self._buckets[len(self._sent)]):
            self._send(self._buckets[len(self._sent)])

    @torch.no_grad()
    def _send(self, bucket: Sequence[Tensor], joined: bool = False) -> None:
        """Send a bucket. joined: this process has joined, and sends zeros."""
        parts, contexts, shapes = [], [], []
        has = [0.0 if joined or parameter.grad is None else 1.0 for parameter in bucket]
        for parameter, there in zip(bucket, has):
            gradient = parameter.grad if there else torch.zeros_like(parameter)
            assert gradient is not None
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            scaled = gradient if self.reduction.predivide == 1.0 else gradient / self.reduction.predivide
            small, context = self.reduction.compression.compress(scaled)
            parts.append(small.reshape(-1))
            contexts.append(context)
            shapes.append(small.shape)
        numbers = torch.tensor([*has, float(not joined)], dtype=parts[0].dtype)
        parts.append(numbers.to(parts[0].device, non_blocking=True))
        pending = self._group.all_reduce(torch.cat(parts), async_op=True)
        self._sent.append(_Sent(bucket, contexts, shapes, pending))

    # ---- phase 3 ----

    def synchronize(self) -> None:
        """Wait until the gradients are combined over all processes."""
        if self._ended:
            raise UsageError(
                f"{self.label} was replaced by a newer optimizer for the same parameters, or hvd was shut down. Use "
                "the newest DistributedOptimizer."
            )
        changed = self._changed()
        if world_group().size > 1:
            if self._new:
                self._lay_out()
            while len(self._sent) < len(self._buckets):
                self._send(self._buckets[len(self._sent)])
            for sent in self._sent:
                self._receive(sent)
            for parameter in self._sparse:
                self._add_sparse(parameter)
        self.reset()
        if changed is not None:  # only now, so that all processes have made the same calls
            raise UsageError(
                f"the gradient of {changed} after the backward, while it was being averaged over the processes. First "
                "call optimizer.synchronize(), then clip, unscale (GradScaler.unscale_) or clear, then `with "
                "optimizer.skip_synchronize(): optimizer.step()`."
            )

    def reset(self) -> None:
        """Prepare for the backward passes of the next step."""
        self._sent, self._ready = [], {}
        self._left = dict.fromkeys(self._left, self.passes)

    def _changed(self) -> str | None:
        """Describe a gradient that was modified after its last backward pass (the sent data is stale), or None."""
        for parameter, (gradient, version) in self._ready.items():
            if parameter.grad is not gradient:
                return f"{self._names[parameter]!r} was cleared or replaced"
            if version_of(gradient) != version:
                return f"{self._names[parameter]!r} was changed"
        return None

    @torch.no_grad()
    def _receive(self, sent: _Sent) -> None:
        """Wait for a bucket, and write the results into `.grad`."""
        flat = sent.pending.wait()
        *parts, holders, _ = flat.split([*(shape.numel() for shape in sent.shapes), len(sent.parameters), 1])
        missing = [n for n, parameter in enumerate(sent.parameters) if parameter.grad is None]
        unused = {n for n in missing if holders[n].item() == 0}  # the host waits for the device only here
        gradients, values = [], []
        for n, parameter in enumerate(sent.parameters):
            if n in unused:
                continue
            value = self.reduction.compression.decompress(parts[n].view(sent.shapes[n]), sent.contexts[n])
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            if parameter.grad.is_sparse:
                parameter.grad = (value * self._factor).to_sparse(parameter.grad.sparse_dim())
                continue
            gradients.append(parameter.grad)
            values.append(value)
        if gradients:
            foreach_copy_(gradients, values)
            if self._factor != 1.0:
                foreach_mul_(gradients, self._factor)

    @property
    def _factor(self) -> float:
        """The factor to multiply the received sums by."""
        mean = world_group().size if self.reduction.op is Average else 1
        return self.reduction.predivide / mean

    @torch.no_grad()
    def _add_sparse(self, parameter: Tensor) -> None:
        own = parameter.grad
        if own is None:
            own = torch.zeros_like(parameter).to_sparse(1)
        mean = world_group().size if self.reduction.op is Average else 1
        parameter.grad = sparse_sum(own, self._group) / mean

    # ---- for a process that has joined ----

    def stand_in(self) -> None:
        """Contribute zeros to the steps of the other processes, until all processes have joined."""
        active = bool(self._buckets)
        while active:
            for bucket in self._buckets:
                self._send(bucket, joined=True)
            sums = [sent.pending.wait() for sent in self._sent]
            active = sums[0][-1].item() > 0
            self._sent = []

    @property
    def gathers(self) -> bool:
        """Whether some gradients are sparse, which `stand_in` does not support."""
        return bool(self._sparse)

    # ---- the first step ----

    def _lay_out(self) -> None:
        """Compare the new parameters over the processes, and make buckets of them."""
        # First the parameters in the order in which their gradients became ready. Then the parameters without a
        # gradient, the last layer first.
        order = [p for p in dict.fromkeys([*self._ready, *reversed(self._new)]) if p in self._new]
        own = [(self._names[p], p.grad is not None and p.grad.is_sparse) for p in order]
        everyone = named_operations.call(
            "first step of",
            self.label,
            sorted(f"{self._names[p]!r}, {form_of(p)}" for p in order),
            lambda: (self._group, world_group().gather(own))[1],
            None,
            "Build the model, and freeze its layers, in the same way on every process.",
        )
        by_name = {name: p for p, name in self._names.items()}
        sparse = {name for items in everyone for name, is_sparse in items if is_sparse}
        if self.reduction.sparse_as_dense:
            sparse.clear()
        ordered = [by_name[name] for name, _ in everyone[0]]
        self._sparse += [p for p in ordered if self._names[p] in sparse]
        dense = [p for p in ordered if self._names[p] not in sparse]
        self._buckets += [[dense[position] for position in chosen] for chosen in buckets(dense)]
        self._new.clear()
