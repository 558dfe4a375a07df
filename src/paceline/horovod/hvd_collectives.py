"""Horovod's collectives on tensors: allreduce, allgather, broadcast, alltoall, reducescatter, barrier, and handles.

A function without `_async` waits, and is differentiable as Horovod's is:

    forward                       backward, of the gradient g with respect to the result
    allreduce, Average or Sum     the same allreduce of g
    allgather                     this process's rows of the average of g
    broadcast                     the average of g on the root, zero elsewhere
    alltoall                      g's rows go back to where they came from
    reducescatter                 g's are gathered; with Sum times the number of processes

Integers are averaged as Horovod does it: the sum is divided, and the fraction is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from paceline.comm import collectives
from paceline.errors import SettingError, UsageError
from paceline.horovod import hvd_world, named_operations
from paceline.horovod.gradient_compression import Compression
from paceline.horovod.hvd_world import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from paceline.horovod.named_operations import Operation

_NAMES = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}

ADASUM = (
    "op=hvd.Adasum combines gradients by a rule of its own, which paceline.horovod does not have. Use op=hvd.Average, "
    "and multiply the learning rate by hvd.size() as Horovod's examples do (they leave that out for Adasum)."
)


def operation_of(op: Any, call: str, average: bool | None = None) -> ReduceOp:
    """The operation that `op` and the older `average` mean. Raises SettingError for what there is not."""
    if average is not None:
        if op is not None:
            raise SettingError(f"{call}(average={average!r}, op={op!r}): both say how to combine. Leave average out.")
        op = Average if average else Sum
    op = Average if op is None else op
    try:
        chosen = ReduceOp(op)
    except ValueError:
        raise SettingError(f"{call}(op={op!r}): it is hvd.Average, Sum, Min, Max or Product.") from None
    if chosen is Adasum and hvd_world.members() > 1:
        raise SettingError(f"{call}: {ADASUM}")
    return Average if chosen is Adasum else chosen  # of one process's tensor: the tensor


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor.double() * factor).trunc_())


class _Reduction:
    """One allreduce of some tensors, in place."""

    def __init__(self, call: str, op: Any, average: bool | None, pre: float, post: float, process_set: Any) -> None:
        hvd_world.members()
        hvd_world.check_process_set(process_set, call)
        self.op, self.pre, self.post = operation_of(op, call, average), pre, post

    def signature(self, tensors: Sequence[Tensor]) -> str:
        forms = ", ".join(f"{_short(t.dtype)} {tuple(t.shape)}" for t in tensors)
        scales = f", times {self.pre} before" * (self.pre != 1) + f", times {self.post} after" * (self.post != 1)
        return f"{self.op.name} of {forms}{scales}"

    def form(self, tensors: Sequence[Tensor]) -> Any:
        """For processes that have joined; None: they cannot take part."""
        if self.op not in (Average, Sum):
            return None
        return [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]

    def act(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor is replaced by the result."""
        with torch.no_grad():
            for tensor in tensors:
                _scaled(tensor, self.pre)
            for pending in [collectives.all_reduce(t, _NAMES[self.op], async_op=True) for t in tensors]:
                pending.wait()
            factor = self.post / collectives.size_of() if self.op is Average else self.post
            for tensor in tensors:
                _scaled(tensor, factor)


def stand_in(form: Any) -> None:
    """Takes part in an operation of that form with zeros."""
    if form != "barrier":
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in form]
        for pending in [collectives.all_reduce(tensor, async_op=True) for tensor in zeros]:
            pending.wait()


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(tensor: Tensor, call: str) -> Tensor:
    _check(tensor, call)
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _check(tensor: Any, call: str) -> None:
    if not isinstance(tensor, Tensor):
        raise SettingError(
            f"{call} takes a tensor, and was given {type(tensor).__name__}. Write torch.tensor(value), or use "
            "hvd.broadcast_object or hvd.allgather_object."
        )
    if tensor.is_sparse:
        raise SettingError(f"{call} was given a sparse tensor. Use hvd.sparse_allreduce_async, or tensor.to_dense().")


