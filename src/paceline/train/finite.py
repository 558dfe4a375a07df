"""Finding a loss or gradient that is not finite, without waiting for the device.

One fused operation, that of torch's own loss scaler, looks at all gradients of a step and sets a flag; where gradients
are clipped, their norm tells, since it is inf or NaN as soon as one element is. On ddp all ranks see the same, since
gradients are reduced by then. On a CPU the flag is looked at before the update. On an accelerator its copy to the host
is only enqueued, and looked at one step later, when it has long arrived: nothing waits that plain DDP would not wait
for. Then, and only then, all ranks tell each other which examples they had and whether their losses were finite.
(Replicas that train apart tell nothing: one alone may have such a gradient.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives
from paceline.errors import NonFiniteError
from paceline.train import sharded
from paceline.train.order import Request


class Seen(NamedTuple):
    """One backward call: the loss, and the examples it was computed from."""

    loss: Tensor
    request: Request


class _Pending(NamedTuple):
    found: Tensor  # not finite where a gradient is not
    event: torch.Event | None
    step: int
    seen: list[Seen]


def gradient_norm(
    grads: Sequence[Tensor], parts: dist.ProcessGroup | None = None, device: torch.device | None = None
) -> Tensor:
    """The 2-norm of all gradients together, a 0-dim tensor; not finite as soon as one element is not. parts: see
    Strategy; a process of it may have no gradient, and needs to know the device."""
    by_groups = sharded.by_groups(grads, parts)
    if by_groups.keys() == {()}:
        return _norm_here(grads)
    squares = []
    for groups, tensors in by_groups.items():
        norm = _norm_here(tensors) if tensors else torch.zeros((), device=device)
        square = norm.to(torch.float64 if norm.device.type in ("cpu", "cuda") else torch.float32).square()
        for group in groups:
            collectives.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _norm_here(grads: Sequence[Tensor]) -> Tensor:
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    first = dense[0]
    if any(g.device != first.device or g.dtype != first.dtype for g in dense):
        return torch.nn.utils.get_total_norm(dense)
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else None
    norms = torch._foreach_norm(dense, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def _plain(grads: Sequence[Tensor], device: torch.device) -> bool:
    """Whether they are what nearly all gradients are: at least one, whole, dense and real, on this device. One look at
    each, since this runs between an all-reduce and its update, where nothing hides it."""
    for g in grads:
        if type(g) is not Tensor or g.device != device or g.layout is not torch.strided or g.is_complex():
            return False
    return bool(grads)


class Flag:
    """A 0-dim float32 tensor on a device, kept over the steps: 0 until a gradient is not finite."""

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones_like(self.found)

    def look(self, grads: Sequence[Tensor], parts: dist.ProcessGroup | None = None) -> Tensor:
        """Sets the flag where an element of a gradient is not finite, and returns it. Waits for nothing."""
        if parts is None and _plain(grads, self.found.device):
            torch._amp_foreach_non_finite_check_and_unscale_(list(grads), self.found, self._one)  # by 1: unchanged
            return self.found
        dense = [
            g.coalesce().values() if g.is_sparse else torch.view_as_real(g) if g.is_complex() else g
            for g in sharded.local(grads)
        ]
        device = self.found.device
        if any(g.device != device for g in dense):
            return sharded.any_process(torch.nn.utils.get_total_norm(dense) * 0.0, grads, parts)
        if dense:
            torch._amp_foreach_non_finite_check_and_unscale_(dense, self.found, self._one)
        return sharded.any_process(self.found, grads, parts)

    def all_finite(self, grads: Sequence[Tensor], parts: dist.ProcessGroup | None = None) -> bool:
        """Whether every element of every gradient is finite; waits for the device."""
        finite = self.look(grads, parts).item() == 0.0
        if not finite:
            self.found.zero_()
        return finite


class FiniteWatch:
    """Looks at every step's gradient norm, at once or one step later. alone: this process makes its updates by itself,
    and others do not see what it sees."""

    def __init__(self, device: torch.device, local: bool = False) -> None:
        self.flag, self._local = Flag(device), local
        self._seen: list[Seen] = []
        self._pending: _Pending | None = None

    def saw(self, loss: Tensor, request: Request) -> None:
        """Remembers a backward call of the current global batch, and its loss, detached."""
        self._seen.append(Seen(loss, request))

    def forget(self) -> None:
        """A new global batch begins."""
        self._seen = []

    def check(
        self,
        grads: Sequence[Tensor],
        norm: Tensor | None,
        updates: Mapping[Any, int],
        names: Mapping[Tensor, str],
        graded: Sequence[Tensor],
        parts: dist.ProcessGroup | None = None,
    ) -> None:
        """Raises NonFiniteError for this step (CPU) or the one before it (accelerators). norm: of grads, where
        known."""
        found = self.flag.look(grads, parts) if norm is None else norm.detach() * 0.0
        if found.device.type == "cpu":
            if found.item() != 0.0:
                here = sharded.local([p.grad for p in graded if p.grad is not None])
                where = [names.get(p, "?") for p, g in zip(graded, here, strict=True) if not bool(g.isfinite().all())]
                self._stop(_Pending(found, None, sum(updates.values()), self._seen), where)
            return
        self.drain()
        host = torch.empty((), dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.Event(device=found.device)
        event.record()
        self._pending = _Pending(host, event, sum(updates.values()), self._seen)

    def drain(self) -> None:
        """Looks at what was enqueued at the last step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.event is not None:
            pending.event.synchronize()
        if pending.found.item() != 0.0:
            self._stop(pending, [])

    def _stop(self, pending: _Pending, where: list[str]) -> None:
        self.flag.found.zero_()
        mine = [(float(seen.loss), seen.request.indices) for seen in pending.seen if seen.request.examples]
        if self._local:
            raise NonFiniteError(_message(pending.step, {collectives.rank_of(): mine}, where))
        told = collectives.gather_objects((mine, where))
        everyone = {rank: calls for rank, (calls, _) in enumerate(told)}
        places = dict.fromkeys(name for _, names in told for name in names)
        raise NonFiniteError(_message(pending.step, everyone, list(places)))


def _message(step: int, everyone: Mapping[int, list[tuple[float, tuple[int, ...]]]], where: list[str]) -> str:
    guilty = [
        f"rank {rank}: loss {loss} on the examples {_ids(indices)}"
        for rank, calls in everyone.items()
        for loss, indices in calls
        if not math.isfinite(loss)
    ]
    if guilty:
        what = "the loss is not finite:\n  " + "\n  ".join(guilty)
    else:
        rows = (f"rank {rank}: {_ids(ids)}" for rank, calls in everyone.items() for _, ids in calls)
        named = f" (first in {', '.join(where[:3])})" if where else ""
        what = f"the losses are finite, but a gradient is not{named}. The examples of this step:\n  " + "\n  ".join(
            rows
        )
    return (
        f"step {step}: {what}\n"
        "Look at these examples, lower the learning rate, or clip (run.step(optimizer, max_grad_norm=1.0)). With "
        "nonfinite='skip' such steps are left out and counted in run.skipped. A mean over nothing (0 / 0, such as no "
        "token that counts in a micro-batch) is a loss for run.backward(total=..., count=...)."
    )


def _ids(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:16]))
    return f"[{shown}{', ...' if len(indices) > 16 else ''}]"
