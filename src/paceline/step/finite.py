"""Detect losses and gradients that are not finite, without waiting for the device.

1. The gradient store checks all gradients of a step at once (`found_inf`). If gradients are clipped, their norm serves
   as the flag: it is inf or NaN if any element is. Gradients are already reduced, so all ranks of a gradient group see
   the same flag.
2. On a CPU the flag is read before the update. On an accelerator the flags of `every` global batches stay on the device
   and are then copied to the host together. The host reads them when the next block of flags is complete. By then the
   copy has arrived, so no step waits. All ranks read at the same step, as the exchange of point 4 requires. The updates
   in between have already been made.
3. The remaining flags are read when the script leaves the loop: at the end of a pass over a training loader, before an
   evaluation, and by run.epochs, save, export and close.
4. If a flag is set, all ranks exchange their examples and losses, to name the cause. Independent replicas exchange
   nothing, since only one of them may have set a flag.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.comm.mesh import Mesh, world_group
from paceline.comm.scalars import readable
from paceline.data.batch_plan import Request
from paceline.errors import NonFiniteError
from paceline.strategies.gradient_store import GradientStore

BackwardCall = tuple[Tensor, Request]
"""(the detached loss of a backward call; the request of its yield)"""


class HostCopy:
    """An asynchronous copy of numbers to the host, into one reused pinned buffer.

    CPU tests replace this class and `readable`.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._host = torch.empty(count, pin_memory=True)
        self._event = torch.Event(device=device)

    def send(self, numbers: Tensor) -> None:
        """Enqueue the copy on the device. numbers: (count,) float32."""
        self._host.copy_(numbers, non_blocking=True)
        self._event.record()

    def read(self) -> list[float]:
        """The numbers of the last `send`. Waits for the copy."""
        self._event.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


class _Check(NamedTuple):
    """The check of the gradients of one global batch."""

    step: int  # updates made before those of this global batch
    calls: list[BackwardCall]  # the backward calls of the global batch


class _Block:
    """The checks of several global batches, with their flags on the device."""

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
        """Copy the flags to the host, then set them to 0."""
        self._copy.send(self._flags)
        self._flags.zero_()

    def take(self) -> Iterator[tuple[_Check, float]]:
        """Remove and return the checks, oldest first, with the flags that `send` copied."""
        checks, self.checks = self.checks, []
        return zip(checks, self._copy.read(), strict=False) if checks else iter(())

    def clear(self) -> None:
        self.checks = []
        self._flags.zero_()


class FiniteWatch:
    """Checks the gradients of every global batch.

    On a CPU the host reads the result at once. On an accelerator the results of `every` global batches form a block.
    The host reads a block when the next block is complete.
    """

    def __init__(self, store: GradientStore, mesh: Mesh, device: torch.device, every: int = 1) -> None:
        self._store, self._mesh, self._device = store, mesh, device
        self._flag = torch.zeros((), dtype=torch.float32, device=device)  # 0 until a gradient is not finite
        # On an accelerator: the block that is being filled, and the previous block, which is being copied to the host.
        self._blocks: deque[_Block] | None = None
        if not readable(self._flag):
            self._blocks = deque(_Block(every, device) for _ in range(2))
        self.calls: list[BackwardCall] = []  # the backward calls of the open global batch

    def all_finite(self, holders: Sequence[Tensor]) -> bool:
        """Whether the gradients of these tensors are all finite. Waits for the device."""
        finite = self._store.found_inf(holders, self._device, self._flag).item() == 0.0
        if not finite:
            self._flag.zero_()
        return finite

    def check(
        self, holders: Sequence[Tensor], norm: Tensor | None, updates: Mapping[Any, int], names: Mapping[Tensor, str]
    ) -> None:
        """Check the gradients of an update.

        Raises NonFiniteError: on a CPU about this update, on an accelerator about an earlier global batch.

        Args:
            holders: the tensors that hold the gradients in `.grad`.
            norm: (), the norm of these gradients, if known.
            updates: for each optimizer, the number of updates so far.
            names: the names of `holders`, for the message.
        """
        if self._blocks is not None:
            slot = self._slot(sum(updates.values()))
            if norm is not None:
                slot.add_(norm.detach(), alpha=0.0)  # NaN where the norm is inf or NaN
            elif (found := self._store.found_inf(holders, self._device, slot)) is not slot:
                slot.add_(found)
            return
        found = self._store.found_inf(holders, self._device, self._flag) if norm is None else norm.detach() * 0.0
        if found.item() != 0.0:
            here = [(p, dtensor.local(p.grad)) for p in holders if p.grad is not None]
            where = [names.get(p, "?") for p, g in here if not bool(g.isfinite().all())]
            self._flag.zero_()
            self._stop(_Check(sum(updates.values()), self.calls), where, None)

    def _slot(self, step: int) -> Tensor:
        """The flag of the open global batch, shared by all its optimizers.

        Raises NonFiniteError about an earlier global batch. step: the number of updates before this update.
        """
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
        """Read all flags. Raises NonFiniteError. step: updates made so far."""
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
        """Raises NonFiniteError. made: updates made so far; None: this update was not made."""
        mine = [(float(loss), request.indices) for loss, request in check.calls if request.examples]
        gathered = self._mesh.lockstep.gather((world_group().rank, mine, where))
        everyone = {rank: calls for rank, calls, _ in gathered}
        found_in = dict.fromkeys(name for _, _, names in gathered for name in names)
        raise NonFiniteError(_message(check.step, everyone, list(found_in), made))


def _message(
    step: int, everyone: Mapping[int, list[tuple[float, tuple[int, ...]]]], where: list[str], made: int | None
) -> str:
    nonfinite = [
        f"rank {rank}: loss {loss} on the examples {_ids(indices)}"
        for rank, calls in everyone.items()
        for loss, indices in calls
        if not math.isfinite(loss)
    ]
    if nonfinite:
        what = "the loss is not finite:\n  " + "\n  ".join(nonfinite)
    else:
        rows = (f"rank {rank}: {_ids(ids)}" for rank, calls in everyone.items() for _, ids in calls)
        named = f" (first in {', '.join(where[:3])})" if where else ""
        what = f"the losses are finite, but a gradient is not{named}. The examples of this step:\n  " + "\n  ".join(
            rows
        )
    after = (
        f"{made - step} update{'s were' if made - step > 1 else ' was'} made after this gradient, because an "
        "accelerator's checks are read late (two updates late with nonfinite_every=1). Resume from an earlier "
        "checkpoint.\n"
        if made is not None
        else ""
    )
    return (
        f"step {step}: {what}\n{after}"
        "Look at these examples, lower the learning rate, or clip (run.step(optimizer, max_grad_norm=1.0)). "
        "nonfinite='skip' skips such steps and counts them in run.skipped. If a micro-batch may have nothing to "
        "average (0 / 0, such as no counted token), use run.backward(total=..., count=...)."
    )


def _ids(indices: Sequence[int]) -> str:
    shown = ", ".join(map(str, indices[:16]))
    return f"[{shown}{', ...' if len(indices) > 16 else ''}]"