# ---- allreduce ----


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Operation:
    """A handle of an all-reduce of a copy of the tensor. It begins when it is waited for (`synchronize`, `poll`)."""
    reduction = _Reduction("hvd.allreduce", op, average, prescale_factor, postscale_factor, process_set)
    return _post_reduction("allreduce", name, reduction, [_copy(tensor, "hvd.allreduce")], single=True)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Operation:
    """`allreduce_async` in place."""
    reduction = _Reduction("hvd.allreduce_", op, average, prescale_factor, postscale_factor, process_set)
    _check(tensor, "hvd.allreduce_")
    return _post_reduction("allreduce", name, reduction, [tensor], single=True)


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Operation:
    """`allreduce_async` of several tensors under one name; the result is a list."""
    reduction = _Reduction("hvd.grouped_allreduce", op, average, prescale_factor, postscale_factor, process_set)
    copies = [_copy(tensor, "hvd.grouped_allreduce") for tensor in tensors]
    return _post_reduction("allreduce", name, reduction, copies)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Operation:
    """`grouped_allreduce_async` in place."""
    reduction = _Reduction("hvd.grouped_allreduce_", op, average, prescale_factor, postscale_factor, process_set)
    for tensor in tensors:
        _check(tensor, "hvd.grouped_allreduce_")
    return _post_reduction("allreduce", name, reduction, list(tensors))


def _post_reduction(
    kind: str, name: str | None, reduction: _Reduction, tensors: list[Tensor], single: bool = False
) -> Operation:
    def act() -> Any:
        reduction.act(tensors)
        return tensors[0] if single else tensors

    return named_operations.post(kind, name, reduction.signature(tensors), act, reduction.form(tensors))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(grouped_allreduce_async(tensors, name=name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if ReduceOp(ctx.options["op"]) not in (Average, Sum):
            raise UsageError(
                f"hvd.allreduce with op={ctx.options['op']!r} has no gradient. Use hvd.Average or hvd.Sum."
            )
        return (None, None, *_Allreduce.apply(None, ctx.options, *gradients))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Tensor]:
    """The average (or `op`) of all processes' tensors, for each of the list. Differentiable."""
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.allreduce")
    options = {
        "op": operation_of(op, "hvd.allreduce", average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
    }
    for tensor in tensors:
        _check(tensor, "hvd.allreduce")
    small = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(name, options, *[tensor for tensor, _ in small])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, small)]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Tensor:
    """The average (or `op`) of all processes' tensors, of one shape and dtype: a new tensor. Differentiable.

    Args:
        tensor: this process's.
        average: the older way to say Average (True) or Sum (False).
        name: calls of one name belong together; without it calls are numbered.
        compression: hvd.Compression.none or fp16, or a Compressor.
        op: hvd.Average (the default), Sum, Min, Max or Product.
        prescale_factor: the tensor is multiplied by it before the sum.
        postscale_factor: the result is multiplied by it.
        process_set: only hvd.global_process_set.

    Raises:
        UsageError: the processes do not make the same call.
    """
    options = (compression, op, prescale_factor, postscale_factor, process_set)
    return grouped_allreduce([tensor], average, name, *options)[0]


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Tensor:
    """`allreduce` in place. Not differentiable."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    return cast(Tensor, synchronize(handle))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> list[Tensor]:
    """`grouped_allreduce` in place. Not differentiable."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return cast(list[Tensor], synchronize(handle))


def sparse_sum(tensor: Tensor, group: Any = None) -> Tensor:
    """The sum of all processes' sparse tensors of one shape: their entries, joined and added."""
    tensor = tensor.detach().coalesce()
    indices = collectives.gather_uneven(tensor.indices().t().contiguous(), group)
    values = collectives.gather_uneven(tensor.values(), group)
    return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()


def sparse_allreduce_async(tensor: Tensor, name: str | None, op: Any, process_set: Any = None) -> Operation:
    """A handle of an all-reduce of sparse tensors (Average or Sum). A call of the handle waits too, as in Horovod."""
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.sparse_allreduce_async")
    chosen = operation_of(op, "hvd.sparse_allreduce_async")
    if chosen not in (Average, Sum):
        raise SettingError(f"hvd.sparse_allreduce_async(op={op!r}): hvd.Average or hvd.Sum.")

    def act() -> Tensor:
        total = sparse_sum(tensor)
        return total / collectives.size_of() if chosen is Average else total

    signature = f"{chosen.name} of sparse {_short(tensor.dtype)} {tuple(tensor.shape)}"
    return named_operations.post("sparse_allreduce", name, signature, act)


# ---- allgather ----


