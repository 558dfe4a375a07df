"""central_storage: parameters and optimizer state are on the CPU; one or more devices compute with them.

Phase 1, forward and backward on every device, as in data_parallel (replica_set.py). The gradients are summed in the
  script's model on the first device, where the script can read and clip them.
Phase 2, step: the gradients are copied to the CPU.
Phase 3, step: the optimizer updates the master weights on the CPU (named_parameters.py), where its state is too.
Phase 4, step: the master weights are copied to the first device, which also evaluates. The other devices receive them
  when the next global batch begins.

Traffic between devices per step: gradients once to the CPU, and weights once from the CPU; for each further device, the
same as in data_parallel. Memory: parameters and gradients on each device; parameters, gradients and optimizer state on
the CPU. Parameters and gradients on the CPU are in flat buckets of about 25 MB. Each bucket is sent in one copy, and is
in pinned memory if the device is an accelerator.
Follows tf.distribute.experimental.CentralStorageStrategy. With one device, the placement is that of ZeRO-Offload (Ren
et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training"), without its overlap.

A script may write to its model's weights between steps (an EMA swapped in, load_state_dict, p.data.clamp_()). The
masters are then updated too. A write that autograd counts changes the tensor's version. Any other write changes the
tensor's norm: the device computes norms when weights arrive and again when gradients leave. Norms are sent with the
gradients, so they cause no extra wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.devices import flatten, unflatten
from paceline.comm.group import buckets
from paceline.data.batch_plan import one_shard
from paceline.strategies.base import Backward, LoopStrategy, backward_here
from paceline.strategies.kit.named_parameters import in_place_of, load_replicated, replicated_state
from paceline.strategies.kit.optimizer_hooks import carried, step_between_hooks
from paceline.strategies.replicated.local_devices import check_devices
from paceline.strategies.replicated.replica_set import Stamp, norms_of, stamp_of
from paceline.strategies.replicated.replica_strategy import ReplicaStrategy
from paceline.torch_private.core import foreach_copy_, version_of
from paceline.world import World

_HOST = torch.device("cpu")


def check(size: int | None, *, devices: str) -> None:
    """Raises SettingError for several processes, or for invalid devices."""
    check_devices("central_storage", size, devices)


class CentralStorage(ReplicaStrategy, LoopStrategy):
    """devices: such as "cuda:0" or "cuda:0,cuda:1"; default: all accelerators of this machine."""

    name = "central_storage"

    def __init__(self, world: World, device: torch.device, *, devices: str = "") -> None:
        check(world.size, devices=devices)
        super().__init__(world, device, devices=devices)
        if len(self.devices) == 1:  # then run.backward works too, without a closure
            self.plan = one_shard(1, 0)
        self._masters: dict[Tensor, Tensor] = {}
        self._buckets: list[_Bucket] = []

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self.optimizers:
                _state_of_masters(optimizer, self._masters)
        super().setup(models, optimizers)
        for optimizer in optimizers:
            self._make_masters(optimizer)

    def backward(self, work: Backward) -> None:
        backward_here(work)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._make_masters(optimizer)
        step_between_hooks(optimizer, partial(self._update, optimizer))
        self.replicas.mark_stale(optimizer)

    @torch.no_grad()
    def _update(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        own = {p for group in optimizer.param_groups for p in group["params"]}
        buckets_of_own = [bucket for bucket in self._buckets if any(p in own for p in bucket.parameters)]
        try:
            norms = [bucket.fetch(own) for bucket in buckets_of_own]
            for bucket, now in zip(buckets_of_own, norms, strict=True):
                bucket.follow(bucket.written(now))  # the first call waits until everything has arrived on the CPU
            with torch.enable_grad(), in_place_of(optimizer, self._masters):
                optimizer.step(*args, **kwargs)
        finally:
            for p in own:
                self._masters[p].grad = None
        for bucket in buckets_of_own:
            bucket.send()

    @torch.no_grad()
    def _make_masters(self, optimizer: torch.optim.Optimizer) -> None:
        """Make missing masters, and move optimizer state from parameters to their masters."""
        new = [p for group in optimizer.param_groups for p in group["params"] if p not in self._masters]
        for positions in buckets(new):
            bucket = _Bucket([new[i] for i in positions])
            self._buckets.append(bucket)
            self._masters.update(zip(bucket.parameters, bucket.masters, strict=True))
        for p in [p for p, values in optimizer.state.items() if values and p in self._masters]:
            master = self._masters[p]
            optimizer.state[master] = _laid_out_as(carried(optimizer.state.pop(p), None, _HOST), master)

    def state_dict(self) -> dict[str, Any]:
        for optimizer in self.optimizers:
            self._make_masters(optimizer)
        return replicated_state(self.models, self.optimizers, self._masters)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        load_replicated(self.models, self.optimizers, state, self._masters)
        for bucket in self._buckets:
            bucket.follow(bucket.parameters)
        self.replicas.mark_stale()

    def write_weights(self, number: int, write: Callable[[], None]) -> None:
        super().write_weights(number, write)
        for bucket in self._buckets:
            bucket.follow(bucket.parameters)

    def close(self) -> None:
        """Move optimizer state from the masters back to the parameters. The state stays on the CPU."""
        for optimizer in self.optimizers:
            for p, master in self._masters.items():
                if master in optimizer.state:
                    optimizer.state[p] = optimizer.state.pop(master)
            for name in _STATE_METHODS:
                vars(optimizer).pop(name, None)
        super().close()
        self._masters, self._buckets = {}, []


_STATE_METHODS = ("state_dict", "load_state_dict")


def _state_of_masters(optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor]) -> None:
    """Let scripts call the optimizer's state_dict and load_state_dict. During a call the optimizer holds the masters,
    which have the state."""

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with in_place_of(optimizer, masters):
                return method(*args, **kwargs)

        return call

    for name in _STATE_METHODS:
        setattr(optimizer, name, wrapped(getattr(optimizer, name)))


def _laid_out_as(values: dict[str, Any], master: Tensor) -> dict[str, Any]:
    """Make a master's state contiguous, since fused optimizers process memory in order and ignore strides."""
    for key, value in values.items():
        if isinstance(value, Tensor) and value.shape == master.shape and not value.is_sparse:
            values[key] = value.contiguous()
    return values


