"""Find a loss or a gradient that is not finite, without waiting for the device.

1. The gradient store looks at all gradients of a step at once (`found_inf`). Where gradients are clipped, their norm
   serves as the flag: it is inf or NaN as soon as one element is. Gradients are reduced by then, so all ranks of a
   gradient group see the same.
2. On a CPU the flag is read before the update. On an accelerator the copy of the flag to the host is enqueued, and read
   in the next global batch, when it has arrived: nothing waits that plain DDP would not wait for. By then the update
   has been made, with this gradient.
3. What no step follows is read where the loop is left: at the end of a pass over a training loader, before an
   evaluation, and by run.epochs, save, export and close.
4. Only if the flag is set, all ranks tell each other which examples they had and whether their losses were finite.
   Independent replicas tell nothing: one of them alone may have such a gradient.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import ALONE, Mesh
from paceline.comm.scalars import readable
from paceline.errors import NonFiniteError
from paceline.strategies.batch_plan import Request
from paceline.strategies.gradient_store import GradientStore

BackwardCall = tuple[Tensor, Request]
"""(the loss of a backward call, detached; the request of the yield that it was computed from)."""


class HostCopy:
    """A number on its way to the host, behind what is enqueued on this accelerator. Tests replace this class, and
    `readable`, on a CPU."""

    def __init__(self, number: Tensor, device: torch.device) -> None:
        self._host = torch.empty((), dtype=number.dtype, pin_memory=True)
        self._host.copy_(number, non_blocking=True)
        self._event = torch.Event(device=device)
        self._event.record()

    def read(self) -> float:
        """Waits until the device has come to where the copy was enqueued."""
        self._event.synchronize()
        return self._host.item()


class _Check(NamedTuple):
    """The check of the gradients of one update."""

    step: int  # the number of updates before the one that is checked
    calls: list[BackwardCall]  # the backward calls of its global batch: one list for all checks of that batch
    flag: HostCopy | None  # 0 if all gradients are finite; None: it was read before the update


class FiniteWatch:
    """Checks the gradients of every step: at once on a CPU, in the next global batch on an accelerator."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        zero = torch.zeros((), dtype=torch.float32, device=device)
        # 0 until a gradient is not finite; None on an accelerator, where flags are read late.
        self._flag = zero if readable(zero) else None
        self._pending: deque[_Check] = deque()  # the checks whose flags have not been read
        self.calls: list[BackwardCall] = []  # the backward calls of the open global batch

    def all_finite(self, places: Sequence[Tensor]) -> bool:
        """Whether every gradient of these places is finite. Waits for the device."""
        finite = self._store.found_inf(places, self._device, self._flag).item() == 0.0
        if not finite:
            self._reset()
        return finite

    def check(
        self, places: Sequence[Tensor], norm: Tensor | None, updates: Mapping[Any, int], names: Mapping[Tensor, str]
    ) -> None:
        """Raises NonFiniteError for this update (CPU) or for those of earlier global batches (accelerators).

        places: the tensors in whose `.grad` the gradients are, if any. norm: (), the norm of these gradients, if known.
        updates: how many each optimizer has made. names: of the places, for the message.
        """
        found = self._store.found_inf(places, self._device, self._flag) if norm is None else norm.detach() * 0.0
        if self._flag is not None:
            if found.item() != 0.0:
                here = [(p, dtensor.local(p.grad)) for p in places if p.grad is not None]
                where = [names.get(p, "?") for p, g in here if not bool(g.isfinite().all())]
                self._stop(_Check(sum(updates.values()), self.calls, None), where)
            return
        # A flag of this global batch is another optimizer's: it arrives when that one's whole backward is done.
        self._read(self.calls)
        self._pending.append(_Check(sum(updates.values()), self.calls, HostCopy(found, self._device)))

    def drain(self) -> None:
        """Read all flags. Raises NonFiniteError."""
        self._read(None)

    def _read(self, until: list[BackwardCall] | None) -> None:
        """Read the flags of all checks before those of the global batch of these backward calls."""
        while self._pending and self._pending[0].calls is not until:
            check = self._pending.popleft()
            assert check.flag is not None
            if check.flag.read() != 0.0:
                self._pending.clear()
                self._stop(check, [])

    def _reset(self) -> None:
        if self._flag is not None:
            self._flag.zero_()

    def _stop(self, check: _Check, where: list[str]) -> None:
        self._reset()
        mine = [(float(loss), request.indices) for loss, request in check.calls if request.examples]
        group = ALONE if self._mesh.independent else None
        told = collectives.gather_objects((collectives.rank_of(), mine, where), group)
        everyone = {rank: calls for rank, calls, _ in told}
        places = dict.fromkeys(name for _, _, names in told for name in names)
        raise NonFiniteError(_message(check.step, everyone, list(places), late=check.flag is not None))


def _message(
    step: int, everyone: Mapping[int, list[tuple[float, tuple[int, ...]]]], where: list[str], late: bool
) -> str:
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
    after = (
        "The update was made with this gradient, since an accelerator's flag is read one step late: go on from an "
        "earlier checkpoint.\n"
        if late
        else ""
    )
    return (
        f"step {step}: {what}\n{after}"
        "Look at these examples, lower the learning rate, or clip (run.step(optimizer, max_grad_norm=1.0)). With "
        "nonfinite='skip' such steps are left out and counted in run.skipped. A mean over nothing (0 / 0, such as no "
        "token that counts in a micro-batch) is a loss for run.backward(total=..., count=...)."
    )


def _ids(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:16]))
    return f"[{shown}{', ...' if len(indices) > 16 else ''}]"