def allgather_async(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Operation:
    """A handle of `allgather`, of a copy of the tensor."""
    return _post_gather("allgather", [_copy(tensor, "hvd.allgather")], name, process_set, single=True)


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None) -> Operation:
    """A handle of `grouped_allgather`, of copies of the tensors."""
    copies = [_copy(tensor, "hvd.grouped_allgather") for tensor in tensors]
    return _post_gather("allgather", copies, name, process_set)


def _post_gather(
    kind: str, tensors: list[Tensor], name: str | None, process_set: Any, single: bool = False
) -> Operation:
    hvd_world.members()
    hvd_world.check_process_set(process_set, f"hvd.{kind}")

    def act() -> Any:
        joined = [collectives.gather_uneven(tensor) for tensor in tensors]
        return joined[0] if single else joined

    return named_operations.post(kind, name, f"of {len(tensors)} tensors", act)  # gather_uneven compares their shapes


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]
        return tuple(synchronize(grouped_allgather_async(tensors, name)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        averages = _Allreduce.apply(None, {"op": Average}, *gradients)
        everyone = named_operations.call("allgather", None, "lengths", lambda: collectives.gather_objects(ctx.lengths))
        before = [sum(column) for column in zip(*everyone[: collectives.rank_of()])] or [0] * len(ctx.lengths)
        return (None, *[a.narrow(0, start, n) for a, start, n in zip(averages, before, ctx.lengths)])


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None) -> list[Tensor]:
    """`allgather` of each tensor of a list. Differentiable."""
    hvd_world.check_process_set(process_set, "hvd.grouped_allgather")
    for tensor in tensors:
        _check(tensor, "hvd.grouped_allgather")
    return list(_Allgather.apply(name, *tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: Any = None) -> Tensor:
    """All processes' tensors, joined along dimension 0 in rank order; lengths along it may differ. Differentiable."""
    _check(tensor, "hvd.allgather")
    return grouped_allgather([tensor], name, process_set)[0]


# ---- broadcast ----


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Operation:
    """A handle of `broadcast`, into a copy of the tensor."""
    return broadcast_async_(_copy(tensor, "hvd.broadcast"), root_rank, name, process_set)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Operation:
    """A handle of `broadcast_`."""
    check_root(root_rank, "hvd.broadcast")
    hvd_world.check_process_set(process_set, "hvd.broadcast")
    _check(tensor, "hvd.broadcast")

    def act() -> Tensor:
        collectives.broadcast_tensors([tensor], root_rank)
        return tensor

    signature = f"{_short(tensor.dtype)} {tuple(tensor.shape)} from rank {root_rank}"
    return named_operations.post("broadcast", name, signature, act)


def check_root(root_rank: Any, call: str) -> None:
    """Raises SettingError where there is no such rank."""
    size = hvd_world.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise SettingError(f"{call}(root_rank={root_rank!r}): there are ranks 0 to {size - 1}. Give one of them.")


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None) -> Tensor:
        ctx.root = root_rank
        return cast(Tensor, synchronize(broadcast_async(tensor, root_rank, name)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (average,) = _Allreduce.apply(None, {"op": Average}, gradients[0])
        return average if collectives.rank_of() == ctx.root else average * 0, None, None


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Tensor:
    """Rank `root_rank`'s tensor, on every process: a new tensor. Differentiable."""
    hvd_world.check_process_set(process_set, "hvd.broadcast")
    _check(tensor, "hvd.broadcast")
    return cast(Tensor, _Broadcast.apply(tensor, root_rank, name))


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: Any = None) -> Tensor:
    """`broadcast` in place. Not differentiable."""
    return cast(Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


# ---- alltoall ----


def alltoall_async(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None) -> Operation:
    """A handle of `alltoall`; its result is the pair (rows, received splits)."""
    hvd_world.check_process_set(process_set, "hvd.alltoall")
    tensor = _copy(tensor, "hvd.alltoall")
    if tensor.dim() == 0:
        raise SettingError("hvd.alltoall sends rows of a tensor, and one of shape () has none: tensor.reshape(1).")
    outwards = _splits(tensor, splits)

    def act() -> tuple[Tensor, Tensor]:
        rows, inwards = collectives.exchange_rows(tensor, outwards)
        return rows, torch.tensor(inwards, dtype=torch.int32)

    signature = f"rows of {_short(tensor.dtype)} {tuple(tensor.shape[1:])}"
    return named_operations.post("alltoall", name, signature, act)


def _splits(tensor: Tensor, splits: Any) -> list[int]:
    size, rows = hvd_world.size(), tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % size:
            raise SettingError(
                f"hvd.alltoall: {rows} rows cannot be cut into {size} equal parts, one for each process. Give splits, "
                "the number of rows for each."
            )
        return [rows // size] * size
    listed = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(listed) != size or min(listed) < 0 or sum(listed) != rows:
        raise SettingError(
            f"hvd.alltoall(splits={listed}): it is one number of rows for each of {size} processes, {rows} in all."
        )
    return listed


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None) -> tuple[Tensor, Tensor]:
        rows, received = synchronize(alltoall_async(tensor, splits, name))
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return rows, received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Alltoall.apply(gradients[0], ctx.received, None)[0], None, None


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the tensor to each process, and receive theirs, joined in rank order. Differentiable.

    Args:
        tensor: (rows, ...).
        splits: how many rows each process gets, in rank order; without it equal parts.
        name: see allreduce.
        process_set: only hvd.global_process_set.

    Returns:
        the received rows; with `splits` also how many came from each process.
    """
    hvd_world.check_process_set(process_set, "hvd.alltoall")
    _check(tensor, "hvd.alltoall")
    rows, received = _Alltoall.apply(tensor, splits, name)
    return rows if splits is None else (rows, received)


# ---- reducescatter ----


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """A handle of `grouped_reducescatter`, of copies of the tensors."""
    return _post_scatter(tensors, name, op, process_set, prescale_factor, postscale_factor)


def _post_scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: Any,
    process_set: Any,
    prescale_factor: float,
    postscale_factor: float,
    single: bool = False,
) -> Operation:
    reduction = _Reduction("hvd.reducescatter", op, None, prescale_factor, postscale_factor, process_set)
    if reduction.op not in (Average, Sum):
        raise SettingError(f"hvd.reducescatter(op={op!r}): hvd.Average or hvd.Sum.")
    copies = [_copy(tensor, "hvd.reducescatter") for tensor in tensors]
    if any(tensor.dim() == 0 for tensor in copies):
        raise SettingError("hvd.reducescatter cuts along dimension 0, and a tensor of shape () has none.")

    def act() -> Any:
        reduction.act(copies)
        parts = [_own_rows(tensor).clone() for tensor in copies]
        return parts[0] if single else parts

    return named_operations.post("reducescatter", name, reduction.signature(copies), act)


def _own_rows(tensor: Tensor) -> Tensor:
    """This process's rows: the first processes have one more where they are not equally many."""
    rank, size = collectives.rank_of(), collectives.size_of()
    least, more = divmod(tensor.shape[0], size)
    return tensor.narrow(0, rank * least + min(rank, more), least + (rank < more))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Operation:
    """A handle of `reducescatter`, of a copy of the tensor."""
    return _post_scatter([tensor], name, op, process_set, prescale_factor, postscale_factor, single=True)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, options: dict[str, Any], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        return tuple(synchronize(grouped_reducescatter_async(tensors, name, **options)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factor = ctx.options["prescale_factor"] * ctx.options["postscale_factor"]
        factor *= collectives.size_of() if ReduceOp(ctx.options["op"]) is Sum else 1
        return (None, None, *_Allgather.apply(None, *[gradient * factor for gradient in gradients]))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each tensor of a list. Differentiable."""
    hvd_world.check_process_set(process_set, "hvd.reducescatter")
    options = {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    for tensor in tensors:
        _check(tensor, "hvd.reducescatter")
    small = [compression.compress(tensor) for tensor in tensors]
    reduced = _Reducescatter.apply(name, options, *[tensor for tensor, _ in small])
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(reduced, small)]


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This process's part, along dimension 0, of the average (or sum) of all processes' tensors. Differentiable.

    It sends what an allreduce sends.
    """
    options = (compression, op, process_set, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], name, *options)[0]


# ---- waiting ----


def poll(handle: Operation) -> bool:
    """Would `synchronize` return at once? Looks at what the others wait for, and so waits until they wait."""
    return named_operations.ask(_handle(handle, "hvd.poll"))


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result."""
    return named_operations.wait(_handle(handle, "hvd.synchronize"))


def _handle(handle: Any, call: str) -> Operation:
    if not isinstance(handle, Operation):
        raise SettingError(f"{call}({handle!r}): it takes what an hvd function with _async in its name has returned.")
    return handle


def barrier(process_set: Any = None) -> None:
    """Return when every process has come here, or has joined."""
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.barrier")
    named_operations.call("barrier", None, "", lambda: None, "barrier")  # the round is the barrier
