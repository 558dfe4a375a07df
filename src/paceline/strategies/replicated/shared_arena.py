"""Parameters and gradients of a model in memory that all processes of a machine share.

    weights    once, for all processes. A process's own parameters show them, on pages that the kernel copies as soon as
               the process writes to them (comm/copied_pages.py): what a script does to its model between updates it
               does to its own copy, as under ddp.
    addends    of each process: what its backward has added up. Rank 0's are where the sums will be.
    totals     the sums. `.grad` of the process's parameters shows them, on pages that are copied likewise.

All four have one layout: parameters one after the other, those of a dtype together. A process that updates, or sums,
writes to the shared pages of its own slices only. Pages that nobody has written to take no memory.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.copied_pages import PAGE, CopiedPages
from paceline.comm.shared_memory import Meetings
from paceline.errors import ModelError
from paceline.torch_private.core import foreach_copy_

_ALIGNED = 64  # bytes to which a parameter begins
_AT_ONCE = 2**18  # elements: with three or more addends their sum stays in the cache until it is complete


@dataclass(slots=True)
class Place:
    """Of one parameter. Tensors have its shape."""

    start: int  # bytes, in each of the four
    weights: Tensor  # shared
    seen: Tensor  # the parameter's own memory: the weights, on pages that are copied
    addend: Tensor  # shared: this process's
    total: Tensor  # shared
    shown: Tensor  # what `.grad` is: the total, on pages that are copied
    shown_rows: Tensor  # those that this process updates
    total_rows: Tensor  # likewise, shared


class _Segment:
    """The places of the parameters that one `add` has brought."""

    def __init__(self, meetings: Meetings, parameters: Sequence[Tensor]) -> None:
        self._ranks, self._rank = meetings.size, meetings.rank
        self.parameters = sorted(parameters, key=lambda p: str(p.dtype))
        starts, end = [], 0
        for p in self.parameters:
            starts.append(end)
            end += -(-p.nbytes // _ALIGNED) * _ALIGNED
        nbytes = -(-end // PAGE) * PAGE
        weights, seen = meetings.share_twice(nbytes)
        totals, shown = meetings.share_twice(nbytes)
        others = meetings.share(nbytes * (self._ranks - 1))
        # (memory, where in it) of each process's addends
        self._addends = [(totals, 0), *((others, nbytes * k) for k in range(self._ranks - 1))]
        self.copied_weights, self.copied_totals = CopiedPages(seen), CopiedPages(shown)
        self.places: dict[Tensor, Place] = {}
        for p, start in zip(self.parameters, starts, strict=True):
            addends, at = self._addends[self._rank]
            one, other = _as(p, totals, start), _as(p, shown, start)
            self.places[p] = Place(
                start,
                _as(p, weights, start),
                _as(p, seen, start),
                _as(p, addends, at + start),
                one,
                other,
                self.rows(other),
                self.rows(one),
            )
        self._spans_of: tuple[int, ...] = ()  # identities of the parameters for which these are
        self._spans: list[list[Tensor]] = []  # slices that this process sums: for each all processes' addends

    def rows(self, whole: Tensor) -> Tensor:
        """Those that this process updates: cut as torch.chunk cuts. Of a scalar the scalar."""
        if not whole.dim():
            return whole
        first, last = dtensor.rows_of(whole.size(0), self._rank, self._ranks)
        return whole[first:last]

    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Sums this process's n-th of the addends of these parameters, in the order of the ranks."""
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
        """Neighbours of one dtype are summed at once, with what little lies between them."""
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
            start, last, size = self.places[run[0]].start, run[-1], run[0].element_size()
            length = (self.places[last].start + last.nbytes - start) // size
            low, high = length * self._rank // self._ranks, length * (self._rank + 1) // self._ranks
            if low < high:
                yield [
                    torch.frombuffer(memory, dtype=last.dtype, count=high - low, offset=at + start + low * size)
                    for memory, at in self._addends
                ]

    def written(self) -> list[Tensor]:
        """The parameters on whose pages this process has written since they were shared."""
        pages = self.copied_weights.numbers()
        if not len(pages):
            return []
        found = []
        for p, place in self.places.items():
            first, last = place.start // PAGE, (place.start + p.nbytes - 1) // PAGE
            if pages.searchsorted(first) < pages.searchsorted(last, side="right"):
                found.append(p)
        return found


