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

with needed_for("tensors that are cut over devices"):
    from torch.distributed.tensor import _random

    _random._rng_tracker  # noqa: B018  # is it there? It is read and replaced below

    StridedShard = placement_types._StridedShard
    """q, k and v in one layer: the weight is cut by thirds, and each third by devices."""
    _propagator: Any = DTensor._op_dispatcher.sharding_propagator
    # operator -> how torch cuts it: as a function of all arguments; or, since 2.15 for attention, for each dimension
    # of the mesh by itself. Entries are replaced for as long as a run is open.
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
    """Fused kernels that draw for themselves, alike on each device."""

require("tensors that are cut over devices", DTensor, "_local_tensor")
require("tensors that are cut over devices", placement_types.Shard, "_split_tensor")
require("tensors that are cut over devices", StridedShard, "_split_tensor")


def part_of(whole: Tensor, placement: Any, size: int, place: int) -> Tensor:
    """What the device at `place` of `size` has of a tensor that is cut by this placement: a view where that can be."""
    parts: Sequence[Tensor] = placement._split_tensor(whole, size, with_padding=False, contiguous=False)[0]
    return parts[place]


def set_local(tensor: Any, local: Tensor) -> None:
    """Another tensor in place of what a DTensor has in this process."""
    tensor._local_tensor = local


@contextmanager
def checking(operators: Sequence[Any], check: Callable[[Any, Sequence[Any]], None]) -> Iterator[None]:
    """check(operator, arguments) is called before torch decides how to cut what these operators are given. It may
    raise. torch remembers its decision for the same shapes, and asks no more."""

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
    """What torch asks before it draws random numbers on a cut tensor: a base for one of our own."""

    distribute_region_enabled = True

    def around(self, spec: Any, generator: torch.Generator | None) -> AbstractContextManager[None]:
        """What is drawn inside is a tensor of this mesh and these placements."""
        raise NotImplementedError

    def _distribute_region(self, spec: Any, generator: torch.Generator | None = None) -> AbstractContextManager[None]:
        return self.around(spec, generator)


@contextmanager
def drawing_by(draws: Draws | None, mesh: Any) -> Iterator[None]:
    """Random numbers on cut tensors by this, or, where it is None, by torch's own for GPUs, without rank 0's generator
    for all shards, which torch's would take when it is made."""
    earlier = _random._rng_tracker
    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False) if draws is None else draws  # type: ignore[assignment]
    try:
        yield
    finally:
        _random._rng_tracker = earlier
