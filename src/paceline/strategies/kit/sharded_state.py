"""Shared by the stages of fsdp: updates on shards, and state that is sharded in memory and whole in a checkpoint.

A master weight (named_parameters.py) is a DTensor here. Its local tensor is this rank's shard of the user's parameter,
in the same memory: an optimizer's writes change the parameter. Its `.grad` is the same shard of the parameter's
gradient. A DTensor has the whole parameter's shape and norm, so an optimizer that uses these (LAMB) makes the same
update as on the whole parameter. A 0-dim parameter cannot be sharded: its master is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from paceline.comm import dtensor
from paceline.comm.mesh import DATA, Mesh
from paceline.errors import UsageError
from paceline.strategies.kit.named_parameters import (
    in_place_of,
    load_replicated,
    names_with,
    parameter_names,
    read_stored,
    replicated_state,
)
from paceline.torch_private.distributed_tensor import set_local


class Masters:
    """The master weights of some parameters. All ranks add parameters in the same order."""

    def __init__(self, mesh: Mesh, memory: Callable[[Tensor], Tensor] = Tensor.detach, strategy: str = "fsdp") -> None:
        """memory: parameter -> the whole tensor that its master is a shard of. strategy: the name in messages."""
        self._mesh, self._memory, self._strategy = mesh, memory, strategy
        self.of: dict[Tensor, Tensor] = {}  # parameter -> master
        # parameter -> its master's gradient. Cached, since making a DTensor takes time. Between updates this gradient
        # shares the master's memory.
        self._gradients: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh of the data dimensions. Parameters are sharded over the last dimension."""
        return self._mesh.along(*(name for name in DATA if name in self._mesh.sizes))

    def add(self, parameter: Tensor) -> None:
        if parameter not in self.of:
            self.of[parameter] = self._slice(parameter)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Shard the optimizer's state and, until `close`, all state that a script loads into the optimizer.

        The optimizer's `state_dict` then holds shards.
        """
        self.shard_state(optimizer)
        contexts: list[Any] = []

        def before(_: torch.optim.Optimizer) -> None:
            contexts.append(in_place_of(optimizer, self.of))
            contexts[-1].__enter__()

        def after(_: torch.optim.Optimizer, __: dict[str, Any]) -> None:
            contexts.pop().__exit__(None, None, None)

        self._hooks += [
            optimizer.register_state_dict_pre_hook(before),
            optimizer.register_state_dict_post_hook(after),
            optimizer.register_load_state_dict_post_hook(self.shard_state),
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def shard_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the optimizer's state from the parameters to their masters, and shard state that is still whole."""
        for parameter, master in self.of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        shard_optimizer_state([(p, state) for p, state in optimizer.state.items() if dtensor.is_sharded(p)])

    def update(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Run the optimizer's step on shards. Return the parameters that are partly on other ranks."""
        updated = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p in self.of
        ]
        for p in updated:
            master, memory = self.of[p], self._memory(p)
            if dtensor.local(master).untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
                set_local(master, self.rows(memory))  # the script assigned p.data
            if p not in self._gradients:
                self._gradients[p] = self._slice(p)
            assert p.grad is not None
            set_local(self._gradients[p], self.rows(p.grad.detach()))
            master.grad = self._gradients[p]
        try:
            with in_place_of(optimizer, self.of):
                optimizer.step()
        except RuntimeError as error:
            if "placement" in str(error) or "DTensor" in str(error):
                raise UsageError(_no_rule(self._strategy, optimizer, error)) from error
            raise
        finally:
            for p in updated:
                self.of[p].grad = None
                set_local(self._gradients[p], dtensor.local(self.of[p]))
        return [p for p in updated if p.dim()]

    def rows(self, tensor: Tensor) -> Tensor:
        """This rank's rows of a whole tensor."""
        if not tensor.dim():
            return tensor
        last_dim = self.mesh.ndim - 1
        first, last = dtensor.rows_of(tensor.size(0), self.mesh.get_local_rank(last_dim), self.mesh.size(last_dim))
        return tensor[first:last]

    def _slice(self, parameter: Tensor) -> Tensor:
        """This rank's rows of a parameter, in its memory, as a DTensor."""
        made: Tensor = DTensor.from_local(
            self.rows(self._memory(parameter)),
            self.mesh,
            [*[Replicate()] * (self.mesh.ndim - 1), Shard(0) if parameter.dim() else Replicate()],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        return made


def _no_rule(strategy: str, optimizer: torch.optim.Optimizer, error: Exception) -> str:
    return (
        f"strategy {strategy}: {type(optimizer).__name__} uses an operation that torch's DTensor does not support on "
        f"shards: {str(error).splitlines()[0]} Use another optimizer (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, "
        "Adagrad, Adadelta, Adamax and ASGD of torch.optim work), or strategy='ddp'."
    )


def shard_optimizer_state(states: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
    """Shard optimizer state that is still whole, in place. states: pairs of a sharded parameter and its state.

    A tensor of the parameter's shape is sharded like the parameter. A tensor of a different shape, such as Adafactor's
    row means, is replicated, and DTensor then computes the same result as for whole tensors. Counters are unchanged.
    """
    counters = {
        key
        for p, state in states
        for key, value in state.items()
        if isinstance(value, Tensor) and not value.dim() and (p.dim() or key == "step")
    }
    for p, state in states:
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in counters and not dtensor.is_sharded(value):
                state[key] = dtensor.sharded_like(p, value)


def shard_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Pre-hook of `load_state_dict`: lets a script load whole tensors into sharded parameters."""
    for name, own in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or dtensor.is_sharded(value) or not dtensor.is_sharded(own):
            continue
        if value.shape == own.shape:  # otherwise torch reports the mismatch
            state[prefix + name] = dtensor.sharded_like(own, value)


def replace_parameters(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Replace whole parameters of an optimizer by the sharded parameters, and shard their state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in replaced]:
        optimizer.state[replaced[old]] = optimizer.state.pop(old)
    shard_optimizer_state([(p, state) for p, state in optimizer.state.items() if dtensor.is_sharded(p)])


def full_state(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], masters: Mapping[Tensor, Tensor]
) -> dict[str, Any]:
    """The whole state by name. Sharded tensors are whole on rank 0, and have no data on the other ranks. Collective."""
    made: dict[int, Tensor] = {}

    def whole(node: Any) -> Any:
        if dtensor.is_sharded(node):
            if id(node) not in made:  # tied weights stay one tensor
                made[id(node)] = dtensor.whole_on_main(node)
            return made[id(node)]
        if isinstance(node, dict):
            return {key: whole(value) for key, value in node.items()}
        return [whole(item) for item in node] if isinstance(node, list) else node

    state = replicated_state(models, optimizers, masters)
    return {kind: [whole(part) for part in parts] for kind, parts in state.items()}


def load_full_state(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    masters: Mapping[Tensor, Tensor],
    state: dict[str, Any],
) -> None:
    """Load a whole state, the same on every rank. Each process keeps only its shards.

    Of StoredTensors, each process reads only its shards.
    """
    names = names_with(parameter_names(models), masters)
    owns = {name: p for p, name in names.items() if dtensor.is_sharded(p)}
    optimizer_states = []
    for saved in state["optimizers"]:  # shard it first, so that whole optimizer state is never on the device
        copied = read_stored(saved["state"], owns)
        shard_optimizer_state([(owns[name], values) for name, values in copied.items() if name in owns])
        optimizer_states.append({**saved, "state": copied})
    whole = {**state, "optimizers": optimizer_states}
    load_replicated(models, optimizers, whole, masters)
