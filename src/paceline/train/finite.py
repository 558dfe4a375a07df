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
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import ALONE, Mesh
from paceline.errors import NonFiniteError
from paceline.strategies.batch_plan import Request
from paceline.strategies.gradient_store import GradientStore

Seen = tuple[Tensor, Request]
"""A backward call: its loss, detached, and the yield that it was computed from."""


class _Pending(NamedTuple):
    found: Tensor  # not finite where a gradient is not
    event: torch.Event | None
    step: int
    seen: list[Seen]


class FiniteWatch:
    """Looks at the gradients of every step, at once or one step later. mesh: of the run. Independent replicas see their
    own gradients, and tell nobody."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh = store, mesh
        self._flag = torch.zeros((), dtype=torch.float32, device=device)  # 0 until a gradient is not finite
        self._pending: _Pending | None = None
        self.seen: list[Seen] = []  # the backward calls of the open global batch

    def all_finite(self, places: Sequence[Tensor]) -> bool:
        """Whether every element of the gradients of these places is finite; waits for the device."""
        finite = self._store.found_inf(places, self._flag).item() == 0.0
        if not finite:
            self._flag.zero_()
        return finite

    def check(
        self, places: Sequence[Tensor], norm: Tensor | None, updates: Mapping[Any, int], names: Mapping[Tensor, str]
    ) -> None:
        """Raises NonFiniteError for this step (CPU) or the one before it (accelerators). places: that have gradients.
        norm: of these, where known."""
        found = self._store.found_inf(places, self._flag) if norm is None else norm.detach() * 0.0
        if found.device.type == "cpu":
            if found.item() != 0.0:
                here = [dtensor.local(p.grad) for p in places if p.grad is not None]
                where = [names.get(p, "?") for p, g in zip(places, here, strict=True) if not bool(g.isfinite().all())]
                self._stop(_Pending(found, None, sum(updates.values()), self.seen), where)
            return
        self.drain()
        host = torch.empty((), dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.Event(device=found.device)
        event.record()
        self._pending = _Pending(host, event, sum(updates.values()), self.seen)

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
        self._flag.zero_()
        mine = [(float(loss), request.indices) for loss, request in pending.seen if request.examples]
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
