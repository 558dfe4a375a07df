"""Groups of processes or replicas that compute together, and their collective operations.

    Replicas   the interface for layers that sum in the middle of a forward: size, rank, sum, rows
    Group      the processes of one of torch's groups; ALONE is the group of this process only, and sends nothing

All processes of a group call its methods in the same order. Three facts about the backends shape this file:

- a backend sends from certain devices only: NCCL from CUDA, gloo from the CPU. Other tensors are copied to
  `Group.device(...)` and back;
- gloo refuses some dtypes (int16, float8). Operations that only move values send them as bytes; sums use a wider dtype;
- tensors of unequal size on two ranks end the process or give wrong data. So a user's tensors are compared first
  (UsageError).

Small tensors between processes of one machine use Unix sockets (neighbours.py); transport.py calls torch.distributed.
"""

from __future__ import annotations

import hashlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import fork_safety, objects, transport
from paceline.comm.neighbours import MOST_BYTES, Neighbours, find_neighbours
from paceline.errors import SettingError, UsageError, WorldError, suggest
from paceline.torch_private.core import foreach_copy_

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""Bytes per message if many tensors are sent. Like DDP's buckets, large enough that latency does not matter."""

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

# dtypes that gloo cannot add, and the dtype to add them in.
_ADDED_AS = {
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}

_connected: list[Group] = []  # groups that have tried to connect by sockets


class Replicas(ABC):
    """The replicas that compute one global batch together, seen from one of them. Layers use this interface for sums in
    the middle of a forward. All replicas make the same calls in the same order.

    Group            one replica in each process of a group
    ThreadReplicas   several replicas in this process, each on a thread (threads.py)
    ShardReplicas    one replica per shard of a reproducible run, on threads of one or several processes (tree_sums.py)
    """

    on_all_members = True  # whether all members run the current code; if not, collectives over all members are refused
    size: int  # number of replicas
    rank: int  # the index of this replica, from 0

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return a new tensor: the sum of all replicas' tensors (of one shape and dtype), the same bits on each.

        Not differentiable; see `replicas.differentiable_sum`.
        """

    def rows(self, row: Tensor) -> Tensor:
        """(size, ...): all replicas' tensors (of one shape and dtype) in replica order, the same on each."""
        table = row.new_zeros(self.size, *row.shape)
        table[self.rank] = row
        return self.sum(table)


class Pending:
    """An `all_reduce` in progress. `wait()` returns the tensor with the result, and may be called again."""

    def __init__(self, work: dist.Work | None, tensor: Tensor, sent: Tensor) -> None:
        self._work, self._tensor, self._sent = work, tensor, sent

    def done(self) -> bool:  # whether `wait` would return at once
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = None
            fork_safety.keep(self._sent)
        if self._sent is not self._tensor:
            self._tensor.copy_(self._sent)
            self._sent = self._tensor
        return self._tensor


