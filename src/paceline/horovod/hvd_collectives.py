"""Horovod's collectives on tensors: allreduce, allgather, broadcast, alltoall, reducescatter, barrier, and handles.

Each collective is written once, as a planner: a function that takes a list of tensors and the settings, and returns a
`_Plan` with the signature that must match on all processes, the communication, and the gradient. The public functions
are made from the planners:

    grouped_x_async    _posted(_x)                      returns a handle; works on copies of the tensors
    grouped_x_async_   _posted(_x, in_place=True)
    grouped_x_         _waited(grouped_x_async_)        waits
    grouped_x          _differentiable(_x)              waits; new tensors, through which gradients flow
    x, x_              _single(grouped_x), ...          one tensor in place of a list
    x_async, x_async_  _single_handle(grouped_x_async), ...

The gradients are Horovod's:

    forward                       backward, of the gradient g with respect to the result
    allreduce, Average or Sum     the same allreduce of g
    allgather                     this process's rows of the average of g
    broadcast                     the average of g on the root, zero elsewhere
    alltoall                      each row of g returns to the process that sent the row
    reducescatter                 all processes' g, gathered; for Sum, multiplied by the number of processes

Integers are averaged as in Horovod: the sum is divided and truncated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.comm import gathering
from paceline.comm.group import Group
from paceline.comm.mesh import world_group
from paceline.errors import SettingError, UsageError
from paceline.horovod import hvd_world, named_operations
from paceline.horovod.gradient_compression import Compression
from paceline.horovod.hvd_world import Adasum, Average, Max, Min, Product, ReduceOp, Sum
from paceline.horovod.named_operations import Operation

P = ParamSpec("P")


class _Plan(NamedTuple):
    """One call of a collective."""

    name: str | None
    process_set: Any
    signature: Sequence[str]  # descriptions that must be the same on all processes
    act: Callable[[], Sequence[Tensor]]  # communicates, and returns the results; may overwrite the tensors
    backward: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from the results' gradients to the tensors' gradients
    form: Any = None  # information for a joined process to take part; None: a joined process cannot take part


_Planner = Callable[Concatenate[Sequence[Tensor], P], _Plan]
_Grouped = Callable[Concatenate[Sequence[Tensor], P], list[Tensor]]


# ---- construction of the public functions ----


def _posted(planner: _Planner[P], in_place: bool = False) -> Callable[Concatenate[Sequence[Tensor], P], Operation]:
    def post(tensors: Sequence[Tensor], *args: P.args, **options: P.kwargs) -> Operation:
        return _begin(planner, tensors, in_place, *args, **options)[0]

    return _public(post, f"grouped{planner.__name__}_{'async_' if in_place else 'async'}", planner)


def _begin(
    planner: _Planner[P], tensors: Sequence[Tensor], in_place: bool, *args: P.args, **options: P.kwargs
) -> tuple[Operation, _Plan]:
    hvd_world.members()
    kind = planner.__name__.removeprefix("_")
    used = _checked(tensors, f"hvd.{kind}")
    if not in_place:
        used = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in used]
    plan = planner(used, *args, **options)
    hvd_world.check_process_set(plan.process_set, f"hvd.{kind}")
    return named_operations.post(kind, plan.name, plan.signature, plan.act, plan.form), plan


def _waited(asynchronous: Callable[P, Operation]) -> Callable[P, list[Tensor]]:
    def wait(*args: P.args, **options: P.kwargs) -> list[Tensor]:
        results: list[Tensor] = named_operations.wait(asynchronous(*args, **options))
        return results

    return _public(wait, asynchronous.__name__.replace("async_", ""), asynchronous)


def _differentiable(planner: _Planner[P]) -> _Grouped[P]:
    def apply(tensors: Sequence[Tensor], *args: P.args, **options: P.kwargs) -> list[Tensor]:
        return list(_Collective.apply(lambda own: _begin(planner, own, False, *args, **options), *tensors))

    return _public(apply, f"grouped{planner.__name__}", planner)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Callable[[Any], tuple[Operation, _Plan]], *tensors: Tensor) -> tuple[Tensor, ...]:
        operation, plan = begin(tensors)
        ctx.gradient = plan.backward
        return tuple(named_operations.wait(operation))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, *ctx.gradient(gradients))


def _single(grouped: _Grouped[P]) -> Callable[Concatenate[Tensor, P], Tensor]:
    def call(tensor: Tensor, *args: P.args, **options: P.kwargs) -> Tensor:
        return grouped([tensor], *args, **options)[0]

    return _public(call, grouped.__name__.removeprefix("grouped_"), grouped)


def _single_handle(
    grouped: Callable[Concatenate[Sequence[Tensor], P], Operation],
) -> Callable[Concatenate[Tensor, P], Operation]:
    def post(tensor: Tensor, *args: P.args, **options: P.kwargs) -> Operation:
        handle = grouped([tensor], *args, **options)
        return handle.then(lambda results: results[0] if len(results) == 1 else tuple(results))

    return _public(post, grouped.__name__.removeprefix("grouped_"), grouped)


F = TypeVar("F", bound=Callable[..., Any])


def _public(made: F, name: str, like: Callable[..., Any]) -> F:
    """Give `made` this name, and the signature and docstring of `like`, for help() and editors."""
    signature = inspect.signature(made)
    leading = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    settings = list(inspect.signature(like).parameters.values())[len(leading) :]
    made.__signature__ = signature.replace(parameters=[*leading, *settings])  # type: ignore[attr-defined]
    made.__name__ = made.__qualname__ = name
    made.__doc__ = like.__doc__
    if name.endswith(("_", "async")):
        kind = name.removeprefix("grouped_").rstrip("_").removesuffix("async").rstrip("_")
        several = " for each tensor of a list" * name.startswith("grouped_")
        where = " in place" if name.endswith("_") else " on a copy"
        handle = ": returns a handle, for `synchronize` and `poll`" * ("async" in name)
        made.__doc__ = f"`{kind}`{several}{where}{handle}. Not differentiable. For the settings see `{kind}`."
    return made


def _checked(tensors: Sequence[Any], call: str) -> list[Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise SettingError(
                f"{call} received {type(tensor).__name__} instead of a tensor. Write torch.tensor(value), or use "
                "hvd.broadcast_object or hvd.allgather_object."
            )
        if tensor.is_sparse:
            raise SettingError(f"{call} received a sparse tensor. Use hvd.sparse_allreduce_async or tensor.to_dense().")
    return list(tensors)


def _compressed(
    tensors: Sequence[Tensor], compression: Any, call: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Compress the tensors, apply `call`, and decompress the results."""
    small = [compression.compress(tensor) for tensor in tensors]
    found = call([tensor for tensor, _ in small])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(found, small)]


