"""Gradients of which a process holds a part: DTensors, as strategies that cut parameters make them.

What is done to each element is done to the part that is here; what is a property of all of them (a norm, whether they
are finite) is then made alike over the processes that hold the other parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm import collectives, slices


def local(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Each tensor, or its part that is here, which shares its memory."""
    return list(map(slices.local, tensors)) if slices.any_sharded(tensors) else tensors


def groups_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Over which processes a tensor is cut; empty where it is whole here."""
    if not slices.is_sharded(tensor):
        return ()
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())


Groups = tuple[dist.ProcessGroup, ...]


def by_groups(tensors: Sequence[Tensor], parts: dist.ProcessGroup | None) -> dict[Groups, list[Tensor]]:
    """The parts that are here of all tensors, by the processes that they are cut over. parts: processes which have
    other tensors each, perhaps none."""
    if parts is None and not slices.any_sharded(tensors):  # nearly always
        return {(): list(tensors)}
    found: dict[Groups, list[Tensor]] = {(parts,): []} if parts is not None else {}
    for tensor, part in zip(tensors, local(tensors), strict=True):
        found.setdefault(groups_of(tensor) or ((parts,) if parts is not None else ()), []).append(part)
    return found


def any_process(flag: Tensor, grads: Sequence[Tensor], parts: dist.ProcessGroup | None) -> Tensor:
    """In place: 1 where it is 1 on any process that holds a part of one of these gradients. Does not wait."""
    if parts is None and not slices.any_sharded(grads):
        return flag
    for group in dict.fromkeys(group for groups in by_groups(grads, parts) for group in groups):
        collectives.all_reduce(flag, "max", group)
    return flag


def clip_(parameters: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scales their gradients, whose norm this is, to at most `max_norm`: torch.nn.utils.clip_grads_with_norm_, also
    where a process holds parts."""
    if not any(slices.is_sharded(p.grad) for p in parameters):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts = local([p.grad for p in parameters if p.grad is not None])
    for device in dict.fromkeys(part.device for part in parts):
        torch._foreach_mul_([part for part in parts if part.device == device], factor.to(device))