class Group(Replicas):
    """Processes that make collective calls together, seen from one of them. mesh.py makes the groups.

    native: torch's group; None: this process alone.
    """

    def __init__(self, native: dist.ProcessGroup | None) -> None:
        # A weak reference: torch keeps a group until it is destroyed, and the group's threads must then end.
        self._weak = None if native is None else weakref.ref(native)
        self.size = 1 if native is None else dist.get_world_size(native)
        self.rank = 0 if native is None else dist.get_rank(native)
        self._neighbours: Neighbours | None = None
        self._searched = self.size == 1  # whether the processes have tried to connect by sockets

    def check(self) -> None:
        """Raises UsageError if the current computation may not use this group."""

    @property
    def native(self) -> dist.ProcessGroup | None:
        """torch's group; None: this process alone, or the group was destroyed."""
        return None if self._weak is None else self._weak()

    def _native(self) -> dist.ProcessGroup:
        native = self.native
        if native is None:
            raise WorldError(
                "torch.distributed.destroy_process_group was called too early. Call it at the end of the script."
            )
        return native

    # ---- devices

    @cached_property
    def backends(self) -> dict[str, str]:
        """Device type -> its backend, such as {"cpu": "gloo", "cuda": "nccl"}."""
        if self._weak is None:
            return {}
        pairs = str(dist.get_backend_config(self._native())).split(",")
        return dict(pair.split(":") for pair in pairs)

    def device(self, like: torch.device | None = None) -> torch.device:
        """The device from which the group can send a tensor that is on `like` (default: the CPU).

        `like` itself if the group has a backend for it; otherwise the CPU; otherwise the current device of the
        backend's type (for a CPU tensor in an NCCL-only group). Gloo lists CUDA among its devices, but copies through
        the CPU and lacks some operations there, so it counts as a CPU backend.
        """
        like = torch.device("cpu") if like is None else like
        if self.size == 1:
            return like
        types = {device for device, backend in self.backends.items() if backend != "gloo" or device == "cpu"}
        if like.type in types:
            return like
        if "cpu" in types:
            return torch.device("cpu")
        kind = sorted(types)[0]
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def on_accelerator(self, device: torch.device) -> bool:
        """Whether an accelerator backend, such as NCCL, carries tensors of this device."""
        return device.type != "cpu" and self.size > 1 and self.device(device) == device

    def adds_sparse(self, device: torch.device) -> bool:
        """Whether the group can add sparse tensors on this type of device: gloo can, NCCL cannot."""
        return self.size == 1 or self.backends.get(device.type) != "nccl"

    # ---- tensors of one shape

    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., async_op: Literal[False] = ...) -> Tensor: ...
    @overload
    def all_reduce(self, tensor: Tensor, op: str = ..., *, async_op: Literal[True]) -> Pending: ...
    def all_reduce(self, tensor: Tensor, op: str = "sum", async_op: bool = False) -> Tensor | Pending:
        """Replace `tensor` by the sum (min, max, product) of all ranks' tensors, and return it. Not differentiable.

        All ranks' tensors have one shape and dtype. With `async_op` a `Pending` is returned at once.
        """
        self.check()
        if op not in _OPERATIONS:
            raise SettingError(f"all_reduce(op={op!r}): unknown operation. {suggest(op, _OPERATIONS)}")
        tensor = tensor.detach()
        if self.size == 1:
            pending = Pending(None, tensor, tensor)
        else:
            sent = tensor.to(self.device(tensor.device), _ADDED_AS.get(tensor.dtype, tensor.dtype)).contiguous()
            pending = Pending(transport.all_reduce(sent, _OPERATIONS[op], self._native()), tensor, sent)
        return pending if async_op else pending.wait()

    def sum(self, tensor: Tensor) -> Tensor:
        near = self._near(tensor)
        if near is None:
            return self.all_reduce(tensor.detach().clone())
        return near.rows(tensor.detach()).sum(0, dtype=tensor.dtype)

    def rows(self, row: Tensor) -> Tensor:
        near = self._near(row)
        if near is not None:
            return near.rows(row.detach())
        if self.on_accelerator(row.device):  # one operation instead of three: each costs a launch
            return self.all_gather(row.detach().reshape(-1)).view(self.size, *row.shape)
        return super().rows(row)

    def all_gather(self, flat: Tensor) -> Tensor:
        """(size * numel,): all ranks' 1-d tensors of one size, joined, on `flat`'s device."""
        if self.size == 1:
            return flat.clone()
        return transport.all_gather(flat.to(self.device(flat.device)), self._native()).to(flat.device)

    def all_to_all(self, flat: Tensor, outwards: Sequence[int], inwards: Sequence[int]) -> Tensor:
        """Exchange slices of 1-d tensors: returns (sum of inwards,), the received elements in rank order.

        The first `outwards[0]` elements of `flat` go to rank 0, the next `outwards[1]` to rank 1, and so on;
        `inwards[r]` elements come from rank r.
        """
        size = flat.element_size()
        sent = as_bytes(flat).to(self.device(flat.device))
        received = sent.new_empty(sum(inwards) * size)
        lengths = [count * size for count in outwards], [count * size for count in inwards]
        transport.exchange(sent, lengths[0], received, lengths[1], self._native())
        return received.to(flat.device).view(flat.dtype)

    def gather_rows(self, row: Tensor) -> list[Tensor]:
        """All ranks' 1-d tensors of one size and dtype (supported by the backend) in rank order, on `row`'s device."""
        if self.size == 1:
            return [row]
        sent = row.to(self.device(row.device)).contiguous()
        return [received.to(row.device) for received in transport.gather(sent, self._native())]

    def broadcast_tensors(self, tensors: Iterable[Tensor], src: int = 0) -> None:
        """Overwrite each tensor in place with rank `src`'s tensor, bit for bit, about 25 MB at a time.

        src: a global rank. Raises UsageError on every rank if the ranks' tensors differ in number, shape or dtype.
        """
        listed = [tensor.detach() for tensor in tensors]
        if self.size == 1 or not self.agree([(str(tensor.dtype), tuple(tensor.shape)) for tensor in listed]):
            return
        for bucket in _filled(listed):
            first = bucket[0]
            parts = [as_bytes(tensor) for tensor in bucket]
            joined = parts[0] if len(parts) == 1 else torch.cat(parts)
            sent = joined.to(self.device(first.device))
            transport.broadcast(sent, src, self._native())
            values = sent.to(first.device).view(first.dtype)
            for tensor, part in zip(bucket, values.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(part.view(tensor.shape))

    def sum_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, in buckets of about 25 MB.

        All ranks have tensors of the same shapes and dtypes. While one bucket is sent, the next is joined.
        """
        if self.size == 1:
            return
        sent = []
        for bucket in _filled(tensors):
            joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
            sent.append((bucket, self.all_reduce(joined, async_op=True)))
        for bucket, pending in sent:
            parts = pending.wait().split([tensor.numel() for tensor in bucket])
            foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket)])

    # ---- objects

    def gather(self, obj: T, what: str = "a value that ranks exchange") -> list[T]:
        """Return every rank's object, in rank order. Tensors in the objects arrive on the CPU.

        what: names the object in errors. Raises UsageError on all ranks if an object has a type that plain_state.py
        does not support.
        """
        self.check()
        if self.size == 1:
            return [obj]
        try:
            own = objects.to_bytes(obj, what)
        except UsageError as error:
            own = objects.refusal(error)
        everyone = transport.gather_bytes(own, self.device(), self._native())
        return [objects.from_bytes(message, rank) for rank, message in enumerate(everyone)]

    def broadcast(self, obj: T, src: int = 0, what: str = "a value that is broadcast") -> T:
        """Return rank `src`'s object on every rank. The other ranks' arguments are ignored.

        Tensors in the object arrive on the CPU. They are broadcast in buckets, so whole model states may be sent. On
        rank `src` the object itself is returned. src: a global rank. what: as in `gather`, with the same error.
        """
        if self.size == 1:
            return obj
        own, sends = b"", src == dist.get_rank()
        tensors: list[Tensor] = []
        refused: UsageError | None = None
        if sends:
            try:
                own, tensors = objects.without_tensors(obj, what)
            except UsageError as error:
                own, refused = objects.refusal(error), error
        message = transport.broadcast_bytes(own, src, self.device(), self._native())
        if refused is not None:
            raise refused
        if sends:
            if tensors:
                self.broadcast_tensors(tensors, src)
            return obj
        awaited = objects.Awaited(message, src)
        if awaited.tensors:
            self.broadcast_tensors(awaited.tensors, src)
        value: T = awaited.value()
        return value

    def barrier(self) -> None:
        """Return when every process of the group has called it."""
        if self.size > 1:
            transport.barrier(self.device(), self._native())

    def agree(self, items: list[Any]) -> bool:
        """Return True if all ranks pass the same non-empty list, and False if all pass an empty list. Otherwise raise
        UsageError on every rank."""
        digest_bytes = hashlib.sha256(repr(items).encode()).digest()[:8]
        rows = self.gather_rows(torch.tensor([int.from_bytes(digest_bytes, "big", signed=True)]))
        if any(not torch.equal(row, rows[0]) for row in rows):
            lists = self.gather(items)
            counts = ", ".join(f"rank {rank}: {len(own)}" for rank, own in enumerate(lists))
            shortest = range(min(map(len, lists)))
            first = next((at for at in shortest if any(own[at] != lists[0][at] for own in lists)), None)
            shown = "" if first is None else "; ".join(f"rank {rank}: {own[first]}" for rank, own in enumerate(lists))
            raise UsageError(
                f"The ranks do not hold the same tensors (number per rank: {counts}). "
                + (f"The first difference is at index {first}: {shown}. " if shown else "")
                + "Build model and optimizer in the same way on every rank."
            )
        return bool(items)

    # ---- sockets

    def _near(self, tensor: Tensor) -> Neighbours | None:
        """The sockets that can carry this tensor to all processes of the group; None if gloo or NCCL must carry it. The
        first call is collective, since it connects the processes."""
        if tensor.device.type != "cpu" or tensor.nbytes > MOST_BYTES:
            return None
        if not self._searched:
            self._searched, self._neighbours = True, find_neighbours(self)
            _connected.append(self)
        return self._neighbours

    def leave_neighbours(self) -> None:
        """Close the sockets to other processes. The next small sum opens them again."""
        if self._neighbours is not None:
            self._neighbours.close()
        self._searched, self._neighbours = self.size == 1, None


ALONE = Group(None)
"""The group of this process only. It sends nothing."""


def leave_neighbours() -> None:
    """Close the sockets of all groups."""
    while _connected:
        _connected.pop().leave_neighbours()


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as a 1-d uint8 tensor in row-major order; a view if the memory already has that order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def buckets(tensors: Sequence[Tensor], most_bytes: int | None = None) -> Iterator[list[int]]:
    """Yield buckets, as lists of positions in `tensors`. The tensors of a bucket have one dtype and device, and at most
    `most_bytes` in total (default: BUCKET_BYTES). A larger tensor is a bucket alone."""
    most = BUCKET_BYTES if most_bytes is None else most_bytes
    filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for position, tensor in enumerate(tensors):
        kind = (tensor.dtype, tensor.device)
        if kind in filling and sizes[kind] + tensor.nbytes > most:
            yield filling.pop(kind)
            sizes[kind] = 0
        filling.setdefault(kind, []).append(position)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
    yield from filling.values()


def _filled(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield buckets of the tensors that have elements."""
    listed = [tensor.detach() for tensor in tensors if tensor.numel()]
    for positions in buckets(listed):
        yield [listed[position] for position in positions]
