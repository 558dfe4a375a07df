"""Gradients of one DistributedOptimizer, averaged over all processes while the backward runs.

Phase 1: a hook on each parameter counts its backward passes. With the last one its gradient is ready.
Phase 2: buckets of about 25 MB are sent when all their gradients are ready, always in the same order: bucket 1 waits
  for bucket 0, on every process. So the order in which gradients come may differ over the processes.
Phase 3: `synchronize` sends the buckets that are left, zeros in place of gradients that this process does not have,
  waits, and writes the results into `.grad`.

The first step has no buckets yet: `synchronize` compares names, shapes and dtypes over the processes, and lays the
buckets out by the order in which rank 0's gradients came. Layers that are unfrozen later get buckets behind these.

Each bucket ends in one number for each parameter, how many processes have a gradient of it, and in how many processes
have not joined (`stand_in`). A parameter that nobody's loss has reached keeps `.grad = None`, as on one process.
(Horovod gives it zeros, which momentum and weight decay then act on.) These numbers are looked at only where this
process has no gradient itself.

A reducer has a process group of its own: on one process a bucket may be sent during the backward, and on another in
`synchronize`, after an allreduce of the script's.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.comm.collectives import Pending
from paceline.comm.mesh import ALONE, Group
from paceline.errors import UsageError
from paceline.horovod import named_operations
from paceline.horovod.hvd_collectives import form_of, sparse_sum
from paceline.horovod.hvd_world import Average, ReduceOp
from paceline.torch_private.core import foreach_copy_, foreach_mul_, version_of


class Reduction(NamedTuple):
    """How gradients are combined."""

    compression: Any  # a Compressor, or its class
    op: ReduceOp  # Average or Sum
    predivide: float  # what gradients are divided by before the sum
    sparse_as_dense: bool  # sparse gradients travel as dense ones


class _Ready(NamedTuple):
    """A gradient after its last backward pass."""

    gradient: Tensor
    version: int  # how often it was written to until then


class _Sent(NamedTuple):
    """A bucket under way."""

    parameters: Sequence[Tensor]
    contexts: list[Any]  # what decompression needs, for each parameter
    shapes: list[torch.Size]  # of the compressed gradients
    pending: Pending


reducers: list[GradientReducer] = []  # those in use, in the order in which they were made
_numbers = itertools.count()


def close_all() -> None:
    """Lets go of the reducers' process groups."""
    for reducer in list(reducers):
        reducer.close()


