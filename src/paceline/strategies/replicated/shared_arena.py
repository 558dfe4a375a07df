"""Parameters and gradients of a model in memory that all processes of a machine share.

    weights    one copy for all processes. Each process's parameters show the weights on copy-on-write pages
               (comm/copied_pages.py): a script's changes between updates affect only its process, as under ddp.
    addends    one region per process: the gradients that its backward has accumulated. Rank 0's region later holds the
               sums.
    totals     the sums. `.grad` of each process's parameters shows the sums on copy-on-write pages.

All regions have the same layout: parameters in sequence, grouped by dtype. When a process updates or sums, it writes
only to its slices of the shared pages. Pages that were never written take no memory.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.comm.copied_pages import PAGE, CopiedPages
from paceline.comm.mesh import world_group
from paceline.comm.shared_memory import SharedBarrier
from paceline.errors import ModelError
from paceline.torch_private.core import foreach_copy_

_ALIGNED = 64  # bytes: alignment of each parameter
_AT_ONCE = 2**18  # elements that are summed at once, so that the sum of three or more addends stays in the cache


@dataclass(slots=True)
class Slot:
    """The memory of one parameter. The tensors have the parameter's shape, except for rows."""

    start: int  # offset in bytes, the same in all regions
    weights: Tensor  # shared
    seen: Tensor  # the parameter's data: the weights on copy-on-write pages
    addend: Tensor  # shared: this process's gradient
    total: Tensor  # shared: the sum
    shown: Tensor  # the value of `.grad`: the sum on copy-on-write pages
    shown_rows: Tensor  # the rows of `shown` that this process updates
    total_rows: Tensor  # shared: the same rows of `total`