def form_of(tensor: Tensor) -> str:
    """Describe dtype and shape, such as "float32 (3, 4)"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


# ---- allreduce ----

_NAMES = {Average: "sum", Sum: "sum", Min: "min", Max: "max", Product: "product"}

ADASUM = (
    "paceline.horovod does not support op=hvd.Adasum. Use op=hvd.Average, and multiply the learning rate by "
    "hvd.size(), as Horovod's examples do (except with Adasum)."
)


def operation_of(op: Any, call: str, average: bool | None = None) -> ReduceOp:
    """Return the operation for `op` and the older argument `average`. Raises SettingError for an unknown operation."""
    if average is not None:
        if op is not None:
            raise SettingError(f"{call}(average={average!r}, op={op!r}): give only one of them. Leave out average.")
        op = Average if average else Sum
    op = Average if op is None else op
    try:
        chosen = ReduceOp(op)
    except ValueError:
        raise SettingError(f"{call}(op={op!r}): must be hvd.Average, Sum, Min, Max or Product.") from None
    if chosen is Adasum and hvd_world.members() > 1:
        raise SettingError(f"{call}: {ADASUM}")
    return Average if chosen is Adasum else chosen  # on one process, both return the tensor unchanged


def _scale(tensor: Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc_())


@torch.no_grad()
def _reduce(tensors: Sequence[Tensor], op: ReduceOp, before: float = 1.0, after: float = 1.0) -> Sequence[Tensor]:
    """All-reduce each tensor in place. before, after: factors for the tensors and for the results."""
    for tensor in tensors:
        _scale(tensor, before)
    for pending in [world_group().all_reduce(tensor, _NAMES[op], async_op=True) for tensor in tensors]:
        pending.wait()
    for tensor in tensors:
        _scale(tensor, after / world_group().size if op is Average else after)
    return tensors


def stand_in(form: Any) -> None:
    """Contribute zeros to an operation with this form."""
    if form != "barrier":
        _reduce([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in form], Sum)


def _described(op: ReduceOp, tensors: Sequence[Tensor], before: float, after: float) -> list[str]:
    scales = f", times {before} before" * (before != 1) + f", times {after} after" * (after != 1)
    return [f"{op.name} of {', '.join(map(form_of, tensors))}{scales}"]


def _allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> _Plan:
    chosen, factors = operation_of(op, "hvd.allreduce", average), (prescale_factor, postscale_factor)
    adds = chosen in (Average, Sum)

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        if not adds:
            raise UsageError(f"hvd.allreduce with op={chosen!r} has no gradient. Use hvd.Average or hvd.Sum.")
        return _new_allreduce(gradients, None, None, chosen, *factors)

    form = [(tuple(t.shape), t.dtype, t.device.type) for t in tensors] if adds else None
    signature = _described(chosen, tensors, *factors)
    return _Plan(name, process_set, signature, lambda: _reduce(tensors, chosen, *factors), backward, form)


_new_allreduce = _differentiable(_allreduce)


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
    """Return the average (or `op`) of all processes' tensors as new tensors. Differentiable.

    Shapes and dtypes must be the same on all processes. `allreduce` takes and returns a tensor, `grouped_allreduce` a
    list of tensors.

    Args:
        tensor, tensors: the tensor or tensors of this process.
        average: older alternative to `op`: True for Average, False for Sum.
        name: calls with the same name are matched; calls without a name are matched by their number.
        compression: hvd.Compression.none or fp16, or a Compressor.
        op: hvd.Average (the default), Sum, Min, Max or Product.
        prescale_factor: factor for the tensors before the sum.
        postscale_factor: factor for the results.
        process_set: only hvd.global_process_set.

    Raises:
        UsageError: the processes do not make the same call.
    """
    settings = (average, name, op, prescale_factor, postscale_factor, process_set)
    tensors = _checked(tensors, "hvd.allreduce")
    return _compressed(tensors, compression, lambda small: _new_allreduce(small, *settings))


grouped_allreduce_async = _posted(_allreduce)
grouped_allreduce_async_ = _posted(_allreduce, in_place=True)
grouped_allreduce_ = _waited(grouped_allreduce_async_)
allreduce = _single(grouped_allreduce)
allreduce_ = _single(grouped_allreduce_)
allreduce_async = _single_handle(grouped_allreduce_async)
allreduce_async_ = _single_handle(grouped_allreduce_async_)


def sparse_sum(tensor: Tensor, group: Group) -> Tensor:
    """Return the sum of all processes' sparse tensors (of the same shape): gather their entries and coalesce them."""
    tensor = tensor.detach().coalesce()
    indices = gathering.gather_uneven(tensor.indices().t().contiguous(), group)
    values = gathering.gather_uneven(tensor.values(), group)
    return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False).coalesce()


