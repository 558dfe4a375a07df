"""Find a loss or a gradient that is not finite, without waiting for the device.

1. The fused operation of torch's loss scaler checks all gradients of a step and sets a flag. Where gradients are
   clipped, their norm serves as the flag: it is inf or NaN as soon as one element is. Gradients are reduced by then, so
   all ranks of a gradient group see the same.
2. On a CPU the flag is read before the update. On an accelerator the copy of the flag to the host is enqueued, and read
   one step later, when it has arrived: nothing waits that plain DDP would not wait for.
3. Only if the flag is set, all ranks tell each other which examples they had and whether their losses were finite.
   Independent replicas tell nothing: one of them alone may have such a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import ALONE, Mesh
from paceline.errors import NonFiniteError
from paceline.strategies.batch_plan import Request
from paceline.strategies.gradient_store import GradientStore

BackwardCall = tuple[Tensor, Request]
"""(the loss of a backward call, detached; the request of the yield that it was computed from)."""


class _Pending(NamedTuple):
    """A check whose flag has not been read yet."""

    found: Tensor  # (), the flag: not 0 if a gradient is not finite
    event: torch.Event | None  # when the copy of the flag has arrived on the host
    step: int  # the number of updates before the step that is checked
    calls: list[BackwardCall]  # the backward calls of that step


class FiniteWatch:
    """Checks the gradients of every step, at once on a CPU, one step later on an accelerator."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh = store, mesh
        self._flag = torch.zeros((), dtype=torch.float32, device=device)  # 0 until a gradient is not finite
        self._pending: _Pending | None = None
        self.calls: list[BackwardCall] = []  # the backward calls of the open global batch

    def all_finite(self, places: Sequence[Tensor]) -> bool:
        """Whether every gradient of these places is finite. Waits for the device."""
        finite = self._store.found_inf(places, self._flag).item() == 0.0
        if not finite:
            self._flag.zero_()
        return finite

    def check(
        self, places: Sequence[Tensor], norm: Tensor | None, updates: Mapping[Any, int], names: Mapping[Tensor, str]
    ) -> None:
        """Raises NonFiniteError for this step (CPU) or the step before it (accelerators).

        places: the tensors that have a gradient. norm: (), the norm of these gradients, if known. updates: how many
        each optimizer has made. names: of the places, for the message.
        """
        found = self._store.found_inf(places, self._flag) if norm is None else norm.detach() * 0.0
        if found.device.type == "cpu":
            if found.item() != 0.0:
                here = [dtensor.local(p.grad) for p in places if p.grad is not None]
                where = [names.get(p, "?") for p, g in zip(places, here, strict=True) if not bool(g.isfinite().all())]
                self._stop(_Pending(found, None, sum(updates.values()), self.calls), where)
            return
        self.drain()
        host = torch.empty((), dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.Event(device=found.device)
        event.record()
        self._pending = _Pending(host, event, sum(updates.values()), self.calls)

    def drain(self) -> None:
        """Read the flag of the last step. Raises NonFiniteError."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.event is not None:
            pending.event.synchronize()
        if pending.found.item() != 0.0:
            self._stop(pending, [])

    def _stop(self, pending: _Pending, where: list[str]) -> None:
        self._flag.zero_()
        mine = [(float(loss), request.indices) for loss, request in pending.calls if request.examples]
        group = ALONE if self._mesh.independent else None
        told = collectives.gather_objects((collectives.rank_of(), mine, where), group)
        everyone = {rank: calls for rank, calls, _ in told}
        places = dict.fromkeys(name for _, _, names in told for name in names)
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
