"""Where the gradients of the open global batch lie, and the operations on them there.

The gradient of a user's parameter p lies in `.grad` of its place. The place is p itself, or what a strategy says:

    places      another tensor, which holds this process's part of the gradient (an engine's shards)
    replicas    also the copies of p on further devices of this process; each operation treats their gradients as p's
    DTensors    p or its place is cut over processes, and `.grad` with it
    sums        each data shard's gradient is a leaf of a tree, complete after the last shard (comm/tree_sums.py)

An operation on each element works on the local part. A property of all elements, such as their norm or whether they are
finite, is then reduced over the processes that hold the other parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from paceline.comm import collectives, dtensor
from paceline.comm.mesh import ALONE, Group
from paceline.comm.scalars import wide_dtype
from paceline.comm.tree_sums import TreeSums
from paceline.torch_private.core import foreach_add_, foreach_mul_, foreach_norm, unscale_and_flag_

Grads = list[Tensor | None]
"""A gradient, or none, for each place of each replica, in one order."""

Factor = float | Tensor
"""A number, or a 0-dim tensor."""

_Groups = tuple[Group, ...]


class GradientStore:
    """A strategy makes it. The step uses it, and knows nothing else of where gradients are."""

    def __init__(
        self,
        *,
        replicas: Sequence[Mapping[Tensor, Tensor]] = (),
        others: Group = ALONE,
        aliased: bool = False,
        reduces_each: bool = False,
        sums: TreeSums | None = None,
    ) -> None:
        # For each further replica of this process: the user's parameter -> its copy. Mutated in place, never rebound.
        self.replicas = replicas
        self.places: dict[Tensor, Tensor] = {}  # the user's parameter -> its place, where that is not itself
        self.others = others  # the model-parallel group: processes that have gradients of other parameters
        self.aliased = aliased  # whether gradients alias buckets, to which the next backward writes
        self.reduces_each = reduces_each  # whether every micro-batch is reduced over the processes, not the last alone
        self.sums = sums  # of a reproducible run: adds up its shards in one order
        self.factor = (
            1.0  # of all loss weights, where an engine divides by it: the number of replicas over which it averages
        )
        self.loss_scale = 1.0  # of fp16: a factor of all loss weights of this global batch
        self.samples: Factor = 0.0  # how many examples, or tokens, this process's gradient is a mean over
        self.parameters: list[Tensor] = []  # the places of all prepared parameters

    def follow(self, names: Mapping[Tensor, str]) -> dict[Tensor, str]:
        """Sets the prepared parameters. Returns the names of parameters and of their places."""
        self.parameters = self.of(names)
        return {**names, **dict(zip(self.parameters, names.values(), strict=True))}

    def of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The places of these parameters."""
        if not self.places:
            return list(parameters)
        return [self.places.get(p, p) for p in parameters]

    def everywhere(self) -> list[Tensor]:
        """The places of all parameters, then their copies, always in this order."""
        if not self.replicas:
            return self.parameters
        return [*self.parameters, *(copies[p] for copies in self.replicas for p in self.parameters if p in copies)]

    # --- accounts

    def any(self) -> bool:
        """Whether a parameter has a gradient."""
        return any_gradient(self.parameters)

    def any_left(self) -> bool:
        """Whether a gradient is not zero. Waits for the device."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        return any(bool(dtensor.local(grad).any()) for grad in grads)

    def pop(self) -> Grads | None:
        """Takes all gradients out and returns them; None where there are none."""
        everywhere = self.everywhere()
        if not any_gradient(everywhere):
            return None
        grads = [p.grad.clone() if self.aliased and p.grad is not None else p.grad for p in everywhere]
        for p in everywhere:
            p.grad = None
        return grads

    def restore(self, grads: Iterable[Tensor | None]) -> None:
        """Puts gradients that `pop` has returned back into their places, which have none now."""
        for p, grad in zip(self.everywhere(), grads, strict=False):
            p.grad = grad

    def add(self, grads: Grads) -> None:
        """Adds these to the gradients, in place."""
        both: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
        for p, grad in zip(self.everywhere(), grads, strict=False):
            if p.grad is None:
                p.grad = grad
            elif grad is not None:
                sums, addends = both.setdefault(grad.device, ([], []))
                sums.append(p.grad)
                addends.append(grad)
        for sums, addends in both.values():  # tensors of several devices would be added one by one
            foreach_add_(list(map(dtensor.local, sums)), list(map(dtensor.local, addends)))

    def pop_replica(self, replica: int) -> Grads:
        """Takes the gradients of one replica of this process out and returns them. None for a parameter that has left
        the model (retied, say) and has no copy."""
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
        """Multiplies all gradients, in place."""
        scale_([p.grad for p in self.everywhere() if p.grad is not None], factor)

    # --- before and after an update

    def found_inf(self, places: Sequence[Tensor], device: torch.device, flag: Tensor | None) -> Tensor:
        """(): not zero where an element of these places' gradients is not finite, on any process that holds a part of
        them. Waits for nothing. device: of the result.

        flag: () float32. Where one fused operation can look at all gradients, it is set to 1, or left as it is, and
        returned. None, or gradients that no fused operation takes (bfloat16 on CUDA): the greatest magnitude is found,
        which is inf or NaN if one element is. That takes the host eight times as long for 160 gradients.
        """
        grads = [grad for p in places if (grad := p.grad) is not None]
        if flag is not None and self.others is ALONE and _flagged(grads, flag):  # nearly always
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

    def norm(self, places: Sequence[Tensor], device: torch.device) -> Tensor:
        """(): the 2-norm of these places' gradients together, over all processes that hold parts of them. It is not
        finite where one element is not. device: where a process without gradients computes."""
        by_groups = self._by_groups([p.grad for p in places if p.grad is not None])
        if by_groups.keys() == {()}:
            return norm_of(by_groups[()])
        squares = []
        for groups, tensors in by_groups.items():
            norm = norm_of(tensors) if tensors else torch.zeros((), device=device)
            square = norm.to(wide_dtype(norm.device)).square()
            for group in groups:
                collectives.all_reduce(square, group=group)
            squares.append(square)
        return torch.stack(squares).sum().sqrt()

    def clip(self, places: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scales the gradients of these places, whose norm this is, to at most `max_norm`, on all replicas."""
        _clip(places, max_norm, norm)
        for copies in self.replicas:
            _clip([copies[p] for p in places if p in copies], max_norm, norm)

    def clear(self, places: Iterable[Tensor]) -> None:
        """Drops the gradients of these places, on all replicas."""
        places = list(places) if self.replicas else places
        for p in places:
            p.grad = None
        for copies in self.replicas:
            for p in places:
                if p in copies:
                    copies[p].grad = None

    def _by_groups(self, grads: Sequence[Tensor]) -> dict[_Groups, list[Tensor]]:
        """The local parts of the gradients, by the groups of processes that hold the other parts."""
        if self.others is ALONE and not dtensor.any_sharded(grads):  # nearly always
            return {(): list(grads)}
        others: _Groups = () if self.others is ALONE else (self.others,)
        found: dict[_Groups, list[Tensor]] = {others: []} if others else {}
        for grad, part in zip(grads, _local(grads), strict=True):
            found.setdefault(_groups_of(grad) or others, []).append(part)
        return found

    def _on_any_process(self, flag: Tensor, grads: Sequence[Tensor]) -> Tensor:
        """Sums the flag, in place, over all processes that hold a part of one of these gradients. (The greatest of
        numbers of which one is NaN is another one in each library.)"""
        if self.others is ALONE and not dtensor.any_sharded(grads):
            return flag
        for group in dict.fromkeys(group for groups in self._by_groups(grads) for group in groups):
            collectives.all_reduce(flag, group=group)
        return flag


