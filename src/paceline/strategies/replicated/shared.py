"""shared: the processes of one machine train one copy of the weights; each process updates its slices.

Phase 1, forward and backward: as in ddp. Gradients are stored in shared memory (shared_arena.py), in a separate region
  for each process. Micro-batches accumulate in this region.
Phase 2, sum, after the backward of the last micro-batch: each of n processes adds up 1 / n of all regions, in rank
  order, into the first region. `.grad` then shows the first region: the whole sum, on every process.
Phase 3, step: each process updates its rows of each parameter in the shared weights (slice_updates.py). It has
  optimizer state for these rows only.

At each of these barriers every process waits for all others:

  (0) all processes have read the last sums       then backward
  (1) all addends are written                     then sum
  (2) all sums are written                        then the script sees gradients
  (3) all processes have read the weights         then update
  (4) all rows are updated                        then the script continues

The processes send each other only scalars, at the barriers. Memory per process in bytes, with n processes, P parameters
in fp32 and Adam: 4 P / n for weights, 4 P for gradients (the process's region), 8 P / n for optimizer state.

Scripts see the same as under ddp: whole parameters and whole gradients, which they may change. The kernel copies a page
when a process writes to it. So a change that every process makes to its model is not applied n times to the shared
weights. Before an update the processes compare their changes, and apply them once to the shared weights.

Follows stage 1 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"), with shared memory in place of reduce-scatter and all-gather. Hogwild (Recht et al. 2011) also has one copy of
the weights for all workers; here the workers run in lockstep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import copied_pages, shared_memory
from paceline.comm.mesh import Mesh, world_group
from paceline.comm.scalars import wide_dtype
from paceline.config import StrategySpec
from paceline.data.batch_plan import one_shard
from paceline.errors import ModelError, SettingError
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.gradient_store import Factor, GradientStore, norm_of, not_finite, scale_
from paceline.strategies.kit.named_parameters import (
    CHANGED_AT_START,
    check_dense,
    check_same_bits,
    listed,
    named_state,
    parameter_names,
    send_models,
)
from paceline.strategies.kit.one_process import as_single
from paceline.strategies.kit.optimizer_hooks import step_between_hooks
from paceline.strategies.replicated.shared_arena import SharedArena
from paceline.strategies.replicated.slice_updates import SliceUpdates
from paceline.world import World

_TAKEN_AT_ONCE = 2**16  # bytes: larger gradients are moved to the arena during the backward, smaller ones after it


def check(size: int | None) -> None:
    """Checks nothing: only the running processes can find out whether they can share memory."""


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("shared")


class Shared(LoopStrategy):
    """One copy of the weights for all processes. Needs the CPUs of one machine, with Linux on x86-64."""

    store: SharedGradients

    def __init__(self, world: World, device: torch.device) -> None:
        """Raises SettingError, on all processes, if they cannot share memory."""
        check(world.size)
        self.world, self.device = world, device
        able = device.type == "cpu" and shared_memory.supported() and copied_pages.visible()
        barrier = shared_memory.open_barrier(world_group(), able=able)
        if barrier is None:
            raise SettingError(_why_not(world, device))
        self.mesh = Mesh(device, world.rank, {"replicate": world.size})
        self.plan = one_shard(world.size, world.rank)
        self._arena = SharedArena(barrier)
        self.store = SharedGradients(self._arena)
        self._sent: set[Tensor] = set()  # parameters and buffers that have received rank 0's values
        self._names: dict[Tensor, str] = {}
        self._began = False
        self._slices = SliceUpdates(self.mesh, self._arena.weights, self._arena.gradient_rows)
        self._hooks: list[Any] = []

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_dense(models, "shared")
        added = [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        self.models, self.optimizers = list(models), list(optimizers)
        self._names = parameter_names(models)
        placed = {p for p in self._names if p.dim() and p.numel()}  # these get rank 0's values through the arena
        self._sent = send_models(models, self.device, self._sent | placed)
        if any(optimizer.state for optimizer in added):
            check_same_bits(named_state(self._names, added), "in `prepare`", "Optimizer state was loaded on some")
        for p in self._arena.add(self._names):
            if p.nbytes >= _TAKEN_AT_ONCE and p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(self._arena.take))
        for p in self._names:
            self._slices.add(p)
        for optimizer in added:
            self._slices.register(optimizer)

    # --- the step

    def backward(self, work: Backward) -> None:
        if self.store.summed:
            self._arena.barrier.wait()  # (0)
            self.store.summed = False
        backward_here(work)
        if work.final:
            if not self._began:
                self._began = True
                self._check_alike("before the first step", CHANGED_AT_START)
            self._arena.reduce(self._names)  # (1), (2)
            self.store.summed = True

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        step_between_hooks(optimizer, partial(self._update, optimizer))

    def _update(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        self._follow()  # (3)
        self._slices.update(optimizer, *args, **kwargs)
        self._arena.barrier.wait()  # (4)

    def _follow(self) -> None:
        """Wait for the other processes. If scripts have changed weights, apply the changes to the shared weights.
        Raises ModelError on all processes if the changes differ."""
        changed = self._arena.changed(self._names)
        if not any(self._arena.barrier.wait(float(len(changed)))):
            return
        names = [self._names[p] for p in changed]
        everyone = world_group().gather(names)
        if any(other != names for other in everyone):
            some = [name for name in self._names.values() if 0 < sum(name in own for own in everyone) < len(everyone)]
            raise ModelError(
                f"the weights differ between ranks before an update: {listed(some)}. The script changed them on some "
                "ranks only. Change the model on every rank."
            )
        check_same_bits(
            [(name, p) for name, p in zip(names, changed, strict=True)],
            "before an update",
            "The script set different values on some",
        )
        self._arena.carry(changed)

    def _check_alike(self, when: str, why: str) -> None:
        check_same_bits([(name, p) for p, name in self._names.items()], when, why)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        self._check_alike(
            "at a checkpoint", "Each update made them the same, but something changed them later, on some"
        )
        from paceline.strategies.kit.sharded_state import full_state  # not at the top: see SliceUpdates.masters

        with self._slices.looked_at(self.optimizers):
            return full_state(self.models, self.optimizers, self._slices.masters.of)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from paceline.strategies.kit.sharded_state import load_full_state

        with self._slices.looked_at(self.optimizers):
            load_full_state(self.models, self.optimizers, self._slices.masters.of, state)
        self._follow()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._slices.close()
        self._arena.barrier.close()


class SharedGradients(GradientStore):
    """A GradientStore in shared memory. `.grad` holds this process's addend before the sum, and the sum afterwards.
    Each process computes norms and checks over its rows; then the processes exchange the results."""

    def __init__(self, arena: SharedArena) -> None:
        super().__init__(aliased=True)
        self.summed = False  # whether the sums are complete; other processes may be reading them
        self._arena = arena

    def found_inf(self, holders: Sequence[Tensor], device: torch.device, flag: Tensor | None) -> Tensor:
        rows = self._rows(holders)
        own = norm_of(rows).item() if rows else 0.0  # ten times faster than checking each element
        if not math.isfinite(own):  # an element is not finite, or the square overflowed
            own = not_finite(rows, device).item()
        return torch.tensor(sum(0.0 if math.isfinite(x) else x for x in self._arena.barrier.wait(own)), device=device)

    def norm(self, holders: Sequence[Tensor], device: torch.device) -> Tensor:
        rows = self._rows(holders)
        own = norm_of(rows) if rows else torch.zeros((), device=device)
        square = own.to(wide_dtype(own.device)).square()
        return square.fill_(sum(self._arena.barrier.wait(square.item()))).sqrt()

    def clip(self, holders: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        if not self._scale_rows(holders, lambda: torch.clamp(max_norm / (norm + 1e-6), max=1.0)):
            super().clip(holders, max_norm, norm)

    def scale(self, factor: Factor) -> None:
        if not (self.summed and self._scale_rows(self.parameters, lambda: factor)):
            super().scale(factor)

    def _rows(self, holders: Iterable[Tensor]) -> list[Tensor]:
        """The rows of these gradients that this process updates. Scalars belong to rank 0."""
        first = self._arena.barrier.rank == 0
        rows = [self._arena.gradient_rows(p) for p in holders if p.grad is not None and (p.dim() or first)]
        return [torch.view_as_real(part) if part.is_complex() else part for part in rows if part.numel()]

    def _scale_rows(self, holders: Sequence[Tensor], factor: Callable[[], Factor]) -> bool:
        """Multiply the gradient sums of these parameters; each process multiplies its rows. Returns False on all
        processes if a process has written to its gradients, since it no longer sees the sums. Then each process must
        multiply its whole gradients."""
        if not all(self._arena.barrier.wait(float(self._arena.as_summed(holders)))):
            return False
        first = self._arena.barrier.rank == 0
        summed = [p for p in holders if p.grad is not None and p in self._arena.slots]
        found = [self._arena.slots[p].total_rows for p in summed if p.dim() or first]
        scale_(found, factor())
        self._arena.barrier.wait()
        return True


def _why_not(world: World, device: torch.device) -> str:
    what = f"strategy shared: the {world.size} processes cannot share memory"
    if device.type != "cpu":
        return (
            f"{what}: this process computes on {device}, but shared needs CPUs. Use strategy='fsdp:stage=1' or 'ddp', "
            "or train on CPUs (device='cpu')."
        )
    if not shared_memory.supported():
        return (
            f"{what}: strategy shared needs Linux on x86-64. Use strategy='fsdp:stage=1', which saves as much memory, "
            "or 'ddp'."
        )
    if not copied_pages.visible():
        return (
            f"{what}: the kernel does not show which pages a process has copied (/proc/self/pagemap). Use "
            "strategy='fsdp:stage=1' or 'ddp'."
        )
    return (
        f"{what}: they are on several machines ({world.nodes} according to the launcher), in separate containers, or "
        "more than 16. Use strategy='fsdp:stage=1' or 'ddp', or start all of them on one machine."
    )
