"""Endpoints for the reducers (comm/reducers.py): between processes, and between threads of one process.

Between processes tensors travel as bytes, point to point, in a process group of their own. So they never mix with a
collective of another thread of the process.

Between threads the sender puts a tensor into the receiver's box, and the receiver copies it onto its own device. The
sender waits for the copy, since it may overwrite the tensor afterwards. On an accelerator only streams wait: the
receiver's for the sender's work so far, then the sender's for the copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives
from paceline.errors import PacelineError


class ProcessEndpoint:
    """One replica in each process of the world. All processes make it together.

    node: the number of this process's machine, for `machines`. device: where most of its tensors will lie.
    """

    def __init__(self, node: int = 0, device: torch.device | None = None) -> None:
        self._group = dist.new_group() if collectives.size_of() > 1 else None
        self.rank, self.size = collectives.rank_of(self._group), collectives.size_of(self._group)
        places: dict[int, list[int]] = {}
        for rank, its_node in enumerate(collectives.gather_objects(node)):
            places.setdefault(its_node, []).append(rank)
        self.machines: Sequence[Sequence[int]] = list(places.values())
        # NCCL wants all ranks in the first call of a group, and some reducers begin with two of them.
        collectives.all_reduce(torch.zeros(1, device=device), group=self._group)

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        # The receive is asked for first: gloo tells the other side, which sends then, and not only when all of `send`
        # has gone (see direct.py).
        operations, arriving = [], None
        if into is not None and into.numel():
            arriving = into.view(torch.uint8)
            arriving = arriving.to(collectives.device_of(self._group, into.device))  # itself where that can receive
            operations.append(dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=source))
        if send is not None and send.numel():
            sent = send.view(torch.uint8).to(collectives.device_of(self._group, send.device))
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=to))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if into is not None and arriving is not None and arriving.device != into.device:
            into.view(torch.uint8).copy_(arriving)


class ReplicaStopped(PacelineError):
    """Ends a replica's exchange because another replica failed, whose own error says why."""


@dataclass
class _Parcel:
    """A tensor on its way to another thread."""

    tensor: Tensor
    ready: torch.Event | None  # when the sender's enqueued work is done; None on a CPU
    copied: torch.Event | None = None  # when the receiver's copy is done
    received: bool = False


@dataclass
class _Boxes:
    """What the threads share, guarded by `changed`: for each (sender, receiver) its parcels, in order."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[tuple[int, int], deque[_Parcel]] = field(default_factory=lambda: defaultdict(deque))
    failed: bool = False


class ThreadEndpoint:
    """One replica on a thread; `thread_endpoints` makes them."""

    def __init__(self, boxes: _Boxes, rank: int, size: int, machines: Sequence[Sequence[int]]) -> None:
        self.rank, self.size, self.machines = rank, size, machines
        self._boxes = boxes

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        parcel = None
        if send is not None and send.numel():
            parcel = _Parcel(send, _mark(send.device))
            with self._boxes.changed:
                self._boxes.waiting[self.rank, to].append(parcel)
                self._boxes.changed.notify_all()
        if into is not None and into.numel():
            self._receive(into, source)
        if parcel is not None:
            self._wait_for(lambda: parcel.received)
            _after(parcel.copied, parcel.tensor.device)

    def abandon(self) -> None:
        """This replica has failed, or stops: all others' exchanges, now and later, raise ReplicaStopped."""
        with self._boxes.changed:
            self._boxes.failed = True
            self._boxes.changed.notify_all()

    def _receive(self, into: Tensor, source: int) -> None:
        box = source, self.rank
        self._wait_for(lambda: bool(self._boxes.waiting[box]))
        parcel = self._boxes.waiting[box].popleft()  # no other thread receives from this box
        # torch copies between devices on the sender's device, on the stream that is current for it in this thread.
        _after(parcel.ready, parcel.tensor.device)
        _after(parcel.ready, into.device)
        into.copy_(parcel.tensor)
        parcel.copied = _mark(into.device) or _mark(parcel.tensor.device)
        with self._boxes.changed:
            parcel.received = True
            self._boxes.changed.notify_all()

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        with self._boxes.changed:
            self._boxes.changed.wait_for(lambda: self._boxes.failed or happened())
            if self._boxes.failed:
                raise ReplicaStopped("This replica was stopped because another one failed.")


def thread_endpoints(size: int, machines: Sequence[Sequence[int]] | None = None) -> list[ThreadEndpoint]:
    """One endpoint for each of `size` threads, which call the same reducers in the same order, all at the same time
    (a thread that waits for a turn to run would wait for ever). machines: see Endpoint; all near each other if None.

    A thread that fails calls `abandon` on its endpoint, which frees the others; make new endpoints then.
    """
    boxes = _Boxes()
    groups = [range(size)] if machines is None else machines
    return [ThreadEndpoint(boxes, rank, size, groups) for rank in range(size)]


def _mark(device: torch.device) -> torch.Event | None:
    """An event after all that this thread has enqueued on a device."""
    if device.type == "cpu":
        return None
    event = torch.Event(device=device)
    event.record(torch.get_device_module(device).current_stream(device))
    return event


def _after(event: torch.Event | None, device: torch.device) -> None:
    """What this thread enqueues on a device from here on runs after an event."""
    if event is not None and device.type != "cpu":
        torch.get_device_module(device).current_stream(device).wait_event(event)
