"""Finding a loss or gradient that is not finite, without waiting for the device.

The norm of the gradients is computed once per step (the clipping's own, where there is clipping): it is inf or NaN as
soon as one element of one gradient is, and on ddp it is the same on all ranks, since gradients are reduced by then. On
a CPU it is looked at before the update. On an accelerator its copy to the host is only enqueued, and looked at one step
later, when it has long arrived: nothing waits that plain DDP would not wait for. Then, and only then, all ranks tell
each other which examples they had and whether their losses were finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.errors import NonFiniteError
from paceline.train.order import Request


class Seen(NamedTuple):
    """One backward call: the loss, and the examples it was computed from."""

    loss: Tensor
    request: Request


class _Pending(NamedTuple):
    norm: Tensor
    event: torch.Event | None
    step: int
    seen: list[Seen]


def gradient_norm(grads: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, a 0-dim tensor; not finite as soon as one element is not."""
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    first = dense[0]
    if any(g.device != first.device or g.dtype != first.dtype for g in dense):
        return torch.nn.utils.get_total_norm(dense)
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else None
    norms = torch._foreach_norm(dense, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def all_finite(grads: Sequence[Tensor]) -> bool:
    """Whether every element of every gradient is finite; waits for the device."""
    if len(grads) <= 32 and grads[0].device.type == "cpu" and not any(g.is_sparse for g in grads):
        return all(math.isfinite(norm.item()) for norm in torch._foreach_norm(list(grads)))  # two operations fewer
    return math.isfinite(gradient_norm(grads).item())


class FiniteWatch:
    """Looks at every step's gradient norm, at once or one step later."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
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
    ) -> None:
        """Raises NonFiniteError for this step (CPU) or the one before it (accelerators). norm: of grads, where
        known."""
        if grads[0].device.type == "cpu":
            if not (all_finite(grads) if norm is None else math.isfinite(norm.item())):
                norm = gradient_norm(grads)
                where = [names.get(p, "?") for p in graded if p.grad is not None and not bool(p.grad.isfinite().all())]
                self._stop(_Pending(norm, None, sum(updates.values()), self._seen), where)
            return
        norm = gradient_norm(grads) if norm is None else norm
        self.drain()
        host = torch.empty((), dtype=norm.dtype, pin_memory=True)
        host.copy_(norm.detach(), non_blocking=True)
        event = torch.Event(device=norm.device)
        event.record()
        self._pending = _Pending(host, event, sum(updates.values()), self._seen)

    def drain(self) -> None:
        """Looks at what was enqueued at the last step."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.event is not None:
            pending.event.synchronize()
        if not math.isfinite(pending.norm.item()):
            self._stop(pending, [])

    def _stop(self, pending: _Pending, where: list[str]) -> None:
        mine = [(float(seen.loss), seen.request.indices) for seen in pending.seen if seen.request.examples]
        everyone = collectives.gather_objects(mine)
        raise NonFiniteError(_message(pending.step, everyone, where))


def _message(step: int, everyone: list[list[tuple[float, tuple[int, ...]]]], where: list[str]) -> str:
    guilty = [
        f"rank {rank}: loss {loss} on the examples {_ids(indices)}"
        for rank, calls in enumerate(everyone)
        for loss, indices in calls
        if not math.isfinite(loss)
    ]
    if guilty:
        what = "the loss is not finite:\n  " + "\n  ".join(guilty)
    else:
        rows = (f"rank {rank}: {_ids(ids)}" for rank, calls in enumerate(everyone) for _, ids in calls)
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