def sparse_allreduce_async(tensor: Tensor, name: str | None, op: Any, process_set: Any = None) -> Operation:
    """All-reduce sparse tensors (Average or Sum). Returns a handle. As in Horovod, calling the handle waits for the
    result and returns it."""
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.sparse_allreduce_async")
    chosen = operation_of(op, "hvd.sparse_allreduce_async")
    if chosen not in (Average, Sum):
        raise SettingError(f"hvd.sparse_allreduce_async(op={op!r}): must be hvd.Average or hvd.Sum.")

    def act() -> Tensor:
        total = sparse_sum(tensor, world_group())
        return total / world_group().size if chosen is Average else total

    return named_operations.post("sparse_allreduce", name, [f"{chosen.name} of sparse {form_of(tensor)}"], act)


# ---- allgather ----


def _allgather(tensors: Sequence[Tensor], name: str | None = None, process_set: Any = None) -> _Plan:
    """Concatenate all processes' tensors along dimension 0, in rank order. Differentiable.

    Lengths along dimension 0 may differ. `allgather` takes and returns a tensor, `grouped_allgather` a list of tensors.
    Other arguments as for `allreduce`.
    """
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors]

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        averages = grouped_allreduce(gradients)
        everyone = named_operations.call("allgather", None, ["lengths"], lambda: world_group().gather(lengths))
        before = [sum(column) for column in zip(*everyone[: world_group().rank])] or [0] * len(lengths)
        return [average.narrow(0, start, n) for average, start, n in zip(averages, before, lengths)]

    def act() -> Sequence[Tensor]:
        return [gathering.gather_uneven(tensor, world_group()) for tensor in tensors]  # raises if shapes differ

    return _Plan(name, process_set, [f"of {len(tensors)} tensors"], act, backward)


