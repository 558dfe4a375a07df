"""Find a loss or a gradient that is not finite, without waiting for the device.

1. The gradient store looks at all gradients of a step at once (`found_inf`). Where gradients are clipped, their norm
   serves as the flag: it is inf or NaN as soon as one element is. Gradients are reduced by then, so all ranks of a
   gradient group see the same.
2. On a CPU the flag is read before the update. On an accelerator the flags of `every` global batches stay on the device
   and are then copied to the host together. The host reads them when the next block of flags is complete. By then the
   copy has long arrived, so that no step waits; all ranks read at the same step, as the exchange of point 4 needs. The
   updates in between have been made.
3. What no step follows is read where the loop is left: at the end of a pass over a training loader, before an
   evaluation, and by run.epochs, save, export and close.
4. Only if the flag is set, all ranks tell each other which examples they had and whether their losses were finite.
   Independent replicas tell nothing: one of them alone may have such a gradient.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import ALONE, Mesh
from paceline.comm.scalars import readable
from paceline.data.batch_plan import Request
from paceline.errors import NonFiniteError
from paceline.strategies.gradient_store import GradientStore

BackwardCall = tuple[Tensor, Request]
"""(the loss of a backward call, detached; the request of the yield that it was computed from)."""


class HostCopy:
    """Numbers on their way to the host, in one pinned buffer that is used again. Tests replace this class, and
    `readable`, on a CPU."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, pin_memory=True)
        self._event = torch.Event(device=device)

    def send(self, numbers: Tensor) -> None:
        """Enqueue the copy, behind what the device has been given. numbers: (count,) float32."""
        self._host.copy_(numbers, non_blocking=True)
        self._event.record()

    def read(self) -> list[float]:
        """The numbers that were sent last. Waits until their copy has arrived."""
        self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class _Check(NamedTuple):
    """The check of the gradients of one global batch."""

    step: int  # the number of updates before its first
    calls: list[BackwardCall]  # the backward calls of the global batch


class _Block:
    """The checks of some global batches, with their flags on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.checks: list[_Check] = []
        self._size = size
        self._flags = torch.zeros(size, dtype=torch.float32, device=device)  # not 0: a gradient was not finite
        self._slots = self._flags.unbind()
        self._copy = HostCopy(size, device)

    @property
    def full(self) -> bool:
        return len(self.checks) == self._size

    def slot(self) -> Tensor:
        """(): the flag of the latest check."""
        return self._slots[len(self.checks) - 1]

    def send(self) -> None:
        """Copy the flags to the host, and set them to 0 behind the copy."""
        self._copy.send(self._flags)
        self._flags.zero_()

    def take(self) -> Iterator[tuple[_Check, float]]:
        """The checks with their flags, which were sent, oldest first. The block is empty afterwards."""
        checks, self.checks = self.checks, []
        return zip(checks, self._copy.read(), strict=False) if checks else iter(())

    def clear(self) -> None:
        self.checks = []
        self._flags.zero_()


class FiniteWatch:
    """Checks the gradients of every global batch. The host reads the result at once on a CPU; on an accelerator those
    of `every` global batches together, one such block late."""

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device, every: int = 1) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        self._flag = torch.zeros((), dtype=torch.float32, device=device)  # 0 until a gradient is not finite
        # On an accelerator: the block that is being filled, and the block before it, whose flags are on their way.
        self._blocks: deque[_Block] | None = None
        if not readable(self._flag):
            self._blocks = deque(_Block(every, device) for _ in range(2))
        self.calls: list[BackwardCall] = []  # the backward calls of the open global batch

    def all_finite(self, places: Sequence[Tensor]) -> bool:
        """Whether every gradient of these places is finite. Waits for the device."""
        finite = self._store.found_inf(places, self._device, self._flag).item() == 0.0
        if not finite:
            self._flag.zero_()
        return finite

    def check(
        self, places: Sequence[Tensor], norm: Tensor | None, updates: Mapping[Any, int], names: Mapping[Tensor, str]
    ) -> None:
        """Raises NonFiniteError for this update (CPU) or for those of earlier global batches (accelerators).

        places: the tensors in whose `.grad` the gradients are, if any. norm: (), the norm of these gradients, if known.
        updates: how many each optimizer has made. names: of the places, for the message.
        """
        if self._blocks is not None:
            slot = self._slot(sum(updates.values()))
            if norm is not None:
                slot.add_(norm.detach(), alpha=0.0)  # NaN where the norm is inf or NaN
            elif (found := self._store.found_inf(places, self._device, slot)) is not slot:
                slot.add_(found)
            return
        found = self._store.found_inf(places, self._device, self._flag) if norm is None else norm.detach() * 0.0
        if found.item() != 0.0:
            here = [(p, dtensor.local(p.grad)) for p in places if p.grad is not None]
            where = [names.get(p, "?") for p, g in here if not bool(g.isfinite().all())]
            self._flag.zero_()
            self._stop(_Check(sum(updates.values()), self.calls), where, None)

    def _slot(self, step: int) -> Tensor:
        """The flag of the open global batch, which all its optimizers share. Raises NonFiniteError for an earlier one.
        step: the number of updates before this one."""
        assert self._blocks is not None
        block = self._blocks[0]
        if block.checks and block.checks[-1].calls is self.calls:
            return block.slot()
        if block.full:
            block.send()
            self._blocks.rotate()
            block = self._blocks[0]
            self._read(block, step)
        block.checks.append(_Check(step, self.calls))
        return block.slot()

    def drain(self, step: int) -> None:
        """Read all flags. Raises NonFiniteError. step: the number of updates so far."""
        if self._blocks is None:
            return
        filling, sent = self._blocks
        self._read(sent, step)
        if filling.checks:
            filling.send()
            self._read(filling, step)

    def _read(self, block: _Block, step: int) -> None:
        for check, flag in block.take():
            if flag != 0.0:
                for each in self._blocks or ():
                    each.clear()
                self._stop(check, [], step)

    def _stop(self, check: _Check, where: list[str], made: int | None) -> None:
        """Raises NonFiniteError. made: how many updates there are by now; None: this one was not made."""
        mine = [(float(loss), request.indices) for loss, request in check.calls if request.examples]
        group = ALONE if self._mesh.independent else None
        told = collectives.gather_objects((collectives.rank_of(), mine, where), group)
        everyone = {rank: calls for rank, calls, _ in told}
        places = dict.fromkeys(name for _, _, names in told for name in names)
        raise NonFiniteError(_message(check.step, everyone, list(places), made))


def _message(
    step: int, everyone: Mapping[int, list[tuple[float, tuple[int, ...]]]], where: list[str], made: int | None
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
        f"{made - step} update{'s were' if made - step > 1 else ' was'} made from this gradient on, since the host "
        "reads an accelerator's checks late (nonfinite_every=1 reports it two updates later). Go on from an earlier "
        "checkpoint.\n"
        if made is not None
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