def any_gradient(parameters: Collection[Tensor]) -> bool:
    """Whether one of these has a gradient."""
    for p in parameters:  # noqa: SIM110  # in every step: a generator takes twice as long
        if p.grad is not None:
            return True
    return False


def scale_(grads: Sequence[Tensor], factor: Factor) -> None:
    """Multiplies gradients in place."""
    if not grads:
        return
    for (device, dtype), alike in _alike(map(dtensor.local, grads)).items():
        foreach_mul_(alike, factor.to(device, dtype) if isinstance(factor, Tensor) else factor)


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors by device and dtype: one operation on many takes one kernel only where these are the same."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


def not_finite(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """(): NaN where an element of these is inf or NaN, else 0. Dense and real. Only reads them."""
    groups = _alike(grad for grad in grads if grad.numel())  # an empty one has no greatest magnitude
    if not groups:
        return torch.zeros((), device=device)
    tops = [torch.stack(foreach_norm(alike, math.inf)).amax() for alike in groups.values()]
    found = [(top.detach() * 0.0).to(device, torch.float32, non_blocking=True) for top in tops]
    return found[0] if len(found) == 1 else torch.stack(found).sum()


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    """() float32, 1, made once for each device."""
    one = _ones.get(device)
    if one is None:
        one = _ones[device] = torch.ones((), dtype=torch.float32, device=device)
    return one


_FUSED = {
    "cpu": frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    "cuda": frozenset((torch.float64, torch.float32, torch.float16)),
}
"""By type of device: the dtypes that torch's fused check takes."""


def _flagged(grads: list[Tensor], flag: Tensor) -> bool:
    """Sets the flag where an element of these is not finite, if they are as nearly all gradients: whole, dense and
    real, on the flag's device. Else returns False. The operation itself says which it cannot take: to ask each gradient
    took twice as long as the operation, between an all-reduce and its update, where nothing overlaps with it."""
    if set(map(type, grads)) != {Tensor} or grads[0].dtype not in _FUSED.get(flag.device.type, ()):
        return False
    try:
        unscale_and_flag_(grads, flag, _one(flag.device))  # by 1: unchanged
    except RuntimeError:  # a sparse or complex one, or one of another device; what came before it is as it was
        return False
    return True


def _local(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each gradient, or its local part, which shares its memory."""
    return list(map(dtensor.local, grads)) if dtensor.any_sharded(grads) else grads


def _groups_of(grad: Tensor) -> _Groups:
    """The groups over which a gradient is cut; empty where it is whole."""
    if not dtensor.is_sharded(grad):
        return ()
    mesh, placements = grad.device_mesh, grad.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    dense = [g.coalesce().values() if g.is_sparse else g for g in grads]
    first = dense[0]
    if any(g.device != first.device or g.dtype != first.dtype for g in dense):
        return torch.nn.utils.get_total_norm(dense)
    wide = torch.float32 if first.dtype in (torch.float16, torch.bfloat16) else None
    norms = foreach_norm(dense, 2, dtype=wide)
    return torch.linalg.vector_norm(torch.stack(norms))


def _clip(places: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """torch.nn.utils.clip_grads_with_norm_, also of local parts."""
    if not any(dtensor.is_sharded(p.grad) for p in places):
        torch.nn.utils.clip_grads_with_norm_(places, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts = _local([p.grad for p in places if p.grad is not None])
    for device in dict.fromkeys(part.device for part in parts):
        foreach_mul_([part for part in parts if part.device == device], factor.to(device))
