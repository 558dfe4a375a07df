"""What the stages of fsdp share: an update on shards, and state that is sharded in memory and whole in a checkpoint.

A master weight (replicated.py) is here a DTensor whose local tensor is this rank's shard of the user's own parameter.
It needs no memory of its own: what an optimizer writes to it stands in the parameter. Its gradient is the same shard of
the parameter's gradient. A DTensor has the whole parameter's shape and norm, so that an optimizer that uses these
(LAMB) makes the same update as of the whole. A 0-dim parameter is too small to shard: its master is replicated.
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
    replicated_state,
)
from paceline.torch_private.distributed_tensor import set_local


class Masters:
    """The master weights of some parameters, which are added in the same order on all ranks."""

    def __init__(self, mesh: Mesh, memory: Callable[[Tensor], Tensor] = Tensor.detach, strategy: str = "fsdp") -> None:
        """memory: of a parameter, the whole tensor whose rows its master is. strategy: its name for messages."""
        self._mesh, self._memory, self._strategy = mesh, memory, strategy
        self.of: dict[Tensor, Tensor] = {}  # parameter -> master
        # parameter -> what its master has for a gradient: made once, since torch takes some time to make a DTensor.
        # Between updates it has the parameter's own memory.
        self._gradients: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The data dimensions, over the last of which parameters are cut."""
        return self._mesh.along(*(name for name in DATA if name in self._mesh.sizes))

    def add(self, parameter: Tensor) -> None:
        if parameter not in self.of:
            self.of[parameter] = self._slice(parameter)

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Shards the state that the optimizer has, and, until `close`, what a script loads into it. The optimizer's own
        `state_dict` then holds shards."""
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
        """State of whole parameters becomes shards, which belong to the masters."""
        for parameter, master in self.of.items():
            if parameter in optimizer.state:
                optimizer.state[master] = optimizer.state.pop(parameter)
        shard_optimizer_state([(p, state) for p, state in optimizer.state.items() if dtensor.is_sharded(p)])

    def update(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """The optimizer's step on shards. Returns the parameters of which other ranks hold newer rows."""
        updated = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p in self.of
        ]
        for p in updated:
            master, memory = self.of[p], self._memory(p)
            if dtensor.local(master).untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
                set_local(master, self.rows(memory))  # p.data was set anew
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
        f"strategy {strategy}: {type(optimizer).__name__} computes something that torch's DTensor cannot compute on "
        f"slices: {str(error).splitlines()[0]} Use another optimizer (SGD, Adam, AdamW, NAdam, RAdam, RMSprop, "
        "Adagrad, Adadelta, Adamax and ASGD of torch.optim can), or strategy='ddp'."
    )


def shard_optimizer_state(states: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
    """Shards whole state, in place. states: pairs of a sharded parameter and its state.

    A tensor of the parameter's shape is sharded as the parameter is. One of another shape, such as Adafactor's row
    means, is replicated: DTensor computes with it as the optimizer would. Counters stay as they are.
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
    """A hook before `load_state_dict`: lets a script load whole tensors into sharded parameters."""
    for name, own in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor) or dtensor.is_sharded(value) or not dtensor.is_sharded(own):
            continue
        if value.shape == own.shape:  # else torch says which is wrong
            state[prefix + name] = dtensor.sharded_like(own, value)


def replace_parameters(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Puts sharded parameters in the place of the whole ones that they replace, and shards their state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for old in [p for p in optimizer.state if p in replaced]:
        optimizer.state[replaced[old]] = optimizer.state.pop(old)
    shard_optimizer_state([(p, state) for p, state in optimizer.state.items() if dtensor.is_sharded(p)])


def full_state(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], masters: Mapping[Tensor, Tensor]
) -> dict[str, Any]:
    """The whole state by name. What was sharded is whole on rank 0, and without memory on the others. Collective."""
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
    """Loads a whole state, the same on every rank, of which this process keeps its shards."""
    names = names_with(parameter_names(models), masters)
    owns = {name: p for p, name in names.items() if dtensor.is_sharded(p)}
    optimizer_states = []
    for saved in state["optimizers"]:  # sharded first, so that no optimizer's state lies whole on the device
        copied = {name: dict(values) for name, values in saved["state"].items()}
        shard_optimizer_state([(owns[name], values) for name, values in copied.items() if name in owns])
        optimizer_states.append({**saved, "state": copied})
    whole = {**state, "optimizers": optimizer_states}
    load_replicated(models, optimizers, whole, masters)
