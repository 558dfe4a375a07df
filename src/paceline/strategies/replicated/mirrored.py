"""mirrored: one process, several devices, every parameter copied to each device; all replicas make the same update.

Phase 1, forward and backward (replica_set.py): each device computes its shard, and accumulates its gradients over all
  micro-batches.
Phase 2, all-reduce, in the last micro-batch: on every device the gradients are replaced by their sum over the replicas,
  in buckets of 25 MB. `reduction` selects the algorithm:
    native         NCCL, all devices at once; without NCCL, a sum on the first device, copied to the others
    ring           pieces travel around a ring, twice (comm/reducers.py)
    hierarchical   sums within groups of devices that reach each other directly, a ring between groups, copies back
    reduce_to_one  sums along a tree to the first device, copies back
  With reproducible=V the gradients are added in a fixed order instead (reproducible.py), and the sums are sent to all
  devices before an update.
Phase 3, step: each replica updates its weights with a separate optimizer, which has the class and state of the script's
  optimizer. Before each update it copies the learning rate and all other options from the script's optimizer. Random
  draws of an update are the same on all replicas.

Traffic between devices per step: gradients. With the ring each of n devices sends 2 (n - 1) / n of their bytes. Weights
are not sent after the start, unless the script writes to them.
Memory per device: parameters, gradients and optimizer state once, and a bucket.
Follows tf.distribute.MirroredStrategy and its cross-device ops (NcclAllReduce, HierarchicalCopyAllReduce,
ReductionToOneDevice).

The script's model is the first replica. The script's writes to weights or gradients are sent to the other replicas if
autograd counts them. Any other write (`p.data.clamp_()`) would let the replicas drift apart. So the norms of the
replicas' weights are compared at every update (on an accelerator one update late). If they differ, an error names the
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.comm.devices import copy_tensors, flatten, sum_on_first, unflatten
from paceline.comm.endpoints import ReplicaStopped, ThreadEndpoint, thread_endpoints
from paceline.comm.group import buckets
from paceline.comm.reducers import REDUCERS
from paceline.comm.threads import ThreadTeam
from paceline.comm.tree_sums import TreeSums
from paceline.config import StrategySpec
from paceline.errors import ModelError, SettingError, suggest
from paceline.strategies.base import Term, Work
from paceline.strategies.kit.named_parameters import listed, parameter_names
from paceline.strategies.kit.optimizer_hooks import GeneratorStates, follow_groups, optimizer_like, step_between_hooks
from paceline.strategies.replicated import replica_strategy
from paceline.strategies.replicated.local_devices import check_devices
from paceline.strategies.replicated.replica_set import norms_of, on_device
from paceline.strategies.replicated.replica_strategy import ReplicaStrategy
from paceline.torch_private.core import foreach_copy_, version_of
from paceline.world import World

REDUCTIONS = ("native", *REDUCERS)


def check(size: int | None, *, devices: str, reduction: str, shards: int | None = None) -> None:
    """Raises SettingError for several processes, for invalid devices, and for a reduction that is unknown or cannot be
    used in a reproducible run. shards: number of shards of a reproducible run (None: not reproducible)."""
    if reduction not in REDUCTIONS:
        raise SettingError(
            f"strategy mirrored: reduction={reduction!r} is not known. {suggest(str(reduction), REDUCTIONS)}"
        )
    if shards is not None and reduction != "native":
        raise SettingError(
            f"reproducible={shards} with strategy mirrored: reduction={reduction!r}: reproducible={shards} fixes the "
            "order in which gradients are added. Drop reduction."
        )
    check_devices("mirrored", size, devices, shards=shards)


def alone(spec: StrategySpec, device: torch.device, *, devices: str) -> tuple[StrategySpec, str]:
    return replica_strategy.alone("mirrored", spec, device, devices)


class Mirrored(ReplicaStrategy):
    """devices: such as "cuda:0,cuda:1" or "cpu,cpu"; default: all accelerators of this machine. reduction: native,
    ring, hierarchical or reduce_to_one."""

    name = "mirrored"
    keep_weights = True

    def __init__(
        self,
        world: World,
        device: torch.device,
        sums: TreeSums | None = None,
        *,
        devices: str = "",
        reduction: str = "native",
    ) -> None:
        check(world.size, devices=devices, reduction=reduction, shards=None if sums is None else sums.shards)
        super().__init__(world, device, sums, devices=devices)
        self._mirrored = self.replicas.owners
        self._reduction = reduction
        # The replicas' threads take turns. A reducer that waits for other replicas during a turn would wait for ever.
        self._team = ThreadTeam(len(self.devices)) if reduction != "native" else self.replicas.team
        self._mirrors: dict[torch.optim.Optimizer, list[_Mirror]] = {}
        self._hooks: list[Any] = []
        self._equal = _EqualGradients()
        self._drift = _DriftCheck()

    def setup(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            if optimizer not in self.optimizers:  # a state that the script loads must be mirrored again
                self._hooks.append(optimizer.register_load_state_dict_post_hook(self._forget))
        super().setup(models, optimizers)
        self._drift.names = parameter_names(models)

    def _forget(self, optimizer: torch.optim.Optimizer) -> None:
        self._mirrors.pop(optimizer, None)

    def forward_backward(self, work: Work) -> list[list[Term]]:
        if self.replicas.ended:
            self._equal.send_changes(self._mirrored)
        if self.replicas.follow(work.call):
            self._drift.check(self._mirrored)
        terms = self.replicas.forward_backward(work, self.combine)
        if work.final and self.store.sums is None:
            self._equal.note(self.replicas.copies[0])
        elif work.final:
            self._equal.note_none(self.replicas.copies[0])
        return terms

    # --- phase 2

    @torch.no_grad()
    def combine(self) -> None:
        dense = []
        for p in self.replicas.copies[0]:
            everywhere = [p, *(copies[p] for copies in self.replicas.copies)]
            with_gradient = [q.grad for q in everywhere if q.grad is not None]
            if any(grad.is_sparse for grad in with_gradient):
                _add_up(everywhere)
            elif with_gradient:
                dense.append(everywhere)
        grads = [[_grad(of_one[number]) for of_one in dense] for number in range(len(self.devices))]
        if not dense:
            return
        if self._reduction == "native":
            for positions in buckets(grads[0]):
                chosen = [[own[i] for i in positions] for own in grads]
                flats = [flatten(own) for own in chosen]
                sum_on_first(flats)
                for own, flat in zip(chosen, flats, strict=True):
                    foreach_copy_(own, list(unflatten(flat, own)))
            return
        endpoints = thread_endpoints(len(self.devices), near(self.devices))
        errors = self._team.run(
            [
                partial(_reduce, self._reduction, own, endpoint, device)
                for own, endpoint, device in zip(grads, endpoints, self.devices, strict=True)
            ]
        )
        for error in sorted(filter(None, errors), key=lambda error: isinstance(error, ReplicaStopped)):
            raise error

    # --- phase 3

    def finish(self) -> None:
        super().finish()
        self._equal.send_changes(self._mirrored)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self.replicas.copies[0]]
        self._equal.note(parameters)  # gradients are clipped by now, on all replicas
        step_between_hooks(optimizer, partial(self._update, optimizer, parameters))
        self._equal.forget(parameters)

    def _update(self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], *args: Any, **kwargs: Any) -> None:
        self._equal.send_changes(self._mirrored)
        self.replicas.send_written()
        mirrors = self._mirrors_of(optimizer)
        before = GeneratorStates(self.devices[0])
        optimizer.step(*args, **kwargs)
        after = GeneratorStates(self.devices[0])
        for mirror in mirrors:
            before.restore_on(mirror.device)
            with on_device(mirror.device):
                mirror.optimizer.step(*args, **kwargs)
        after.restore_on(self.devices[0])
        self.replicas.note_equal(parameters)

    def _mirrors_of(self, optimizer: torch.optim.Optimizer) -> list[_Mirror]:
        """The optimizers of the further replicas, with the current options of the script's optimizer."""
        found = self._mirrors.get(optimizer)
        pairs = list(zip(self._mirrored, self.devices[1:], strict=True))
        if found is None or any(mirror.copies is not its for mirror, (its, _) in zip(found, pairs, strict=True)):
            found = self._mirrors[optimizer] = [
                _Mirror(optimizer_like(optimizer, its, device), its, device) for its, device in pairs
            ]
        for mirror in found:
            follow_groups(mirror.optimizer, optimizer, mirror.copies, mirror.device)
        return found

    # --- state

    def state_dict(self) -> dict[str, Any]:
        self.replicas.send_written()
        self._drift.check(self._mirrored, now=True)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._mirrors.clear()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._team.close()
        super().close()
        self._mirrors, self._hooks = {}, []
        self._equal, self._drift = _EqualGradients(), _DriftCheck()


