"""Communication between processes: the functions that all other code calls. transport.py calls torch.distributed.

All processes call a function here in the same order. In a world of one only the communication is left out.

Three facts about the backends shape this file:

- a backend talks from certain devices only: NCCL from CUDA, gloo from the CPU. A tensor that lies elsewhere travels
  through `device_of(group, ...)` and back;
- gloo refuses some dtypes (int16, float8). Where values are only moved they travel as bytes; where they are added, in
  a wider dtype;
- tensors of unequal size on two ranks end the process or give wrong data. A user's are compared first (UsageError).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import fork_safety, objects, transport
from paceline.comm.mesh import ALONE, Group, current, replicas_here
from paceline.comm.transport import rank_of as rank_of
from paceline.comm.transport import size_of as size_of
from paceline.errors import SettingError, UsageError, suggest
from paceline.torch_private.core import DisableTorchFunction, foreach_copy_

T = TypeVar("T")

BUCKET_BYTES = 25 * 2**20
"""Bytes that `broadcast_tensors` sends at once: DDP's size, above which latency no longer counts."""

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}

# What gloo will not add, and the dtype to add it in.
_ADDED_AS = {
    torch.int16: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def device_of(group: Group = None, like: torch.device | None = None) -> torch.device:
    """The device from which the group can send a tensor that lies on `like` (default: the CPU).

    `like` itself where the group has a backend for it; else the CPU; else the current device of the backend's own type
    (a CPU tensor in a group that has NCCL only). Gloo names CUDA among its devices, but goes through the CPU itself and
    not for every operation: it is taken as a CPU backend.
    """
    like = torch.device("cpu") if like is None else like
    if size_of(group) == 1:
        return like
    pairs = (item.split(":") for item in transport.backends_of(group).split(","))
    types = {device for device, backend in pairs if backend != "gloo" or device == "cpu"}
    if like.type in types:
        return like
    if "cpu" in types:
        return torch.device("cpu")
    kind = sorted(types)[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def takes_sparse(device: torch.device, group: Group = None) -> bool:
    """Whether the group can add sparse tensors that lie on this type of device: gloo can, NCCL cannot."""
    return size_of(group) == 1 or f"{device.type}:nccl" not in transport.backends_of(group).split(",")


def check_everywhere() -> None:
    """Raises UsageError in a computation that not all members of the run make, such as one of several replicas in a
    process: a sum over all members would be silently wrong, or wait for ever."""
    if not (current().everywhere and replicas_here().everywhere):
        raise UsageError(
            "run.gather, run.sum, run.mean or run.ratio (or another sum over all processes) was called in the loss "
            "function, which the chosen strategy calls for one of several replicas in a process, or on one stage: it "
            "would see that one's examples alone. Call it elsewhere, or use one replica a process (--strategy ddp)."
        )


def data_group() -> Group:
    """The data-parallel group of the open run. Raises UsageError in a computation that not all members make."""
    check_everywhere()
    return current().data


class Pending:
    """An `all_reduce` under way. `wait()` returns the tensor once it holds the result, and may be called again."""

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


@overload
def all_reduce(tensor: Tensor, op: str = ..., group: Group = ..., async_op: Literal[False] = ...) -> Tensor: ...
@overload
def all_reduce(tensor: Tensor, op: str = ..., group: Group = ..., *, async_op: Literal[True]) -> Pending: ...
def all_reduce(tensor: Tensor, op: str = "sum", group: Group = None, async_op: bool = False) -> Tensor | Pending:
    """Replace `tensor` by the sum (min, max, product) of all ranks' tensors, and return it. Not differentiable.

    All ranks' tensors have one shape and dtype. With `async_op` a `Pending` is returned at once.
    """
    if group is None:
        check_everywhere()
    if op not in _OPERATIONS:
        raise SettingError(f"all_reduce(op={op!r}) is none of the operations. {suggest(op, _OPERATIONS)}")
    tensor = tensor.detach()
    if size_of(group) == 1:
        pending = Pending(None, tensor, tensor)
    else:
        sent = tensor.to(device_of(group, tensor.device), _ADDED_AS.get(tensor.dtype, tensor.dtype)).contiguous()
        pending = Pending(transport.all_reduce(sent, _OPERATIONS[op], group), tensor, sent)
    return pending if async_op else pending.wait()


class ReplicaSum(torch.autograd.Function):
    """y = Σ over replicas of x. Every replica's loss depends on y, so dL/dx is the sum of all replicas' dL_r/dy_r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.total = total
        return total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ReplicaSum.apply(gradients[0], ctx.total), None


# ---- gathering ----


class _Head(NamedTuple):
    """What a rank sends of its tensor first."""

    dtype: torch.dtype
    needs_gradient: bool
    shape: tuple[int, ...]


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_MOST_DIMS = 28


def _gather_rows(row: Tensor, group: Group) -> list[Tensor]:
    """All ranks' 1-d tensors of one size and dtype (one that backends know) in rank order, on `row`'s device."""
    if size_of(group) == 1:
        return [row]
    sent = row.to(device_of(group, row.device)).contiguous()
    return [received.to(row.device) for received in transport.gather(sent, group)]


def _gather_heads(tensor: Tensor, group: Group) -> list[_Head]:
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    if tensor.dim() > _MOST_DIMS:
        raise UsageError(f"gather takes tensors of up to {_MOST_DIMS} dimensions, not {tensor.dim()}: flatten some.")
    own = [_DTYPES.index(tensor.dtype), int(needs_gradient), tensor.dim(), *tensor.shape]
    row = torch.tensor(own + [0] * (3 + _MOST_DIMS - len(own)), dtype=torch.int64)
    heads = []
    for values in (received.tolist() for received in _gather_rows(row, group)):
        dtype, needs_gradient, dims = values[:3]
        heads.append(_Head(_DTYPES[dtype], bool(needs_gradient), tuple(values[3 : 3 + dims])))
    return heads


def _check_heads(heads: Sequence[_Head]) -> None:
    shapes = ", ".join(f"rank {rank}: {head.shape}" for rank, head in enumerate(heads))
    if any(head.shape == () for head in heads):
        raise UsageError(
            f"gather joins tensors along dimension 0, and a 0-dim tensor has none (shapes: {shapes}). "
            f"Write tensor.reshape(1), or use run.mean or run.sum for a number."
        )
    if len({head.shape[1:] for head in heads}) > 1:
        raise UsageError(
            f"gather joins tensors along dimension 0, so all other dimensions must agree over the ranks. "
            f"Received shapes: {shapes}. Pad them to one shape, or gather a list of objects instead."
        )
    if len({head.dtype for head in heads}) > 1:
        dtypes = ", ".join(f"rank {rank}: {head.dtype}" for rank, head in enumerate(heads))
        raise UsageError(
            f"gather needs one dtype on all ranks. Received {dtypes}. Convert with tensor.to(dtype) first."
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's values as a 1-d uint8 tensor, in row-major order; a view where the memory already lies so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _gather_bytes(tensor: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
    """(sum of lengths, ...): all ranks' tensors joined, each padded on the way to the longest."""
    own = _as_bytes(tensor)
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    padded = own.new_zeros(max(lengths) * row_bytes)
    padded[: own.numel()] = own
    received = _gather_rows(padded, group) if padded.numel() else [padded] * len(lengths)
    joined = torch.cat([part[: length * row_bytes] for part, length in zip(received, lengths)])
    return joined.view(tensor.dtype).reshape(sum(lengths), *tensor.shape[1:])


class _Gather(torch.autograd.Function):
    """The joined tensor is the same on every rank. A rank's gradient: its slice of all ranks' gradients, summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, lengths: Sequence[int], group: Group) -> Tensor:
        rank = rank_of(group)
        ctx.start, ctx.length = sum(lengths[:rank]), lengths[rank]
        ctx.total = lambda t: all_reduce(t.clone(memory_format=torch.contiguous_format), group=group)
        return _gather_bytes(tensor, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ReplicaSum.apply(gradients[0], ctx.total).narrow(0, ctx.start, ctx.length), None, None


def gather_uneven(tensor: Tensor, group: Group = None) -> Tensor:
    """All ranks' tensors joined along dimension 0 in rank order: (sum of the ranks' lengths, ...), the same everywhere.

    Lengths may differ and may be 0; any dtype. Differentiable any number of times, and a backward through it
    communicates: all ranks run it, or none. Where any rank's tensor requires a gradient the result does so on every
    rank, so that all run the backward. Raises UsageError, on every rank, where the other dimensions or the dtypes do
    not agree.
    """
    if group is None:
        check_everywhere()
    heads = _gather_heads(tensor, group)
    _check_heads(heads)
    if len(heads) == 1:
        return tensor.clone()  # a new tensor, as with several ranks: what a script then does to it must not differ
    if not tensor.requires_grad and any(head.needs_gradient for head in heads):
        tensor = tensor.detach().requires_grad_()
    joined: Tensor = _Gather.apply(tensor, [head.shape[0] for head in heads], group)
    return joined


def gather_objects(obj: T, group: Group = None, what: str = "a value that ranks exchange") -> list[T]:
    """Every rank's object, in rank order. Tensors come on the CPU.

    what: names the object in errors. Raises UsageError, on all ranks, where one is of no type that plain_state.py
    knows.
    """
    if group is None:
        check_everywhere()
    if size_of(group) == 1:
        return [obj]
    try:
        own = objects.to_bytes(obj, what)
    except UsageError as error:
        own = objects.refusal(error)
    everyone = transport.gather_bytes(own, device_of(group), group)
    return [objects.from_bytes(message, rank) for rank, message in enumerate(everyone)]


def exchange_rows(tensor: Tensor, outwards: Sequence[int], group: Group = None) -> tuple[Tensor, list[int]]:
    """Sends the first `outwards[0]` rows of the tensor to rank 0, the next `outwards[1]` to rank 1, and so on.

    All ranks' tensors have one dtype, and one shape but for dimension 0, which is the sum of `outwards`.

    Returns:
        what the ranks have sent to this one, joined along dimension 0 in rank order; and how many rows each sent.
    """
    if size_of(group) == 1:
        return tensor.detach().clone(), list(outwards)
    inwards = [counts[rank_of(group)] for counts in gather_objects(list(outwards), group)]
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    sent = _as_bytes(tensor).to(device_of(group, tensor.device))
    received = sent.new_empty(sum(inwards) * row_bytes)
    transport.exchange(
        sent, [count * row_bytes for count in outwards], received, [count * row_bytes for count in inwards], group
    )
    joined = received.to(tensor.device).view(tensor.dtype)
    return joined.reshape(sum(inwards), *tensor.shape[1:]), inwards


def separate_group() -> Group:
    """A new group of all processes: its collectives need not keep the order of other groups'. All ranks call it alike,
    and let go of it before the process group ends."""
    return ALONE if size_of() == 1 else dist.new_group()


# ---- from one rank to all ----


def broadcast_object(obj: T, src: int = 0, group: Group = None, what: str = "a value that is broadcast") -> T:
    """Rank `src`'s object (its number in the world) on every rank; what others pass is not looked at.

    Tensors in it come on the CPU; they are broadcast in buckets, so that whole states of models may be sent. On rank
    `src` it is the object itself. what: as in `gather_objects`, and so is the error.
    """
    if size_of(group) == 1:
        return obj
    own, sends = b"", src == rank_of()
    tensors: list[Tensor] = []
    refused: UsageError | None = None
    if sends:
        try:
            own, tensors = objects.without_tensors(obj, what)
        except UsageError as error:
            own, refused = objects.refusal(error), error
    message = transport.broadcast_bytes(own, src, device_of(group), group)
    if refused is not None:
        raise refused
    if sends:
        if tensors:
            broadcast_tensors(tensors, src, group)
        return obj
    awaited = objects.Awaited(message, src)
    if awaited.tensors:
        broadcast_tensors(awaited.tensors, src, group)
    value: T = awaited.value()
    return value


def broadcast_tensors(tensors: Iterable[Tensor], src: int = 0, group: Group = None) -> None:
    """Overwrite each tensor in place with rank `src`'s, bit for bit, about 25 MB at a time.

    Every rank passes as many tensors, of the same shapes and dtypes; otherwise UsageError on every rank.
    """
    listed = [tensor.detach() for tensor in tensors]
    if size_of(group) == 1 or not _agree([(str(tensor.dtype), tuple(tensor.shape)) for tensor in listed], group):
        return
    for bucket in _filled(listed):
        first = bucket[0]
        parts = [_as_bytes(tensor) for tensor in bucket]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        sent = joined.to(device_of(group, first.device))
        transport.broadcast(sent, src, group)
        values = sent.to(first.device).view(first.dtype)
        for tensor, part in zip(bucket, values.split([tensor.numel() for tensor in bucket])):
            tensor.copy_(part.view(tensor.shape))


def buckets(tensors: Sequence[Tensor], most_bytes: int | None = None) -> Iterator[list[int]]:
    """Positions of tensors of one dtype and device, in order, that have `most_bytes` (default: BUCKET_BYTES) together,
    or of one tensor that has more."""
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
    """Buckets of tensors, without those that have no elements."""
    listed = [tensor.detach() for tensor in tensors if tensor.numel()]
    for positions in buckets(listed):
        yield [listed[position] for position in positions]


def sum_all(tensors: Sequence[Tensor], group: Group = None) -> None:
    """Replaces each tensor by the sum of all ranks', in buckets of about 25 MB. A bucket travels while the next is
    joined.

    All ranks have tensors of the same shapes and dtypes.
    """
    if size_of(group) == 1:
        return
    sent = []
    for bucket in _filled(tensors):
        joined = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sent.append((bucket, all_reduce(joined, group=group, async_op=True)))
    for bucket, pending in sent:
        parts = pending.wait().split([tensor.numel() for tensor in bucket])
        foreach_copy_(bucket, [part.view(t.shape) for part, t in zip(parts, bucket)])


def barrier() -> None:
    """Return when every process of the world has come here."""
    if size_of() > 1:
        transport.barrier(device_of())


# ---- do the ranks agree? ----

_DIGEST_CHUNK = 2**15
_DIGEST_MULTIPLIER = 6364136223846793005  # Knuth's MMIX multiplier: odd, so that no chunk's bits are lost


def digest(tensor: Tensor) -> Tensor:
    """() int64 on the tensor's device: a hash of its bits, in row-major order. Not meant against malice.

    Each chunk's words are weighted by fixed random odd 64-bit numbers and added modulo 2**64, the chunks by Horner's
    rule: one changed word always changes the result, several do with probability 1 - 2**-63 or so.
    """
    word = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    dense = tensor.to_dense() if tensor.is_sparse else tensor  # a momentum of sparse gradients is sparse
    words = dense.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(word)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _digest_weights(tensor.device)
    for chunk in words.split(_DIGEST_CHUNK):
        total = total * _DIGEST_MULTIPLIER + (weights[: chunk.numel()] * chunk).sum()
    return total


@cache
def _digest_weights(device: torch.device) -> Tensor:
    """(_DIGEST_CHUNK,) int64 on the device, 256 KB that are kept: to draw and send them for each tensor costs more than
    most digests."""
    generator = torch.Generator().manual_seed(0x9E3779B97F4A7C15 >> 1)
    # With noise="example" a mode would take these for noise of the batch.
    with DisableTorchFunction(), torch.inference_mode(False):
        return (torch.randint(-(2**63), 2**63 - 1, (_DIGEST_CHUNK,), generator=generator) | 1).to(device)


def digest_mismatch(named_tensors: Iterable[tuple[str, Tensor]], group: Group = None) -> list[str]:
    """The names of the tensors whose bits are not the same on all ranks, in order.

    Each tensor is reduced to 64 bits where it lies, and only those travel. Raises UsageError where the ranks do not
    pass the same names, dtypes and shapes.
    """
    named = list(named_tensors)
    if size_of(group) == 1 or not _agree([(name, str(t.dtype), tuple(t.shape)) for name, t in named], group):
        return []
    own = torch.stack([digest(tensor).cpu() for _, tensor in named])
    rows = torch.stack(_gather_rows(own, group))
    differs = (rows != rows[0]).any(dim=0).tolist()
    return [name for (name, _), different in zip(named, differs) if different]


def _agree(items: list[Any], group: Group) -> bool:
    """True where all ranks pass the same non-empty list, False where they pass an empty one; else UsageError on all."""
    digest_bytes = hashlib.sha256(repr(items).encode()).digest()[:8]
    rows = _gather_rows(torch.tensor([int.from_bytes(digest_bytes, "big", signed=True)]), group)
    if any(not torch.equal(row, rows[0]) for row in rows):
        lists = gather_objects(items, group)
        counts = ", ".join(f"rank {rank}: {len(own)}" for rank, own in enumerate(lists))
        first = next((at for at in range(min(map(len, lists))) if any(own[at] != lists[0][at] for own in lists)), None)
        shown = "" if first is None else "; ".join(f"rank {rank}: {own[first]}" for rank, own in enumerate(lists))
        raise UsageError(
            f"The ranks do not hold the same tensors (how many: {counts}). "
            + (f"The first that differs is number {first}: {shown}. " if shown else "")
            + "Build the model in the same way on every rank."
        )
    return bool(items)
