"""shared: the processes of one machine train one copy of the weights, each of them its own slices.

Phase 1, forward and backward: as in ddp. Autograd's gradients go to memory that all processes see (shared_arena.py), a
  region for each process; micro-batches add up there.
Phase 2, sum, after the backward of the last micro-batch: each process adds up one n-th of all regions, in the order of
  the ranks, into the first. `.grad` shows that: the whole sum, on every process.
Phase 3, step: each process updates its rows of each parameter, in the weights that all processes compute with
  (slice_updates.py). It has optimizer state of these rows only.

Meetings, at which each process waits for all others:

  (0) nobody reads the last sums any more   backward
  (1) all addends are there                 sum
  (2) all sums are there                    the script looks at gradients
  (3) nobody reads weights any more         update
  (4) all rows are new                      the script goes on

Between processes nothing travels but what they tell each other at the meetings. With n processes, P parameters, in fp32
with Adam: 4 P / n of weights, 4 P of gradients (for each process a region of 4 P), 8 P / n of optimizer state.

Scripts see what they see under ddp: whole parameters and whole gradients, to which they may write. The kernel copies a
page to which a process writes, so that what each does to its own model, as all do, is not done n times to the weights
of all. Before an update the processes compare what they have written, and carry it into the weights.

Follows stage 1 of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models"), where memory takes the place of the reduce-scatter and of the all-gather. One copy of the weights for all
workers is what Hogwild has (Recht et al. 2011); here they are in step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm import collectives, copied_pages, shared_memory
from paceline.comm.mesh import Mesh
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

_TAKEN_AT_ONCE = 2**16  # bytes of a gradient from which on it goes to its place within the backward, and not after it


def check(size: int | None) -> None:
    """Nothing to refuse: whether the processes can share memory, only they can know."""


def alone(spec: StrategySpec, device: torch.device) -> tuple[StrategySpec, str]:
    return as_single("shared")


class Shared(LoopStrategy):
    """For CPUs of one machine, with Linux on x86-64."""

    store: SharedGradients

    def __init__(self, world: World, device: torch.device) -> None:
        """Raises SettingError, on all processes, where they cannot share memory."""
        check(world.size)
        self.world, self.device = world, device
        able = device.type == "cpu" and shared_memory.supported() and copied_pages.visible()
        meetings = shared_memory.meetings(able=able)
        if meetings is None:
            raise SettingError(_why_not(world, device))
        self.mesh = Mesh(device, world.rank, {"replicate": world.size})
        self.plan = one_shard(world.size, world.rank)
        self._arena = SharedArena(meetings)
        self.store = SharedGradients(self._arena)
        self._sent: set[Tensor] = set()  # parameters and buffers that have had rank 0's values
        self._names: dict[Tensor, str] = {}
        self._began = False
        self._slices = SliceUpdates(self.mesh, self._arena.weights, self._arena.gradient_rows)
        self._hooks: list[Any] = []

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        check_dense(models, "shared")
        added = [optimizer for optimizer in optimizers if optimizer not in self.optimizers]
        self.models, self.optimizers = list(models), list(optimizers)
        self._names = parameter_names(models)
        placed = {p for p in self._names if p.dim() and p.numel()}  # which have rank 0's values by way of the arena
        self._sent = send_models(models, self.device, self._sent | placed)
        if any(optimizer.state for optimizer in added):
            check_same_bits(named_state(self._names, added), "in `prepare`", "They were loaded on some")
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
            self._arena.meetings.wait()  # (0)
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
        self._arena.meetings.wait()  # (4)

    def _follow(self) -> None:
        """Meets the others and, where scripts have written to weights, carries that over. Raises ModelError, on all,
        where they have not written the same."""
        changed = self._arena.changed(self._names)
        if not any(self._arena.meetings.wait(float(len(changed)))):
            return
        names = [self._names[p] for p in changed]
        everyone = collectives.gather_objects(names)
        if any(other != names for other in everyone):
            some = [name for name in self._names.values() if 0 < sum(name in own for own in everyone) < len(everyone)]
            raise ModelError(
                f"the weights differ between ranks before an update: {listed(some)}. The script changed them on some "
                "ranks only: do what it does to the model on every rank."
            )
        check_same_bits(
            [(name, p) for name, p in zip(names, changed, strict=True)],
            "before an update",
            "The script gave them other values on some",
        )
        self._arena.carry(changed)

    def _check_alike(self, when: str, why: str) -> None:
        check_same_bits([(name, p) for p, name in self._names.items()], when, why)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        self._check_alike(
            "at a checkpoint", "After each update they were the same, so that something changed them since, on some"
        )
        from paceline.strategies.kit.sharded_state import full_state  # here: see SliceUpdates.masters

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
        self._arena.meetings.close()


class SharedGradients(GradientStore):
    """`.grad`: before the sum this process's addend, after it the sum. What is computed of sums each process computes
    of its own rows; then they tell each other."""

    def __init__(self, arena: SharedArena) -> None:
        super().__init__(aliased=True)
        self.summed = False  # whether there are sums, which others may be reading
        self._arena = arena

    def found_inf(self, places: Sequence[Tensor], device: torch.device, flag: Tensor | None) -> Tensor:
        rows = self._rows(places)
        own = norm_of(rows).item() if rows else 0.0  # ten times as fast as a look at each element
        if not math.isfinite(own):  # or so large that its square is not
            own = not_finite(rows, device).item()
        return torch.tensor(sum(0.0 if math.isfinite(x) else x for x in self._arena.meetings.wait(own)), device=device)

    def norm(self, places: Sequence[Tensor], device: torch.device) -> Tensor:
        rows = self._rows(places)
        own = norm_of(rows) if rows else torch.zeros((), device=device)
        square = own.to(wide_dtype(own.device)).square()
        return square.fill_(sum(self._arena.meetings.wait(square.item()))).sqrt()

    def clip(self, places: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
        if not self._scale_rows(places, lambda: torch.clamp(max_norm / (norm + 1e-6), max=1.0)):
            super().clip(places, max_norm, norm)

    def scale(self, factor: Factor) -> None:
        if not (self.summed and self._scale_rows(self.parameters, lambda: factor)):
            super().scale(factor)

    def _rows(self, places: Iterable[Tensor]) -> list[Tensor]:
        """Of these gradients those rows that this process updates by. Scalars are rank 0's."""
        first = self._arena.meetings.rank == 0
        rows = [self._arena.gradient_rows(p) for p in places if p.grad is not None and (p.dim() or first)]
        return [torch.view_as_real(part) if part.is_complex() else part for part in rows if part.numel()]

    def _scale_rows(self, places: Sequence[Tensor], factor: Callable[[], Factor]) -> bool:
        """Multiplies the sums of these places, each process its own rows. False, on all, where one of them has written
        to its gradients, so that it no longer sees the sums: then each multiplies what it sees."""
        if not all(self._arena.meetings.wait(float(self._arena.as_summed(places)))):
            return False
        first = self._arena.meetings.rank == 0
        summed = [p for p in places if p.grad is not None and p in self._arena.places]
        found = [self._arena.places[p].total_rows for p in summed if p.dim() or first]
        scale_(found, factor())
        self._arena.meetings.wait()
        return True


def _why_not(world: World, device: torch.device) -> str:
    what = f"strategy shared: the {world.size} processes cannot share memory"
    if device.type != "cpu":
        return (
            f"{what}: this one computes on {device}, and shared is for CPUs. Use strategy='fsdp:stage=1' or 'ddp', or "
            "train on CPUs (device='cpu')."
        )
    if not shared_memory.supported():
        return f"{what}: it takes Linux on x86-64. Use strategy='fsdp:stage=1', which needs as little memory, or 'ddp'."
    if not copied_pages.visible():
        return (
            f"{what}: the kernel does not show which pages a process has copied (/proc/self/pagemap). Use "
            "strategy='fsdp:stage=1' or 'ddp'."
        )
    return (
        f"{what}: they are on several machines ({world.nodes} by the launcher), in containers of their own, or more "
        "than 16. Use strategy='fsdp:stage=1' or 'ddp', or start all of them on one machine."
    )