class _Bucket:
    """Parameters of one dtype on one device, and their masters in flat CPU memory."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._device = parameters[0].device
        options: Any = {"dtype": parameters[0].dtype, "pin_memory": self._device.type != "cpu"}
        total = sum(p.numel() for p in parameters)
        self._weights, self._gradients = torch.empty(total, **options), torch.empty(total, **options)
        self.masters: list[Tensor] = [nn.Parameter(part) for part in unflatten(self._weights, parameters)]
        for p, master in zip(parameters, self.masters, strict=True):
            vars(master).update(vars(p))  # attributes that optimizers read
        # When parameters and masters were last equal: the parameters' stamps and norms, the masters' versions.
        self._stamps: dict[Tensor, Stamp] = {}
        self._norms = torch.empty(0)
        self._versions: list[int] = []
        self._fetched: set[Tensor] = set()  # parameters with a gradient in the last `fetch`
        self.follow(self.parameters)

    def fetch(self, own: set[Tensor]) -> Tensor:
        """Enqueue copies of these parameters' gradients to the CPU. Returns the norms of the weights, on the device.
        Waits only for sparse gradients."""
        parts = unflatten(self._gradients, self.parameters)
        grads = [p.grad if p in own else None for p in self.parameters]
        self._fetched = {p for p, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        dense = [grad for grad in grads if grad is not None and not grad.is_sparse]
        if len(dense) == len(grads):
            self._gradients.copy_(flatten(dense), non_blocking=True)
        for master, part, grad in zip(self.masters, parts, grads, strict=True):
            if grad is None:
                continue
            if grad.is_sparse:
                master.grad = grad.to(_HOST)
                continue
            if len(dense) < len(grads):
                part.copy_(grad, non_blocking=True)
            master.grad = part
        return norms_of(self.parameters)

    def written(self, norms: Tensor) -> list[Tensor]:
        """The parameters that the script has written to since `send`."""
        moved = (norms != self._norms).tolist()
        return [p for p, other in zip(self.parameters, moved, strict=True) if other or stamp_of(p) != self._stamps[p]]

    def follow(self, parameters: Sequence[Tensor]) -> None:
        """Copy these parameters' values into their masters."""
        chosen = set(parameters)
        for p, master in zip(self.parameters, self.masters, strict=True):
            if p in chosen:
                master.detach().copy_(p.detach())
        self._versions = [version_of(master) for master in self.masters]
        if chosen:
            self._note()

    def send(self) -> None:
        """Copy updated masters into the parameters, without waiting. This is safe: the next update writes to the
        masters only after gradients have arrived in the same stream."""
        parts = unflatten(self._weights.to(self._device, non_blocking=True), self.parameters)
        moved = [version_of(master) != v for master, v in zip(self.masters, self._versions, strict=True)]
        chosen = [
            (p.detach(), part)
            for p, part, other in zip(self.parameters, parts, moved, strict=True)
            if other or p in self._fetched  # torch's fused updates do not raise the version
        ]
        if chosen:
            foreach_copy_([p for p, _ in chosen], [part for _, part in chosen])
        self._note()

    def _note(self) -> None:
        self._stamps = {p: stamp_of(p) for p in self.parameters}
        self._norms = norms_of(self.parameters)