class SharedArena:
    """All places, as one process sees them. All processes make and use it alike."""

    def __init__(self, meetings: Meetings) -> None:
        self.meetings = meetings
        self.places: dict[Tensor, Place] = {}
        self._segments: list[_Segment] = []

    @torch.no_grad()
    def add(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Makes places for those that have none, with rank 0's values. Returns them. Collective. Scalars keep their own
        memory, and have a place for their gradient alone; what has no elements has none."""
        new = [p for p in parameters if p not in self.places and p.numel()]
        if not new:
            return []
        segment = _Segment(self.meetings, new)
        self._segments.append(segment)
        self.places.update(segment.places)
        if self.meetings.rank == 0:
            for p, place in segment.places.items():
                place.weights.copy_(p)
        self.meetings.wait()
        for p, place in segment.places.items():
            if p.dim():
                p.data = place.seen
        return new

    def weights(self, parameter: Tensor) -> Tensor:
        """What an update of this parameter is to write to, of which this process has its rows."""
        place = self.places.get(parameter)
        return parameter.detach() if place is None or not parameter.dim() else place.weights

    # --- gradients

    def take(self, parameter: Tensor) -> None:
        """Moves a gradient that autograd has made to its place. A hook of the parameter."""
        place, grad = self.places[parameter], parameter.grad
        if grad is not None and grad is not place.addend and not grad.is_sparse:
            place.addend.copy_(grad.detach())
            parameter.grad = place.addend

    @torch.no_grad()
    def reduce(self, names: dict[Tensor, str]) -> None:
        """`.grad` of these parameters becomes the sum over all processes; None where it is None on all. Collective.
        Raises ModelError for a sparse gradient."""
        used = [p.grad is not None for p in names]
        self._take_all(names)
        told = float(zlib.crc32(bytes(used)))
        if any(
            other != told for other in self.meetings.wait(told)
        ):  # all addends are there, and of the same parameters
            used = [any(there) for there in zip(*collectives.gather_objects(used), strict=True)]
            for p in (p for p, there in zip(names, used, strict=True) if there and p.grad is None and p in self.places):
                p.grad = self.places[p].addend.zero_()
            self.meetings.wait()
        parameters = [p for p, there in zip(names, used, strict=True) if there and p in self.places]
        for segment in self._segments:
            segment.add_up(parameters if len(self._segments) == 1 else [p for p in parameters if p in segment.places])
            if len(segment.copied_totals.numbers()):
                segment.copied_totals.forget()
        self.meetings.wait()  # all sums are there
        for p in parameters:
            p.grad = self.places[p].shown

    def _take_all(self, names: dict[Tensor, str]) -> None:
        """Moves what is not in its place yet."""
        addends, grads = [], []
        for p, name in names.items():
            place = self.places.get(p)
            if place is None or p.grad is None or p.grad is place.addend:
                continue
            if p.grad.is_sparse:
                raise ModelError(
                    f"strategy shared: {name} has a sparse gradient, which has no fixed place in memory. Make its "
                    "Embedding with sparse=False, or use strategy='ddp'."
                )
            addends.append(place.addend)
            grads.append(p.grad)
        if addends:
            foreach_copy_(addends, grads)

    def gradient_rows(self, parameter: Tensor) -> Tensor:
        """Of `.grad`, which is there, those that this process updates."""
        grad, place = parameter.grad, self.places.get(parameter)
        assert grad is not None
        if place is None:
            return grad.detach()
        return place.shown_rows if grad is place.shown else self._segments[0].rows(grad.detach())

    def as_summed(self, parameters: Iterable[Tensor]) -> bool:
        """Whether `.grad` of these parameters is what `reduce` has left, and this process has written to no part of any
        total."""
        own = [p for p in parameters if p.grad is not None and p in self.places]
        written = any(len(segment.copied_totals.numbers()) for segment in self._segments)
        return not written and all(p.grad is self.places[p].shown for p in own)

    # --- weights

    def changed(self, names: dict[Tensor, str]) -> list[Tensor]:
        """The parameters to which this process has given other values than those that are shared. Raises ModelError
        for one that has another shape or dtype than when it got its place."""
        found = []
        for p, name in names.items():
            place = self.places.get(p)
            if place is not None and p.dim() and p.data_ptr() != place.seen.data_ptr():
                if p.shape != place.seen.shape or p.dtype != place.seen.dtype or p.device != place.seen.device:
                    raise ModelError(
                        f"strategy shared: {name} is {tuple(p.shape)}, {p.dtype} on {p.device} now; in `prepare` it "
                        f"was {tuple(place.seen.shape)}, {place.seen.dtype} on {place.seen.device}. Convert a model "
                        "before run.prepare."
                    )
                found.append(p)
        for segment in self._segments:
            written = segment.written()
            other = [p for p in written if p in names and p.dim() and not torch.equal(p, segment.places[p].weights)]
            if written and not other:
                segment.copied_weights.forget()
            found += other
        order = {p: number for number, p in enumerate(names)}
        return sorted(dict.fromkeys(found), key=order.__getitem__)

    @torch.no_grad()
    def carry(self, parameters: Iterable[Tensor]) -> None:
        """Shares what all processes have written to these parameters. Collective, when nobody reads weights."""
        moved = list(parameters)
        for p in moved:
            segment = next(segment for segment in self._segments if p in segment.places)
            segment.rows(segment.places[p].weights).copy_(segment.rows(p.detach()))
        self.meetings.wait()
        for p in moved:
            p.data = self.places[p].seen
        for segment in self._segments:
            segment.copied_weights.forget()


def _as(parameter: Tensor, memory: mmap.mmap, start: int) -> Tensor:
    """A tensor in this memory with the parameter's shape, dtype and layout."""
    flat = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=start)
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
