"""Endpoints for the reducers (comm/reducers.py): between processes, and between threads of one process.

Between processes tensors are sent as bytes, point to point, in a separate process group. So they never mix with
another thread's collectives.

Between threads the sender puts a tensor into the receiver's box, and the receiver copies it to its device. The sender
waits for the copy, because it may overwrite the tensor afterwards. On accelerators only streams wait: the receiver's
stream waits for the sender's work so far, and then the sender's stream waits for the copy.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.mesh import new_group, world_group
from paceline.errors import PacelineError


class ProcessEndpoint:
    """The endpoint of a process, if each process of the world has one replica. The constructor is collective.

    node: the number of this process's machine, for `machines`. device: the device of most tensors to send.
    """

    def __init__(self, node: int = 0, device: torch.device | None = None) -> None:
        self._group = new_group()
        self.rank, self.size = self._group.rank, self._group.size
        places: dict[int, list[int]] = {}
        for rank, its_node in enumerate(world_group().gather(node)):
            places.setdefault(its_node, []).append(rank)
        self.machines: Sequence[Sequence[int]] = list(places.values())
        # NCCL requires all ranks in a group's first call, and some reducers begin with two ranks.
        self._group.all_reduce(torch.zeros(1, device=device))

    def exchange(self, send: Tensor | None, to: int, into: Tensor | None, source: int) -> None:
        # The receive is posted first, so that the other side can send at once instead of after all of `send` has
        # arrived (see direct.py).
        operations, arriving = [], None
        if into is not None and into.numel():
            arriving = into.view(torch.uint8)
            arriving = arriving.to(self._group.device(into.device))  # no copy if the backend can receive there
            operations.append(dist.P2POp(dist.irecv, arriving, group=self._group.native, group_peer=source))
        if send is not None and send.numel():
            sent = send.view(torch.uint8).to(self._group.device(send.device))
            operations.append(dist.P2POp(dist.isend, sent, group=self._group.native, group_peer=to))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if into is not None and arriving is not None and arriving.device != into.device:
            into.view(torch.uint8).copy_(arriving)


class ReplicaStopped(PacelineError):
    """Ends a replica's exchange because another replica failed. The other replica raises the error with the reason."""


@dataclass
class _Parcel:
    """A tensor on its way to another thread."""

    tensor: Tensor
    ready: torch.Event | None  # the sender's enqueued work is done; None on a CPU
    copied: torch.Event | None = None  # the receiver's copy is done; None on a CPU
    received: bool = False


@dataclass
class _Boxes:
    """The state that all threads share, guarded by `changed`. waiting: (sender, receiver) -> parcels, oldest first."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[tuple[int, int], deque[_Parcel]] = field(default_factory=lambda: defaultdict(deque))
    failed: bool = False


class ThreadEndpoint:
    """The endpoint of a replica on a thread. Made by `thread_endpoints`."""

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
        """Report that this replica failed or stops: the others' current and later exchanges raise ReplicaStopped."""
        with self._boxes.changed:
            self._boxes.failed = True
            self._boxes.changed.notify_all()

    def _receive(self, into: Tensor, source: int) -> None:
        box = source, self.rank
        self._wait_for(lambda: bool(self._boxes.waiting[box]))
        parcel = self._boxes.waiting[box].popleft()  # no other thread receives from this box
        # torch copies between devices on the sender's device, on that device's current stream in this thread.
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
                raise ReplicaStopped("This replica was stopped because another replica failed.")


def thread_endpoints(size: int, machines: Sequence[Sequence[int]] | None = None) -> list[ThreadEndpoint]:
    """Make one endpoint for each of `size` threads.

    The threads call the same reducers in the same order. They must run concurrently: with threads that take turns, the
    first exchange would deadlock. machines: see Endpoint; None: all replicas are in one group.

    A thread that fails calls `abandon` on its endpoint, which releases the other threads. Make new endpoints after
    that.
    """
    boxes = _Boxes()
    groups = [range(size)] if machines is None else machines
    return [ThreadEndpoint(boxes, rank, size, groups) for rank in range(size)]


def _mark(device: torch.device) -> torch.Event | None:
    """Record an event after all work that this thread has enqueued on a device."""
    if device.type == "cpu":
        return None
    event = torch.Event(device=device)
    event.record(torch.get_device_module(device).current_stream(device))
    return event


def _after(event: torch.Event | None, device: torch.device) -> None:
    """Make later work of this thread on a device wait for an event."""
    if event is not None and device.type != "cpu":
        torch.get_device_module(device).current_stream(device).wait_event(event)