grouped_allgather = _differentiable(_allgather)
grouped_allgather_async = _posted(_allgather)
allgather = _single(grouped_allgather)
allgather_async = _single_handle(grouped_allgather_async)


# ---- broadcast ----


def check_root(root_rank: Any, call: str) -> None:
    """Raise SettingError if there is no such rank."""
    size = hvd_world.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise SettingError(f"{call}(root_rank={root_rank!r}): must be a rank from 0 to {size - 1}.")


def _broadcast(tensors: Sequence[Tensor], root_rank: int, name: str | None = None, process_set: Any = None) -> _Plan:
    """Return a copy of rank `root_rank`'s tensor on every process. Differentiable. Arguments as for `allreduce`."""
    check_root(root_rank, "hvd.broadcast")

    def act() -> Sequence[Tensor]:
        world_group().broadcast_tensors(tensors, root_rank)
        return tensors

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return [average * (world_group().rank == root_rank) for average in grouped_allreduce(gradients)]

    return _Plan(name, process_set, [*map(form_of, tensors), f"from rank {root_rank}"], act, backward)


broadcast = _single(_differentiable(_broadcast))
broadcast_async = _single_handle(_posted(_broadcast))
broadcast_async_ = _single_handle(_posted(_broadcast, in_place=True))
broadcast_ = _single(_waited(_posted(_broadcast, in_place=True)))


# ---- alltoall ----


def _alltoall(tensors: Sequence[Tensor], splits: Any = None, name: str | None = None, process_set: Any = None) -> _Plan:
    """Plan an alltoall of one tensor. The results are the received rows, and the number of rows from each process."""
    (tensor,) = tensors
    if tensor.dim() == 0:
        raise SettingError("hvd.alltoall sends rows, but a tensor of shape () has none. Use tensor.reshape(1).")
    outwards = _splits(tensor, splits)
    inwards: list[int] = []

    def act() -> Sequence[Tensor]:
        rows, inwards[:] = gathering.exchange_rows(tensor, outwards, world_group())
        return rows, torch.tensor(inwards, dtype=torch.int32)

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return _new_alltoall(gradients[:1], inwards)[:1]

    return _Plan(name, process_set, [f"rows of {form_of(tensor[:0])}"], act, backward)


_new_alltoall = _differentiable(_alltoall)


