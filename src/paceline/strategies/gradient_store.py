"""Where the gradients of the current global batch are stored, and the operations on them.

The gradient of a user's parameter p is usually in `p.grad`. A strategy may store it elsewhere:

    holders     in `.grad` of another tensor, which holds this process's part of the gradient (an engine's shards)
    replicas    also in `.grad` of copies of p on further devices of this process; operations include these gradients
    DTensors    p, or the tensor in its place, is sharded over processes, and so is its `.grad`
    sums        each data shard's gradient is a leaf of a tree, complete after the last shard (comm/tree_sums.py)

Elementwise operations work on the local part of a gradient. A property of all elements, such as a norm or finiteness,
is then reduced over the processes that hold the other parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import dtensor
from paceline.comm.group import ALONE, Group
from paceline.comm.mesh import group_of
from paceline.comm.scalars import wide_dtype
from paceline.comm.tree_sums import TreeSums
from paceline.torch_private.core import foreach_add_, foreach_mul_, foreach_norm, unscale_and_flag_

Grads = list[Tensor | None]
"""For each tensor that can hold a gradient, on all replicas: its gradient or None. In the order of `all_holders`."""

Factor = float | Tensor
"""A number, or a 0-dim tensor."""

_Groups = tuple[Group, ...]


class GradientStore:
    """The gradients of a run. A strategy makes the store, and the step accesses gradients only through it."""

    def __init__(
        self,
        *,
        replicas: Sequence[Mapping[Tensor, Tensor]] = (),
        model_parallel: Group = ALONE,
        aliased: bool = False,
        reduces_each: bool = False,
        sums: TreeSums | None = None,
    ) -> None:
        # For each further replica of this process: the user's parameter -> its copy. Mutated in place, never rebound.
        self.replicas = replicas
        self.holders: dict[Tensor, Tensor] = {}  # user's parameter -> the tensor that holds its gradient, if another
        self.model_parallel = model_parallel  # the processes with gradients of other parameters
        self.aliased = aliased  # whether gradients alias buckets, which the next backward overwrites
        self.reduces_each = reduces_each  # whether every micro-batch is reduced over the processes, not only the last
        self.sums = sums  # adds up the shards of a reproducible run in a fixed order
        # Multiplies all loss weights. If an engine averages over n replicas, a factor of n undoes that.
        self.factor = 1.0
        self.loss_scale = 1.0  # fp16's loss scale: multiplies all loss weights of this global batch
        self.samples: Factor = 0.0  # the number of examples, or tokens, in the mean that this gradient belongs to
        self.parameters: list[Tensor] = []  # the tensors that hold the gradients of all prepared parameters

    def follow(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Set the prepared parameters. Returns the names of parameters and of the tensors that hold their gradients."""
        self.parameters = self.of(names)
        return {**names, **dict(zip(self.parameters, names.values(), strict=True))}

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The tensors that hold the gradients of these parameters."""
        if not self.holders:
            return list(parameters)
        return [self.holders.get(p, p) for p in parameters]

    def all_holders(self) -> list[Tensor]:
        """All tensors that hold gradients, in a fixed order: first `self.parameters`, then the copies on replicas."""
        if not self.replicas:
            return self.parameters
        return [*self.parameters, *(copies[p] for copies in self.replicas for p in self.parameters if p in copies)]

    # --- accounts

    def any(self) -> bool:
        """Whether a parameter has a gradient."""
        return any_gradient(self.parameters)

    def any_left(self) -> bool:
        """Whether a gradient has a nonzero element. Waits for the device."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return any(bool(dtensor.local(grad).any()) for grad in grads)

    def pop(self) -> Grads | None:
        """Remove all gradients and return them; None if there are none."""
        holders = self.all_holders()
        if not any_gradient(holders):
            return None
        grads = [p.grad.clone() if self.aliased and p.grad is not None else p.grad for p in holders]
        for p in holders:
            p.grad = None
        return grads

    def restore(self, grads: Iterable[Tensor | None]) -> None:
        """Put back gradients from `pop`. The store must have no gradients now."""
        for p, grad in zip(self.all_holders(), grads, strict=False):
            p.grad = grad

    def add(self, grads: Grads) -> None:
        """Add these gradients to the stored gradients, in place."""
        both: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for p, grad in zip(self.all_holders(), grads, strict=False):
            if p.grad is None:
                p.grad = grad
            elif grad is not None:
                sums, addends = both.setdefault(grad.device, ([], []))
                sums.append(p.grad)
                addends.append(grad)
        for sums, addends in both.values():  # per device: torch adds mixed devices one by one
            foreach_add_(list(map(dtensor.local, sums)), list(map(dtensor.local, addends)))

    def pop_replica(self, replica: int) -> Grads:
        """Remove and return the gradients of one replica of this process.

        A parameter that has left the model (for example, retied) has no copy, and gets None.
        """
        owners: Sequence[Tensor | None] = self.parameters
        if replica:
            copies = self.replicas[replica - 1]
            owners = [copies.get(p) for p in self.parameters]
        grads = [None if p is None else p.grad for p in owners]
        for p, grad in zip(owners, grads, strict=True):
            if p is not None and grad is not None:
                p.grad = None
        return grads

    def scale(self, factor: Factor) -> None:
        """Multiply all gradients, in place."""
        scale_([p.grad for p in self.all_holders() if p.grad is not None], factor)

    # --- before and after an update

    def found_inf(self, holders: Sequence[Tensor], device: torch.device, flag: Tensor | None) -> Tensor:
        """(): nonzero if an element of these tensors' gradients is not finite. Does not wait for the device.

        The result covers all processes that hold a part of these gradients.

        Args:
            device: the device of the result.
            flag: () float32. If one fused operation can check all gradients, it sets `flag` to 1 or leaves it
                unchanged, and `flag` is returned. If flag is None, or no fused operation supports the gradients
                (bfloat16 on CUDA), the result comes from the largest magnitude, which is inf or NaN if an element is.
                For 160 gradients this takes the host eight times longer.
        """
        grads = [grad for p in holders if (grad := p.grad) is not None]
        if flag is not None and self.model_parallel is ALONE and _flagged(grads, flag):  # nearly always
            return flag
        dense = [
            g.coalesce().values() if g.is_sparse else torch.view_as_real(g) if g.is_complex() else g
            for g in _local(grads)
        ]
        fused = _FUSED.get(device.type, frozenset())
        if flag is not None and all(g.device == device and g.dtype in fused for g in dense):
            if dense:
                unscale_and_flag_(dense, flag, _one(device))
            return self._on_any_process(flag, grads)
        return self._on_any_process(not_finite(dense, device), grads)

    def norm(self, holders: Sequence[Tensor], device: torch.device) -> Tensor:
        """(): the 2-norm of these tensors' gradients together, over all processes that hold parts of them.

        It is inf or NaN if an element is. device: the device of the result on a process without gradients.
        """
        by_groups = self._by_groups([p.grad for p in holders if p.grad is not None])
        if by_groups.keys() == {()}:
            return norm_of(by_groups[()])
        squares = []
        for groups, tensors in by_groups.items():
            norm = norm_of(tensors) if tensors else torch.zeros((), device=device)
            square = norm.to(wide_dtype(norm.device)).square()
            for group in groups:
                group.all_reduce(square)
            squares.append(square)
        return torch.stack(squares).sum().sqrt()

    def clip(self, holders: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale these tensors' gradients, on all replicas, to a norm of at most `max_norm`. norm: their norm now."""
        _clip(holders, max_norm, norm)
        for copies in self.replicas:
            _clip([copies[p] for p in holders if p in copies], max_norm, norm)

    def clear(self, holders: Iterable[Tensor]) -> None:
        """Drop these tensors' gradients, on all replicas."""
        holders = list(holders) if self.replicas else holders
        for p in holders:
            p.grad = None
        for copies in self.replicas:
            for p in holders:
                if p in copies:
                    copies[p].grad = None

    def _by_groups(self, grads: Sequence[Tensor]) -> dict[_Groups, list[Tensor]]:
        """The local parts of the gradients, keyed by the groups of processes that hold the other parts."""
        if self.model_parallel is ALONE and not dtensor.any_sharded(grads):  # nearly always
            return {(): list(grads)}
        others: _Groups = () if self.model_parallel is ALONE else (self.model_parallel,)
        found: dict[_Groups, list[Tensor]] = {others: []} if others else {}
        for grad, part in zip(grads, _local(grads), strict=True):
            found.setdefault(_groups_of(grad) or others, []).append(part)
        return found

    def _on_any_process(self, flag: Tensor, grads: Sequence[Tensor]) -> Tensor:
        """Sum the flag, in place, over all processes that hold a part of one of these gradients.

        A sum, since libraries disagree on the maximum if a value is NaN.
        """
        if self.model_parallel is ALONE and not dtensor.any_sharded(grads):
            return flag
        for group in dict.fromkeys(group for groups in self._by_groups(grads) for group in groups):
            group.all_reduce(flag)
        return flag


def any_gradient(parameters: Collection[Tensor]) -> bool:
    """Whether one of these parameters has a gradient."""
    for p in parameters:  # noqa: SIM110  # in every step: a generator takes twice as long
        if p.grad is not None:
            return True
    return False


def scale_(grads: Sequence[Tensor], factor: Factor) -> None:
    """Multiply gradients in place."""
    if not grads:
        return
    for (device, dtype), alike in _alike(map(dtensor.local, grads)).items():
        foreach_mul_(alike, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """The tensors, grouped by device and dtype. torch's multi-tensor operations need one kernel per group."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def not_finite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """(): NaN if an element of these gradients is inf or NaN, else 0. The gradients must be dense and real."""
    groups = _alike(grad for grad in grads if grad.numel())  # an empty gradient has no maximum
    if not groups:
        return torch.zeros((), device=device)
    tops = [torch.stack(foreach_norm(alike, math.inf)).amax() for alike in groups.values()]
    found = [(top.detach() * 0.0).to(device, torch.float32, non_blocking=True) for top in tops]
    return found[0] if len(found) == 1 else torch.stack(found).sum()


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    """() float32: 1, cached per device."""
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = torch.ones((), dtype=torch.float32, device=device)
    return one


_FUSED = {
    "cpu": frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "cuda": frozenset((torch.float64, torch.float32, torch.float16)),
}
"""Device type -> the dtypes that torch's fused check supports."""


def _flagged(grads: list[Tensor], flag: Tensor) -> bool:
    """Set the flag if an element of these gradients is not finite. Returns False if a gradient is not supported.

    Supported are whole, dense and real gradients on the flag's device. torch's operation itself rejects sparse and
    complex gradients, and other devices. Checking each gradient first took twice the time of the operation, between an
    all-reduce and its update, where nothing overlaps.
    """
    if set(map(type, grads)) != {Tensor} or grads[0].dtype not in _FUSED.get(flag.device.type, ()):
        return False
    try:
        unscale_and_flag_(grads, flag, _one(flag.device))  # a factor of 1 changes nothing
    except RuntimeError:  # a gradient is not supported; no gradient was changed
        return False
    return True


def _local(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each gradient. Of a sharded gradient, its local part, which shares the gradient's memory."""
    return list(map(dtensor.local, grads)) if dtensor.any_sharded(grads) else grads


def _groups_of(grad: Tensor) -> _Groups:
    """The groups that a gradient is sharded over; empty if it is whole."""
    if not dtensor.is_sharded(grad):
        return ()
    mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]
    return tuple(
        group_of(mesh.get_group(dim)) for dim, placement in enumerate(placements) if not placement.is_replicate()
    )


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    first = dense[0]
    if any(g.device != first.device or g.dtype != first.dtype for g in dense):
        return torch.nn.utils.get_total_norm(dense)
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else None
    norms = foreach_norm(dense, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def _clip(holders: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Like torch.nn.utils.clip_grads_with_norm_, but also for sharded gradients."""
    if not any(dtensor.is_sharded(p.grad) for p in holders):
        torch.nn.utils.clip_grads_with_norm_(holders, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts = _local([p.grad for p in holders if p.grad is not None])
    for device in dict.fromkeys(part.device for part in parts):
        foreach_mul_([part for part in parts if part.device == device], factor.to(device))