class GradientReducer:
    """One for each DistributedOptimizer.

    Args:
        groups: the optimizer's parameter groups.
        names: of its parameters, for messages; without one a parameter is called by its position.
        reduction: how gradients are combined.
        passes: backward passes before a step.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], reduction: Reduction, passes: int
    ) -> None:
        self.label = f"DistributedOptimizer {next(_numbers)}"
        self.reduction, self.passes = reduction, passes
        self._given = names
        self._names: dict[Tensor, str] = {}
        self._left: dict[Tensor, int] = {}  # backward passes that a parameter still waits for
        self._ready: dict[Tensor, _Ready] = {}  # in the order in which gradients came
        self._hooks: list[Any] = []
        self._new: dict[Tensor, None] = {}  # in no bucket yet
        self._buckets: list[list[Tensor]] = []
        self._sparse: list[Tensor] = []  # in no bucket: their entries are gathered
        self._sent: list[_Sent] = []
        self._ended = False
        self.add(groups)
        for former in list(reducers):
            if former._names.keys() & self._names.keys():  # the script has made a new optimizer for the same model
                former.close()
        reducers.append(self)

    def add(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take charge of the parameters of these groups that are not frozen, where that is not done."""
        for g, group in enumerate(groups):
            for n, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._names:
                    self._names[parameter] = self._given.get(parameter, f"group {g}, parameter {n}")
                    self._left[parameter] = self.passes
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
                    self._new[parameter] = None

    @cached_property
    def _group(self) -> Group:
        """The reducer's own. It is made in `_lay_out`, to which all processes come."""
        atexit.register(close_all)  # it runs before process_group.leave, which was registered earlier
        return collectives.separate_group()

    @property
    def under_way(self) -> bool:
        """Has a backward pass come, that was not waited for?"""
        return bool(self._ready or self._sent) or any(left < self.passes for left in self._left.values())

    def close(self) -> None:
        """Lets go of parameters and process group."""
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
                f"several passes a step give DistributedOptimizer backward_passes_per_step, and divide the loss by "
                "that number. If this is another model's loss (a GAN's), freeze these parameters meanwhile "
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
    def _send(self, bucket: Sequence[Tensor], absent: bool = False) -> None:
        """absent: this process takes part with zeros, and has no gradients."""
        parts, contexts, shapes = [], [], []
        has = [0.0 if absent or parameter.grad is None else 1.0 for parameter in bucket]
        for parameter, there in zip(bucket, has):
            gradient = parameter.grad if there else torch.zeros_like(parameter)
            assert gradient is not None
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            scaled = gradient if self.reduction.predivide == 1.0 else gradient / self.reduction.predivide
            small, context = self.reduction.compression.compress(scaled)
            parts.append(small.reshape(-1))
            contexts.append(context)
            shapes.append(small.shape)
        numbers = torch.tensor([*has, float(not absent)], dtype=parts[0].dtype)
        parts.append(numbers.to(parts[0].device, non_blocking=True))
        pending = collectives.all_reduce(torch.cat(parts), group=self._group, async_op=True)
        self._sent.append(_Sent(bucket, contexts, shapes, pending))

    # ---- phase 3 ----

    def synchronize(self) -> None:
        """Gradients are those of all processes when it returns."""
        if self._ended:
            raise UsageError(
                f"{self.label} was replaced by a newer one for the same parameters, or hvd's world has ended. Step "
                "with the newest DistributedOptimizer."
            )
        changed = self._changed()
        if collectives.size_of() > 1:
            if self._new:
                self._lay_out()
            while len(self._sent) < len(self._buckets):
                self._send(self._buckets[len(self._sent)])
            for sent in self._sent:
                self._receive(sent)
            for parameter in self._sparse:
                self._add_sparse(parameter)
        self.reset()
        if changed is not None:  # only now, so that the processes stay in step
            raise UsageError(
                f"the gradient of {changed} after the backward, while it was being averaged over the processes. First "
                "call optimizer.synchronize(); then clip, unscale (GradScaler.unscale_) or clear; then `with "
                "optimizer.skip_synchronize(): optimizer.step()`."
            )

    def reset(self) -> None:
        """Wait for the backward passes of the next step."""
        self._sent, self._ready = [], {}
        self._left = dict.fromkeys(self._left, self.passes)

    def _changed(self) -> str | None:
        """Which gradient was written to after its last backward pass, if one was: what was sent lacks that."""
        for parameter, (gradient, version) in self._ready.items():
            if parameter.grad is not gradient:
                return f"{self._names[parameter]!r} was cleared or replaced"
            if version_of(gradient) != version:
                return f"{self._names[parameter]!r} was changed"
        return None

    @torch.no_grad()
    def _receive(self, sent: _Sent) -> None:
        """The bucket's sums into `.grad`."""
        flat = sent.pending.wait()
        *parts, holders, _ = flat.split([*(shape.numel() for shape in sent.shapes), len(sent.parameters), 1])
        missing = [n for n, parameter in enumerate(sent.parameters) if parameter.grad is None]
        nobodys = {n for n in missing if holders[n].item() == 0}  # only here the host waits for the numbers
        gradients, values = [], []
        for n, parameter in enumerate(sent.parameters):
            if n in nobodys:
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
        """What sums are multiplied by."""
        mean = collectives.size_of() if self.reduction.op is Average else 1
        return self.reduction.predivide / mean

    @torch.no_grad()
    def _add_sparse(self, parameter: Tensor) -> None:
        own = parameter.grad
        if own is None:
            own = torch.zeros_like(parameter).to_sparse(1)
        mean = collectives.size_of() if self.reduction.op is Average else 1
        parameter.grad = sparse_sum(own, self._group) / mean

    # ---- of a process that has joined ----

    def stand_in(self) -> None:
        """Take part in the others' steps with zeros, until all processes do so."""
        active = bool(self._buckets)
        while active:
            for bucket in self._buckets:
                self._send(bucket, absent=True)
            sums = [sent.pending.wait() for sent in self._sent]
            active = sums[0][-1].item() > 0
            self._sent = []

    @property
    def gathers(self) -> bool:
        """Are some gradients sparse? `stand_in` has none to add."""
        return bool(self._sparse)

    # ---- the first step ----

    def _lay_out(self) -> None:
        """Compare the new parameters over the processes, and make buckets of them."""
        # As their gradients came; then those without, the last layer first.
        order = [p for p in dict.fromkeys([*self._ready, *reversed(self._new)]) if p in self._new]
        own = [(self._names[p], p.grad is not None and p.grad.is_sparse) for p in order]
        everyone = named_operations.call(
            "first step of",
            self.label,
            sorted(f"{self._names[p]!r}, {form_of(p)}" for p in order),
            lambda: (self._group, collectives.gather_objects(own))[1],
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
        self._buckets += [[dense[position] for position in chosen] for chosen in collectives.buckets(dense)]
        self._new.clear()