def _splits(tensor: Tensor, splits: Any) -> list[int]:
    size, rows = hvd_world.size(), tensor.shape[0]
    if splits is None or (isinstance(splits, Tensor) and splits.numel() == 0):
        if rows % size:
            raise SettingError(
                f"hvd.alltoall: {rows} rows cannot be divided evenly among {size} processes. Give splits, the number "
                "of rows for each process."
            )
        return [rows // size] * size
    listed = [int(count) for count in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    if len(listed) != size or min(listed) < 0 or sum(listed) != rows:
        raise SettingError(
            f"hvd.alltoall(splits={listed}): give a number of rows for each of the {size} processes, {rows} in total."
        )
    return listed


def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows of the tensor to each process, and receive rows from each, in rank order. Differentiable.

    Args:
        tensor: (rows, ...).
        splits: the number of rows for each process, in rank order. Default: equal numbers.
        name: see allreduce.
        process_set: only hvd.global_process_set.

    Returns:
        The received rows; with `splits` also the number of rows from each process.
    """
    rows, received = _new_alltoall([tensor], splits, name, process_set)
    return rows if splits is None else (rows, received)


alltoall_async = _single_handle(_posted(_alltoall))


# ---- reducescatter ----


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> _Plan:
    chosen, factors = operation_of(op, "hvd.reducescatter"), (prescale_factor, postscale_factor)
    if chosen not in (Average, Sum):
        raise SettingError(f"hvd.reducescatter(op={op!r}): must be hvd.Average or hvd.Sum.")
    if any(tensor.dim() == 0 for tensor in tensors):
        raise SettingError(
            "hvd.reducescatter splits along dimension 0, but a tensor of shape () has none. Use tensor.reshape(1)."
        )

    def act() -> Sequence[Tensor]:
        return [_own_rows(tensor).clone() for tensor in _reduce(tensors, chosen, *factors)]

    def backward(gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        factor = prescale_factor * postscale_factor * (world_group().size if chosen is Sum else 1)
        return grouped_allgather([gradient * factor for gradient in gradients])

    return _Plan(name, process_set, _described(chosen, tensors, *factors), act, backward)


_new_reducescatter = _differentiable(_reducescatter)


def _own_rows(tensor: Tensor) -> Tensor:
    """Return this process's rows. If the rows cannot be divided evenly, the first processes get one more each."""
    rank, size = world_group().rank, world_group().size
    least, more = divmod(tensor.shape[0], size)
    return tensor.narrow(0, rank * least + min(rank, more), least + (rank < more))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this process's shard of the average (or sum) of all processes' tensors. Differentiable.

    The tensors are sharded along dimension 0. The traffic is that of an allreduce. `reducescatter` takes and returns a
    tensor, `grouped_reducescatter` a list of tensors. Arguments as for `allreduce`.
    """
    settings = (name, op, process_set, prescale_factor, postscale_factor)
    tensors = _checked(tensors, "hvd.reducescatter")
    return _compressed(tensors, compression, lambda small: _new_reducescatter(small, *settings))


grouped_reducescatter_async = _posted(_reducescatter)
reducescatter = _single(grouped_reducescatter)
reducescatter_async = _single_handle(grouped_reducescatter_async)


# ---- waiting ----


def poll(handle: Operation) -> bool:
    """Return whether the operation is complete, so that `synchronize` would not wait.

    This call waits until all other processes wait for an operation or call `poll`.
    """
    return named_operations.ask(_handle(handle, "hvd.poll"))


def synchronize(handle: Operation) -> Any:
    """Wait for an operation, and return its result."""
    return named_operations.wait(_handle(handle, "hvd.synchronize"))


def _handle(handle: Any, call: str) -> Operation:
    if not isinstance(handle, Operation):
        raise SettingError(f"{call}({handle!r}): not a handle. Pass the result of a function with _async in its name.")
    return handle


def barrier(process_set: Any = None) -> None:
    """Wait until every process has called `barrier` or `join`."""
    hvd_world.members()
    hvd_world.check_process_set(process_set, "hvd.barrier")
    named_operations.call("barrier", None, [], lambda: None, "barrier")  # the exchange of a round is the barrier