class _Segment:
    """The memory of the parameters of one `add` call."""

    def __init__(self, barrier: SharedBarrier, parameters: Sequence[Tensor]) -> None:
        self._ranks, self._rank = barrier.size, barrier.rank
        self.parameters = sorted(parameters, key=lambda p: str(p.dtype))
        starts, end = [], 0
        for p in self.parameters:
            starts.append(end)
            end += -(-p.nbytes // _ALIGNED) * _ALIGNED
        nbytes = -(-end // PAGE) * PAGE
        weights, seen = barrier.share_twice(nbytes)
        totals, shown = barrier.share_twice(nbytes)
        others = barrier.share(nbytes * (self._ranks - 1))
        # (memory, offset) of each process's addends
        self._addends = [(totals, 0), *((others, nbytes * k) for k in range(self._ranks - 1))]
        self.copied_weights, self.copied_totals = CopiedPages(seen), CopiedPages(shown)
        self.slots: dict[Tensor, Slot] = {}
        for p, start in zip(self.parameters, starts, strict=True):
            addends, at = self._addends[self._rank]
            one, other = _as(p, totals, start), _as(p, shown, start)
            self.slots[p] = Slot(
                start,
                _as(p, weights, start),
                _as(p, seen, start),
                _as(p, addends, at + start),
                one,
                other,
                self.rows(other),
                self.rows(one),
            )
        self._spans_of: tuple[int, ...] = ()  # ids of the parameters that `_spans` covers
        self._spans: list[list[Tensor]] = []  # for each slice that this process sums: the addends of all processes

    def rows(self, whole: Tensor) -> Tensor:
        """The rows that this process updates, split as torch.chunk splits. A scalar is returned whole."""
        if not whole.dim():
            return whole
        first, last = dtensor.rows_of(whole.size(0), self._rank, self._ranks)
        return whole[first:last]

    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Sum this process's slices of the addends of these parameters, in rank order."""
        identities = tuple(map(id, parameters))
        if identities != self._spans_of:
            self._spans_of, self._spans = identities, list(self._cut(parameters))
        for total, *addends in self._spans:
            if len(addends) == 1:
                total += addends[0]
                continue
            for first in range(0, total.numel(), _AT_ONCE):
                part = total[first : first + _AT_ONCE]
                for addend in addends:
                    part += addend[first : first + _AT_ONCE]

    def _cut(self, parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield slices to sum. Adjacent parameters of one dtype are summed at once, including the gaps between them."""
        chosen, run = set(parameters), list[Tensor]()
        runs = list[list[Tensor]]()
        for p in self.parameters:
            if p not in chosen or (run and run[0].dtype != p.dtype):
                run = []
            if p in chosen:
                if not run:
                    runs.append(run)
                run.append(p)
        for run in runs:
            start, last, size = self.slots[run[0]].start, run[-1], run[0].element_size()
            length = (self.slots[last].start + last.nbytes - start) // size
            low, high = length * self._rank // self._ranks, length * (self._rank + 1) // self._ranks
            if low < high:
                yield [
                    torch.frombuffer(memory, dtype=last.dtype, count=high - low, offset=at + start + low * size)
                    for memory, at in self._addends
                ]

    def written(self) -> list[Tensor]:
        """The parameters on pages that this process has written to since they were last shared."""
        pages = self.copied_weights.numbers()
        if not len(pages):
            return []
        found = []
        for p, slot in self.slots.items():
            first, last = slot.start // PAGE, (slot.start + p.nbytes - 1) // PAGE
            if pages.searchsorted(first) < pages.searchsorted(last, side="right"):
                found.append(p)
        return found


class SharedArena:
    """All shared memory, as one process uses it. All processes must make the same calls."""

    def __init__(self, barrier: SharedBarrier) -> None:
        self.barrier = barrier
        self.slots: dict[Tensor, Slot] = {}
        self._segments: list[_Segment] = []

    @torch.no_grad()
    def add(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Allocate shared memory for new parameters, with rank 0's values. Returns the new parameters. Collective. Of
        scalars only the gradients are shared. Parameters without elements are skipped."""
        new = [p for p in parameters if p not in self.slots and p.numel()]
        if not new:
            return []
        segment = _Segment(self.barrier, new)
        self._segments.append(segment)
        self.slots.update(segment.slots)
        if self.barrier.rank == 0:
            for p, slot in segment.slots.items():
                slot.weights.copy_(p)
        self.barrier.wait()
        for p, slot in segment.slots.items():
            if p.dim():
                p.data = slot.seen
        return new

    def weights(self, parameter: Tensor) -> Tensor:
        """The tensor that an update of this parameter writes to; this process writes only its rows."""
        slot = self.slots.get(parameter)
        return parameter.detach() if slot is None or not parameter.dim() else slot.weights

    # --- gradients

    def take(self, parameter: Tensor) -> None:
        """A hook on a parameter: move its gradient from autograd's memory into the shared memory."""
        slot, grad = self.slots[parameter], parameter.grad
        if grad is not None and grad is not slot.addend and not grad.is_sparse:
            slot.addend.copy_(grad.detach())
            parameter.grad = slot.addend

    @torch.no_grad()
    def reduce(self, names: dict[Tensor, str]) -> None:
        """Replace `.grad` of these parameters by the sum over all processes. It stays None if it is None on all
        processes. Collective. Raises ModelError for a sparse gradient."""
        used = [p.grad is not None for p in names]
        self._take_all(names)
        sent = float(zlib.crc32(bytes(used)))
        if any(
            other != sent for other in self.barrier.wait(sent)
        ):  # if all are equal, all addends are written, for the same parameters on all processes
            used = [any(there) for there in zip(*world_group().gather(used), strict=True)]
            for p in (p for p, there in zip(names, used, strict=True) if there and p.grad is None and p in self.slots):
                p.grad = self.slots[p].addend.zero_()
            self.barrier.wait()
        parameters = [p for p, there in zip(names, used, strict=True) if there and p in self.slots]
        for segment in self._segments:
            segment.add_up(parameters if len(self._segments) == 1 else [p for p in parameters if p in segment.slots])
            if len(segment.copied_totals.numbers()):
                segment.copied_totals.forget()
        self.barrier.wait()  # all sums are written
        for p in parameters:
            p.grad = self.slots[p].shown

    def _take_all(self, names: dict[Tensor, str]) -> None:
        """Move the remaining gradients into the shared memory."""
        addends, grads = [], []
        for p, name in names.items():
            slot = self.slots.get(p)
            if slot is None or p.grad is None or p.grad is slot.addend:
                continue
            if p.grad.is_sparse:
                raise ModelError(
                    f"strategy shared: {name} has a sparse gradient, which shared memory cannot hold. Build its "
                    "Embedding with sparse=False, or use strategy='ddp'."
                )
            addends.append(slot.addend)
            grads.append(p.grad)
        if addends:
            foreach_copy_(addends, grads)

    def gradient_rows(self, parameter: Tensor) -> Tensor:
        """The rows of `.grad` that this process uses in an update. `.grad` must not be None."""
        grad, slot = parameter.grad, self.slots.get(parameter)
        assert grad is not None
        if slot is None:
            return grad.detach()
        return slot.shown_rows if grad is slot.shown else self._segments[0].rows(grad.detach())

    def as_summed(self, parameters: Iterable[Tensor]) -> bool:
        """Whether `.grad` of these parameters is unchanged since `reduce`, and this process has written to no page of
        the totals."""
        own = [p for p in parameters if p.grad is not None and p in self.slots]
        written = any(len(segment.copied_totals.numbers()) for segment in self._segments)
        return not written and all(p.grad is self.slots[p].shown for p in own)

    # --- weights

    def changed(self, names: dict[Tensor, str]) -> list[Tensor]:
        """The parameters that the script has changed: in this process they differ from the shared weights. Raises
        ModelError if a parameter's shape, dtype or device is not the same as in `add`."""
        found = []
        for p, name in names.items():
            slot = self.slots.get(p)
            if slot is not None and p.dim() and p.data_ptr() != slot.seen.data_ptr():
                if p.shape != slot.seen.shape or p.dtype != slot.seen.dtype or p.device != slot.seen.device:
                    raise ModelError(
                        f"strategy shared: {name} is now {tuple(p.shape)}, {p.dtype} on {p.device}, but in `prepare` "
                        f"it was {tuple(slot.seen.shape)}, {slot.seen.dtype} on {slot.seen.device}. Convert the "
                        "model before run.prepare."
                    )
                found.append(p)
        for segment in self._segments:
            written = segment.written()
            other = [p for p in written if p in names and p.dim() and not torch.equal(p, segment.slots[p].weights)]
            if written and not other:
                segment.copied_weights.forget()
            found += other
        order = {p: number for number, p in enumerate(names)}
        return sorted(dict.fromkeys(found), key=order.__getitem__)

    @torch.no_grad()
    def carry(self, parameters: Iterable[Tensor]) -> None:
        """Write changes that all processes made to these parameters into the shared weights. Collective. Call it while
        no process reads weights."""
        moved = list(parameters)
        for p in moved:
            segment = next(segment for segment in self._segments if p in segment.slots)
            segment.rows(segment.slots[p].weights).copy_(segment.rows(p.detach()))
        self.barrier.wait()
        for p in moved:
            p.data = self.slots[p].seen
        for segment in self._segments:
            segment.copied_weights.forget()


def _as(parameter: Tensor, memory: mmap.mmap, start: int) -> Tensor:
    """A tensor in this memory with the parameter's shape, dtype and strides."""
    flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=start)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