class _Mirror(NamedTuple):
    """The optimizer of a replica other than the first."""

    optimizer: torch.optim.Optimizer
    copies: Mapping[Tensor, Tensor]  # the user's parameter -> the replica's parameter
    device: torch.device


class _EqualGradients:
    """Remembers the first replica's gradients, and their versions, when all replicas last had the same gradients."""

    def __init__(self) -> None:
        self._known: dict[Tensor, tuple[Tensor | None, int]] = {}  # parameter -> its gradient, version

    def note(self, parameters: Iterable[Tensor]) -> None:
        self._known.update((p, _versioned(p.grad)) for p in parameters)

    def note_none(self, parameters: Iterable[Tensor]) -> None:
        """Record that only the first replica has gradients: all of them must be sent."""
        self._known.update((p, (None, -1)) for p in parameters)

    def forget(self, parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            self._known.pop(p, None)

    @torch.no_grad()
    def send_changes(self, copies: Sequence[Mapping[Tensor, Tensor]]) -> None:
        """Apply the script's changes since then to the other replicas: send changed or replaced gradients, and remove
        removed gradients."""
        changed = []
        for p, (grad, version) in self._known.items():
            now, counted = _versioned(p.grad)
            if now is not grad or counted != version:
                changed.append(p)
        for of_one in copies:
            filled = []
            for p in changed:
                grad, its = p.grad, of_one[p]
                if grad is None or grad.is_sparse:
                    its.grad = None if grad is None else grad.to(its.device, copy=True)
                    continue
                if its.grad is None or its.grad.is_sparse:
                    its.grad = torch.empty_like(its)
                filled.append(p)
            copy_tensors([_grad(p) for p in filled], [_grad(of_one[p]) for p in filled])
        self.note(changed)


class _DriftCheck:
    """Compares the replicas' weights. On an accelerator `check` raises one call later, so that the host never waits."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}
        # On an accelerator: (for each parameter, whether replicas differ; event of the arrival of this result on the
        # host; the parameters).
        self._pending: tuple[Tensor, torch.Event, Iterable[Tensor]] | None = None

    @torch.no_grad()
    def check(self, copies: Sequence[Mapping[Tensor, Tensor]], now: bool = False) -> None:
        """Raises ModelError if weights differ. With `now`, or on a CPU, this call compares them and raises; otherwise
        the next call raises."""
        if self._pending is not None:
            found, event, compared = self._pending
            self._pending = None
            event.synchronize()
            self._raise_for(found, compared)
        parameters = list(copies[0])
        own = norms_of(parameters)
        found = torch.zeros(len(parameters), dtype=torch.bool, device=own.device)
        for of_one in copies:
            its = norms_of([of_one[p] for p in parameters]).to(own.device, non_blocking=own.device.type != "cpu")
            found |= ~torch.isclose(its, own, rtol=1e-12, atol=0.0, equal_nan=True)
        if now or found.device.type == "cpu":
            self._raise_for(found, parameters)
            return
        host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        host.copy_(found, non_blocking=True)
        event = torch.Event(device=found.device)
        event.record()
        self._pending = host, event, parameters

    def _raise_for(self, found: Tensor, parameters: Iterable[Tensor]) -> None:
        names = [self.names.get(p, "?") for p, differs in zip(parameters, found.tolist(), strict=True) if differs]
        if names:
            raise ModelError(
                f"the replicas differ in {listed(names)}: the script changed weights or gradients without autograd, "
                "as with p.data.clamp_(...) or p.grad.data.mul_(...), which reaches only the first replica; or an "
                "update depends on more than weights, gradient and state. Instead of .data write `with "
                "torch.no_grad(): p.clamp_(...)`, which reaches all replicas. Or use strategy='data_parallel', which "
                "sends weights for every step."
            )


def near(devices: Sequence[torch.device]) -> list[list[int]]:
    """Groups of device numbers for `hierarchical`. Devices in a group access each other's memory directly. If all
    devices do, or none, the groups are two halves."""
    groups: list[list[int]] = []
    for i, device in enumerate(devices):
        for group in groups:
            if device.type == "cuda" and all(torch.cuda.can_device_access_peer(device, devices[j]) for j in group):
                group.append(i)
                break
        else:
            groups.append([i])
    if len(groups) in (1, len(devices)):
        middle = (len(devices) + 1) // 2
        return [list(range(middle)), list(range(middle, len(devices)))]
    return groups


def _reduce(reduction: str, grads: list[Tensor], endpoint: ThreadEndpoint, device: torch.device) -> Exception | None:
    """Run one replica's reduction, in its thread. Returns an error, or None. The first replica that fails stops the
    others, which return ReplicaStopped."""
    try:
        with on_device(device):
            for positions in buckets(grads):
                chosen = [grads[i] for i in positions]
                flat = flatten(chosen)
                REDUCERS[reduction](flat, endpoint)
                foreach_copy_(chosen, list(unflatten(flat, chosen)))
    except Exception as error:
        endpoint.abandon()
        return error
    return None


def _add_up(of_one: Sequence[Tensor]) -> None:
    """Replace a sparse gradient by its sum, on all replicas. of_one: one parameter, on each replica."""
    first, *others = of_one
    total = None
    for p in of_one:
        if p.grad is not None:
            here = p.grad.to(first.device)
            total = here if total is None else total + here
    assert total is not None
    first.grad = total.coalesce() if total.is_sparse else total
    for other in others:
        other.grad = first.grad.to(other.device, copy=True)


def _grad(parameter: Tensor) -> Tensor:
    """The gradient; zeros if this replica has none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _versioned(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, -1 if grad is None else version_of(grad)
