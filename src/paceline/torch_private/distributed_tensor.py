"""DTensor's internals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, placement_types

from paceline.torch_private.support import needed_for, require

with needed_for("sharded tensors (DTensor)"):
    from torch.distributed.tensor import _random

    _random._rng_tracker  # noqa: B018  # must exist: it is read and replaced below

    StridedShard = placement_types._StridedShard
    """The placement for q, k and v in one layer: the weight is split into thirds, and each third is sharded."""
    _propagator: Any = DTensor._op_dispatcher.sharding_propagator
    # operator -> torch's sharding rule. The first table's rules take all arguments. Since torch 2.15 attention is in
    # the second table: its rules apply to one dimension of the mesh. Entries are replaced while a run is open.
    _RULES: dict[Any, Any] = _propagator.op_strategy_funcs
    _RULES_BY_DIMENSION: dict[Any, Any] = getattr(_propagator, "op_single_dim_strategy_funcs", {})
    ATTENTION = tuple(
        getattr(torch.ops.aten, name).default
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        )
    )
    """Fused attention kernels. They draw random numbers internally, the same on each device."""

require("sharded tensors (DTensor)", DTensor, "_local_tensor")
require("sharded tensors (DTensor)", placement_types.Shard, "_split_tensor")
require("sharded tensors (DTensor)", StridedShard, "_split_tensor")


def part_of(whole: Tensor, placement: Any, size: int, place: int) -> Tensor:
    """The shard of `whole` that this placement puts on device `place` of `size` devices. A view if possible."""
    parts: Sequence[Tensor] = placement._split_tensor(whole, size, with_padding=False, contiguous=False)[0]
    return parts[place]


def set_local(tensor: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor."""
    tensor._local_tensor = local


@contextmanager
def checking(operators: Sequence[Any], check: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """Within the context, call check(operator, arguments) before torch chooses a sharding for these operators.

    `check` may raise. torch caches its choice by shapes, and does not call `check` for cached shapes.
    """

    def whole(op: Any, rule: Any) -> Any:
        def checked(schema: Any) -> Any:
            check(op, schema.args_schema)
            return rule(schema)

        return checked

    def by_dimension(op: Any, rule: Any) -> Any:
        def checked(operator: Any, args: Any, kwargs: Any) -> Any:
            check(op, args)
            return rule.func(operator, args, kwargs)

        return dataclasses.replace(rule, func=checked)

    kept = [(table, op, table[op]) for table in (_RULES, _RULES_BY_DIMENSION) for op in operators if op in table]
    for table, op, rule in kept:
        table[op] = whole(op, rule) if table is _RULES else by_dimension(op, rule)
    try:
        yield
    finally:
        for table, op, rule in kept:
            table[op] = rule


class Draws:
    """Base class for replacements of torch's RNG tracker, which torch calls to draw a random DTensor."""

    distribute_region_enabled = True

    def around(self, spec: Any, generator: torch.Generator | None) -> AbstractContextManager[None]:
        """Return a context for one draw. spec: the mesh and the placements of the drawn tensor."""
        raise NotImplementedError

    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> AbstractContextManager[None]:
        return self.around(spec, generator)


@contextmanager
def drawing_by(draws: Draws | None, mesh: Any) -> Iterator[None]:
    """Within the context, draw random DTensors with `draws`, or (None) with torch's tracker for GPUs.

    torch's tracker is made here without broadcasting rank 0's generator state to all ranks.
    """
    earlier = _random._rng_tracker
    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False) if draws is None else draws  # type: ignore[assignment]
    try:
        yield
    finally:
        _random._rng_tracker = earlier
